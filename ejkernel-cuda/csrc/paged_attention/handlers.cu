// XLA FFI handler of paged_attention: checks of shapes and dtypes, choice of the kernel, launches.
//
// query is [batch, tokens, heads, the keys' size rounded up to a multiple of 4], and out the same with the values' size; sinks
// are one per head, [1 or batch, heads]; absent sinks and scales have no columns. Of pages only the number of elements and four
// strides (page, token, head, batch) matter; values within the array of keys begin at `first_value` and have an empty array of
// their own. The workers' partial results are results, too, so that they live as long as a CUDA graph does; their first axis
// bounds the number of workers.
#include <array>
#include <bit>
#include <cmath>

#include "launch_rows.cuh"
#include "paged_attention/tma_pages.cuh"
#include "paged_attention/launch.h"
#include "paged_attention/combine.cuh"
#include "tensor_map.h"

namespace ejkernel::paged_attention {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30, kMaxWorkers = int64_t{1} << 20;

// Sizes beyond those of the arrays.
struct Sizes {
  int64_t key_heads, key_size, pages, page_size;
};

ffi::Error CheckTypes(Array query, Array key_pages, Array value_pages) {
  const ffi::DataType type = query.element_type(), stored = key_pages.element_type();
  if (type != ffi::BF16 && type != ffi::F16) return Invalid(kName, "query must be bfloat16 or float16");
  if (stored != type && !IsOneByte(stored)) {
    return Invalid(kName, "pages must be of the query's type, int8, float8_e4m3fn or float8_e5m2");
  }
  if (value_pages.element_type() != stored) return Invalid(kName, "key and value pages must have one type");
  return ffi::Error::Success();
}

// One factor for each of `count`, or one for all if `one` allows it, or none.
ffi::Error CheckFactors(const char* name, Floats factors, int64_t batch, int64_t count, bool one) {
  const Dims dims = factors.dimensions();
  if (dims.size() == 2 && (dims[1] == 0 || (SharedOr(dims[0], batch) && (dims[1] == count || (one && dims[1] == 1))))) {
    return ffi::Error::Success();
  }
  return Invalid(kName, std::string(name) + " must be [1 or batch, 0" + (one ? ", 1" : "") + " or " + std::to_string(count) +
                            "], got " + Text(dims));
}

ffi::Error CheckSizes(Dims query, Dims out, Sizes sizes) {
  const bool like = query.size() == 4 && out.size() == 4 && std::equal(query.begin(), query.begin() + 3, out.begin());
  if (!like) {
    return Invalid(kName, "query must be [batch, tokens, heads, size] and out the same but for the last, got " + Text(query) +
                              " and " + Text(out));
  }
  if (query[3] < 1 || query[3] > kMaxHeadSize || out[3] < 1 || out[3] > kMaxHeadSize) {
    return Invalid(kName, "heads must have 1 ... 256 elements, got " + Text(query) + " and " + Text(out));
  }
  if (sizes.key_size < 1 || query[3] != (sizes.key_size + kQueryPack - 1) / kQueryPack * kQueryPack) {
    return Invalid(kName, "query " + Text(query) + " must have key_size rounded up to a multiple of 4, got " +
                              std::to_string(sizes.key_size));
  }
  if (sizes.key_heads < 1 || query[2] % sizes.key_heads) {
    return Invalid(kName,
                   "key_heads must divide the heads of query " + Text(query) + ", got " + std::to_string(sizes.key_heads));
  }
  if (query[0] * query[1] * query[2] > kMaxGrid) return Invalid(kName, "more than 2^31 - 1 heads of tokens");
  if (sizes.pages < 0 || sizes.pages > kMaxGrid || sizes.page_size < 1)
    return Invalid(kName, "page_size must be positive, and pages 0 ... 2^31 - 1");
  return ffi::Error::Success();
}

// Check the number of key heads of a tile.
ffi::Error CheckTileKeyHeads(int64_t tile_key_heads, bool tma, Array stored, Dims query, Dims out, Sizes sizes) {
  const bool may =
      tile_key_heads == 1 || allows_multi_head(ffi::ByteWidth(stored.element_type()), int(std::max(query[3], out[3])));
  const bool some = tile_key_heads == 1 || tile_key_heads == 2 || (tile_key_heads == 4 && tma);
  if (some && may && sizes.key_heads % tile_key_heads == 0) return ffi::Error::Success();
  return Invalid(
      kName, "tile_key_heads must be 1, or for one-byte heads of up to 128 elements 2, or with TMA 4, and divide key_heads " +
                 std::to_string(sizes.key_heads) + ", got " + std::to_string(tile_key_heads));
}

// Whether TMA boxes fit the strides: a box has adjacent heads of a token, or one head if the tokens of a head are closer than
// the heads.
bool FitsTma(Strides strides, int64_t tile_key_heads) {
  const int64_t token = strides[1], head = strides[2];
  const bool whole = std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % kVectorBytes == 0; });
  return whole && strides[0] >= std::max(token, head) && (token >= head || tile_key_heads == 1);
}

// Check a call with TMA loads.
ffi::Error CheckTma(Array stored, Dims query, Dims out, Sizes sizes, Strides key, Strides value, int64_t tile_key_heads) {
  if (!IsOneByte(stored.element_type()) || query[3] != kHeadBytes || out[3] != kHeadBytes)
    return Invalid(kName, "TMA needs one-byte heads of 128 elements");
  if (query[2] / sizes.key_heads > kRows / 2) {
    return Invalid(kName, "TMA needs at most 8 query heads per key head, got " + std::to_string(query[2]) + " over " +
                              std::to_string(sizes.key_heads));
  }
  if (sizes.pages < 1 || box_tokens_for(sizes.page_size) < kMinBoxTokens) {
    return Invalid(kName, "TMA needs pages whose size is a multiple of 8, got " + std::to_string(sizes.pages) + " of " +
                              std::to_string(sizes.page_size));
  }
  if (FitsTma(key, tile_key_heads) && FitsTma(value, tile_key_heads)) return ffi::Error::Success();
  return Invalid(
      kName, "TMA needs token strides above head strides, or tile_key_heads of 1, and strides that are multiples of 16, got " +
                 Text(key) + " and " + Text(value) + " with tile_key_heads " + std::to_string(tile_key_heads));
}

int KeysPerStep(Array stored, Dims query, Dims out) {
  return keys_per_step(ffi::ByteWidth(stored.element_type()), int(std::max(query[3], out[3])));
}

int PartialsPerBlock(Array stored, Dims query, Dims out, int64_t group, int64_t tile_key_heads) {
  return partials_per_block(ffi::ByteWidth(stored.element_type()), padded_head_size(int(std::max(query[3], out[3]))), group,
                            tile_key_heads);
}

// Check the 32-bit counters of the schedule.
ffi::Error CheckCounts(Dims query, Dims table, Sizes sizes, int64_t tile_key_heads, int64_t step) {
  const int64_t keys = table[2] * sizes.page_size;
  if (keys > kMaxKeys) return Invalid(kName, "tables name " + std::to_string(keys) + " keys, more than 2^30");
  const int64_t tiles = (query[2] / sizes.key_heads + kRows - 1) / kRows * (sizes.key_heads / tile_key_heads);
  const int64_t steps = query[0] * query[1] * tiles * ((keys + step - 1) / step + 1);
  if (steps > kMaxGrid || query[0] * table[1] > kMaxGrid / 2)
    return Invalid(kName, "more than 2^31 - 1 steps of keys, or 2^30 requests");
  return ffi::Error::Success();
}

// `partials` partial results per tile of a worker, of so many rows.
ffi::Error CheckScratch(Dims query, Dims out, Floats lse, Dims partial, Dims partial_stats, Dims splits, int64_t partials,
                        int64_t rows) {
  const Dims saved = lse.dimensions();
  if (lse.element_count() && !(saved.size() == 3 && std::equal(saved.begin(), saved.end(), query.begin())))
    return Invalid(kName, "lse must be [batch, tokens, heads] of query " + Text(query) + " or empty, got " + Text(saved));
  const std::array<int64_t, 4> wanted{2, partials, rows, padded_head_size(int(std::max(query[3], out[3])))};
  const bool fits = partial.size() == 5 && partial[0] >= 1 && partial[0] <= kMaxWorkers;
  if (!fits || !std::equal(wanted.begin(), wanted.end(), partial.begin() + 1)) {
    return Invalid(kName, "partial must be [workers, 2, " + std::to_string(partials) + ", " + std::to_string(rows) + ", " +
                              std::to_string(wanted[3]) + "] with up to 2^20 workers, got " + Text(partial));
  }
  if (partial_stats.size() != 5 || partial_stats[4] != 2 ||
      !std::equal(partial_stats.begin(), partial_stats.end() - 1, partial.begin()))
    return Invalid(kName,
                   "partial_stats must be the first axes of partial " + Text(partial) + " and 2, got " + Text(partial_stats));
  if (splits.size() != 2 || splits[0] != partial[0] || splits[1] != 2)
    return Invalid(kName, "splits must be [workers, 2], got " + Text(splits));
  return ffi::Error::Success();
}

// Check the alignment of arrays with vector accesses.
ffi::Error CheckAligned(Array query, Array out, Floats partial, Floats partial_stats) {
  const void* const all[] = {query.untyped_data(), out.untyped_data(), partial.untyped_data(), partial_stats.untyped_data()};
  if (std::all_of(std::begin(all), std::end(all), [](const void* data) { return Aligned(data); })) return ffi::Error::Success();
  return Invalid(kName, "query, out, partial and partial_stats must begin at multiples of 16 bytes");
}

ffi::Error Check(Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths, Integers tables,
                 Floats sinks, Floats key_scale, Floats value_scale, Strides key_strides, Strides value_strides,
                 int64_t first_value, int64_t key_heads, int64_t key_size, int64_t pages, int64_t page_size, bool fused, bool,
                 int64_t window, float scale, float soft_cap, int64_t stages, int64_t tile_key_heads, bool tma,
                 ffi::Result<Array> out, ffi::Result<Floats> lse, ffi::Result<Floats> partial,
                 ffi::Result<Floats> partial_stats, ffi::Result<Integers> splits) {
  const Sizes sizes{key_heads, key_size, pages, page_size};
  EJKERNEL_TRY(CheckTypes(query, key_pages, value_pages));
  if (out->element_type() != query.element_type()) return Invalid(kName, "out must be of the query's type");
  const Dims dims = query.dimensions(), found = out->dimensions();
  EJKERNEL_TRY(CheckSizes(dims, found, sizes));
  EJKERNEL_TRY(CheckRequests(kName, dims[0], starts, lengths, tables));
  EJKERNEL_TRY(CheckTileKeyHeads(tile_key_heads, tma, key_pages, dims, found, sizes));
  EJKERNEL_TRY(CheckCounts(dims, tables.dimensions(), sizes, tile_key_heads, KeysPerStep(key_pages, dims, found)));
  EJKERNEL_TRY(CheckFactors("sinks", sinks, dims[0], dims[2], false));
  EJKERNEL_TRY(CheckFactors("key_scale", key_scale, dims[0], key_heads, true));
  EJKERNEL_TRY(CheckFactors("value_scale", value_scale, dims[0], key_heads, true));
  EJKERNEL_TRY(CheckStrides(kName, "key", key_strides, 0, dims[0], key_heads, key_size, key_pages, pages, page_size));
  EJKERNEL_TRY(CheckStrides(kName, "value", value_strides, first_value, dims[0], key_heads, found[3],
                            fused ? key_pages : value_pages, pages, page_size));
  if (tma) EJKERNEL_TRY(CheckTma(key_pages, dims, found, sizes, key_strides, value_strides, tile_key_heads));
  if (window < 0 || window > kMaxKeys) return Invalid(kName, "window must be 0 ... 2^30, got " + std::to_string(window));
  if (!std::isfinite(scale) || !std::isfinite(soft_cap) || soft_cap < 0)
    return Invalid(kName, "scale and soft_cap must be finite, and soft_cap not negative");
  if (stages < kMinStages || stages > kMaxStages)
    return Invalid(kName, "stages must be 2 ... 8, got " + std::to_string(stages));
  EJKERNEL_TRY(CheckAligned(query, *out, *partial, *partial_stats));
  const int64_t group = dims[2] / key_heads;
  return CheckScratch(dims, found, *lse, partial->dimensions(), partial_stats->dimensions(), splits->dimensions(),
                      PartialsPerBlock(key_pages, dims, found, group, tile_key_heads),
                      tile_key_heads * std::min<int64_t>(group, kRows));
}

KvArray AsKvArray(Array array, int64_t first, Strides strides, int64_t size) {
  const int64_t bytes = ffi::ByteWidth(array.element_type());
  const char* data = static_cast<const char*>(array.untyped_data()) + first * bytes;
  const auto whole = [&](int64_t count) { return count * bytes % kVectorBytes == 0; };
  const bool counted = int64_t(array.size_bytes()) / kVectorBytes < int64_t{kNoRow};
  const bool packed = Aligned(data) && counted && whole(size) && std::all_of(strides.begin(), strides.end(), whole);
  return {data, strides[0] * bytes, strides[1] * bytes, strides[2] * bytes, strides[3] * bytes, int(size), packed};
}

ffi::Error MakePageTensorMap(const Problem& problem, const KvArray& kv, CUtensorMap& map) {
  const auto axes = tensor_map_axes(problem, kv);
  const auto text = [&] {
    return std::to_string(problem.requests.pages) + " pages of " + std::to_string(problem.requests.page_size) +
           " tokens in TMA boxes of " + std::to_string(axes[1].box) + " x " + std::to_string(axes[2].box);
  };
  return EncodeTensorMap(kName, CU_TENSOR_MAP_DATA_TYPE_UINT64, kv.data, axes, text, map);
}

ffi::Error MakeTmaPages(const Problem& problem, TmaPages& tma) {
  if (!problem.key.packed || !problem.value.packed)
    return Invalid(kName, "TMA needs pages that begin at multiples of 16 bytes");
  tma.box_tokens = box_tokens_for(problem.requests.page_size);
  EJKERNEL_TRY(MakePageTensorMap(problem, problem.key, tma.key));
  return MakePageTensorMap(problem, problem.value, tma.value);
}

ffi::Error AttendStored(cudaStream_t stream, ffi::DataType stored, const Problem& problem, const Results& results, Knobs knobs,
                        int& workers) {
  switch (stored) {
    case ffi::S8: return Attend<__half, Int8>(stream, problem, results, knobs, workers);
    case ffi::F8E4M3FN: return Attend<__half, E4M3>(stream, problem, results, knobs, workers);
    case ffi::F8E5M2: return Attend<__half, E5M2>(stream, problem, results, knobs, workers);
    case ffi::BF16: return Attend<__nv_bfloat16, __nv_bfloat16>(stream, problem, results, knobs, workers);
    default: return Attend<__half, __half>(stream, problem, results, knobs, workers);
  }
}

// With code of 9.0 and newer, the combine kernel starts while the last workers still write. To run beside them on a
// multiprocessor it must ask for their shared memory carveout.
template <int LANES>
ffi::Error Combine(cudaStream_t stream, const Problem& problem, const Results& results, int workers, int partials) {
  auto kernel = combine<LANES>;
  const CombineShape shape(problem, padded_head_size(std::max(problem.key.size, problem.value.size)), workers, LANES, partials);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  Launch launch(stream, int64_t(shape.tiles) * shape.blocks, dim3(kCombineThreads), 0);
  launch.enable_programmatic_launch(kernel);
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, divisor(uint32_t(workers)), shape);
  return CheckLaunch(kName, "combine");
}

int BatchStride(Floats factors) { return factors.dimensions()[0] > 1 ? int(factors.dimensions()[1]) : 0; }

ffi::Error RunForward(cudaStream_t stream, Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths,
                      Integers tables, Floats sinks, Floats key_scale, Floats value_scale, Strides key_strides,
                      Strides value_strides, int64_t first_value, int64_t key_heads, int64_t key_size, int64_t pages,
                      int64_t page_size, bool fused, bool causal, int64_t window, float scale, float soft_cap, int64_t stages,
                      int64_t tile_key_heads, bool use_tma, ffi::Result<Array> out, ffi::Result<Floats> lse,
                      ffi::Result<Floats> partial, ffi::Result<Floats> partial_stats, ffi::Result<Integers> splits) {
  EJKERNEL_TRY(Check(query, key_pages, value_pages, starts, lengths, tables, sinks, key_scale, value_scale, key_strides,
                     value_strides, first_value, key_heads, key_size, pages, page_size, fused, causal, window, scale, soft_cap,
                     stages, tile_key_heads, use_tma, out, lse, partial, partial_stats, splits));
  const Dims dims = query.dimensions();
  if (query.element_count() == 0) return ffi::Error::Success();
  const auto data = [](Floats factors) { return factors.element_count() ? factors.typed_data() : nullptr; };
  const auto per_head = [](Floats factors) { return factors.dimensions()[1] > 1 ? 1 : 0; };
  const int64_t group = dims[2] / key_heads;
  const Call call{AsRequests(starts, lengths, tables, dims[1], pages, page_size),
                  query.untyped_data(),
                  AsKvArray(key_pages, 0, key_strides, key_size),
                  AsKvArray(fused ? key_pages : value_pages, first_value, value_strides, out->dimensions()[3]),
                  data(sinks),
                  data(key_scale),
                  data(value_scale),
                  BatchStride(sinks),
                  BatchStride(key_scale),
                  per_head(key_scale),
                  BatchStride(value_scale),
                  per_head(value_scale),
                  int(dims[0]),
                  int(dims[2]),
                  int(dims[3]),
                  int(group),
                  int((group + kRows - 1) / kRows),
                  int(key_heads / tile_key_heads),
                  int(tile_key_heads),
                  int(window),
                  scale,
                  soft_cap,
                  causal,
                  query.element_type() == ffi::BF16,
                  std::countr_zero(unsigned(KeysPerStep(key_pages, dims, out->dimensions())))};
  const Problem problem(call);
  const Results results{out->untyped_data(), lse->element_count() ? lse->typed_data() : nullptr, partial->typed_data(),
                        reinterpret_cast<float2*>(partial_stats->typed_data()), reinterpret_cast<Split*>(splits->typed_data())};
  TmaPages tma{};
  if (use_tma) EJKERNEL_TRY(MakeTmaPages(problem, tma));
  const Knobs knobs{stages, partial->dimensions()[0], use_tma ? &tma : nullptr};
  int workers = 0;
  EJKERNEL_TRY(AttendStored(stream, key_pages.element_type(), problem, results, knobs, workers));
  const int partials = PartialsPerBlock(key_pages, dims, out->dimensions(), group, tile_key_heads);
  return lanes_per_partial(problem, workers) == 32 ? Combine<32>(stream, problem, results, workers, partials)
                                                   : Combine<8>(stream, problem, results, workers, partials);
}

template <typename Binding>
auto Bind(Binding binding) {
  return std::move(binding)
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Floats>()
      .template Arg<Floats>()
      .template Arg<Floats>()
      .template Attr<Strides>("key_strides")
      .template Attr<Strides>("value_strides")
      .template Attr<int64_t>("first_value")
      .template Attr<int64_t>("key_heads")
      .template Attr<int64_t>("key_size")
      .template Attr<int64_t>("pages")
      .template Attr<int64_t>("page_size")
      .template Attr<bool>("fused")
      .template Attr<bool>("causal")
      .template Attr<int64_t>("window")
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int64_t>("stages")
      .template Attr<int64_t>("tile_key_heads")
      .template Attr<bool>("tma")
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Integers>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_paged_attention_forward, Bind, RunForward, Check)

}  // namespace ejkernel::paged_attention
