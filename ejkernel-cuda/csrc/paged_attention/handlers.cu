// XLA's door to paged_attention: checks of every shape and dtype, the choice of kernel, the launches.
//
// query is [batch, tokens, heads, the keys' size rounded up to a multiple of 4], and out the same with the values' size; sinks
// are one per head, [1 or batch, heads], and absent sinks and scales have no columns. Of pages only the number of elements and
// four strides (page, token, head, batch) matter; values that lie in the array of keys begin at `first_value` and have an empty
// array of their own. What workers leave for the merge lies in results too, so that it lives as long as a CUDA graph does; part
// says how many workers there may be, and how many key heads a tile has.
#include <array>
#include <bit>
#include <cmath>

#include "launch_rows.cuh"
#include "paged_attention/boxes.cuh"
#include "paged_attention/launch.h"
#include "paged_attention/merge.cuh"
#include "tensor_map.h"

namespace ejkernel::paged_attention {
namespace {

constexpr int64_t kMostKeys = int64_t{1} << 30, kMostWorkers = int64_t{1} << 20;

// Sizes, beside those of the arrays.
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

// A number for each of `count`, or one for all where `one` says that this may be, or none.
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
  if (query[3] < 1 || query[3] > kWidest || out[3] < 1 || out[3] > kWidest) {
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

// Key heads of a tile.
ffi::Error CheckTogether(int64_t together, bool boxes, Array stored, Dims query, Dims out, Sizes sizes) {
  const bool may = together == 1 || shares_heads(ffi::ByteWidth(stored.element_type()), int(std::max(query[3], out[3])));
  const bool some = together == 1 || together == 2 || (together == 4 && boxes);
  if (some && may && sizes.key_heads % together == 0) return ffi::Error::Success();
  return Invalid(kName,
                 "together must be 1, or for heads of up to 128 one-byte elements 2, or in boxes 4, and divide key_heads " +
                     std::to_string(sizes.key_heads) + ", got " + std::to_string(together));
}

// Whether heads of a token come one after the other in a box, or a box has one head, of tokens that lie closer than heads.
bool InBoxes(Strides strides, int64_t together) {
  const int64_t token = strides[1], head = strides[2];
  const bool whole = std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % kAccess == 0; });
  return whole && strides[0] >= std::max(token, head) && (token >= head || together == 1);
}

// Where pages are copied in boxes.
ffi::Error CheckBoxes(Array stored, Dims query, Dims out, Sizes sizes, Strides key, Strides value, int64_t together) {
  if (!IsOneByte(stored.element_type()) || query[3] != kHeadBytes || out[3] != kHeadBytes)
    return Invalid(kName, "boxes are of heads of 128 one-byte elements");
  if (query[2] / sizes.key_heads > kRows / 2) {
    return Invalid(kName, "boxes need key heads with up to 8 query heads each, got " + std::to_string(query[2]) + " over " +
                              std::to_string(sizes.key_heads));
  }
  if (sizes.pages < 1 || tokens_of_box(sizes.page_size) < kLeastOfBox) {
    return Invalid(kName, "boxes need pages whose size is a multiple of 8, got " + std::to_string(sizes.pages) + " of " +
                              std::to_string(sizes.page_size));
  }
  if (InBoxes(key, together) && InBoxes(value, together)) return ffi::Error::Success();
  return Invalid(kName,
                 "boxes need heads that lie closer than tokens, or together of 1, and strides that are multiples of 16, got " +
                     Text(key) + " and " + Text(value) + " with together " + std::to_string(together));
}

int KeysOfStep(Array stored, Dims query, Dims out) {
  return keys_of_step(ffi::ByteWidth(stored.element_type()), int(std::max(query[3], out[3])));
}

int PartsOfBlock(Array stored, Dims query, Dims out, int64_t group, int64_t together) {
  return parts_of_block(ffi::ByteWidth(stored.element_type()), room_for(int(std::max(query[3], out[3]))), group, together);
}

// What the schedule counts in 32 bits.
ffi::Error CheckCounts(Dims query, Dims table, Sizes sizes, int64_t together, int64_t step) {
  const int64_t keys = table[2] * sizes.page_size;
  if (keys > kMostKeys) return Invalid(kName, "tables name " + std::to_string(keys) + " keys, more than 2^30");
  const int64_t tiles = (query[2] / sizes.key_heads + kRows - 1) / kRows * (sizes.key_heads / together);
  const int64_t steps = query[0] * query[1] * tiles * ((keys + step - 1) / step + 1);
  if (steps > kMaxGrid || query[0] * table[1] > kMaxGrid / 2)
    return Invalid(kName, "more than 2^31 - 1 steps of keys, or 2^30 requests");
  return ffi::Error::Success();
}

// `parts` of a block, of so many rows.
ffi::Error CheckScratch(Dims query, Dims out, Floats lse, Dims part, Dims part_weight, Dims splits, int64_t parts,
                        int64_t rows) {
  const Dims saved = lse.dimensions();
  if (lse.element_count() && !(saved.size() == 3 && std::equal(saved.begin(), saved.end(), query.begin())))
    return Invalid(kName, "lse must be [batch, tokens, heads] of query " + Text(query) + " or empty, got " + Text(saved));
  const std::array<int64_t, 4> wanted{2, parts, rows, room_for(int(std::max(query[3], out[3])))};
  const bool fits = part.size() == 5 && part[0] >= 1 && part[0] <= kMostWorkers;
  if (!fits || !std::equal(wanted.begin(), wanted.end(), part.begin() + 1)) {
    return Invalid(kName, "part must be [workers, 2, " + std::to_string(parts) + ", " + std::to_string(rows) + ", " +
                              std::to_string(wanted[3]) + "] with up to 2^20 workers, got " + Text(part));
  }
  if (part_weight.size() != 5 || part_weight[4] != 2 || !std::equal(part_weight.begin(), part_weight.end() - 1, part.begin()))
    return Invalid(kName, "part_weight must be the first axes of part " + Text(part) + " and 2, got " + Text(part_weight));
  if (splits.size() != 2 || splits[0] != part[0] || splits[1] != 2)
    return Invalid(kName, "splits must be [workers, 2], got " + Text(splits));
  return ffi::Error::Success();
}

// What is read or written by several elements at once wherever heads' sizes let it.
ffi::Error CheckAligned(Array query, Array out, Floats part, Floats part_weight) {
  const void* const all[] = {query.untyped_data(), out.untyped_data(), part.untyped_data(), part_weight.untyped_data()};
  if (std::all_of(std::begin(all), std::end(all), [](const void* data) { return Aligned(data); })) return ffi::Error::Success();
  return Invalid(kName, "query, out, part and part_weight must begin at multiples of 16 bytes");
}

ffi::Error Check(Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths, Integers tables,
                 Floats sinks, Floats key_scale, Floats value_scale, Strides key_strides, Strides value_strides,
                 int64_t first_value, int64_t key_heads, int64_t key_size, int64_t pages, int64_t page_size, bool fused, bool,
                 int64_t window, float scale, float soft_cap, int64_t stages, int64_t together, bool boxes,
                 ffi::Result<Array> out, ffi::Result<Floats> lse, ffi::Result<Floats> part, ffi::Result<Floats> part_weight,
                 ffi::Result<Integers> splits) {
  const Sizes sizes{key_heads, key_size, pages, page_size};
  EJKERNEL_TRY(CheckTypes(query, key_pages, value_pages));
  if (out->element_type() != query.element_type()) return Invalid(kName, "out must be of the query's type");
  const Dims dims = query.dimensions(), found = out->dimensions();
  EJKERNEL_TRY(CheckSizes(dims, found, sizes));
  EJKERNEL_TRY(CheckRequests(kName, dims[0], starts, lengths, tables));
  EJKERNEL_TRY(CheckTogether(together, boxes, key_pages, dims, found, sizes));
  EJKERNEL_TRY(CheckCounts(dims, tables.dimensions(), sizes, together, KeysOfStep(key_pages, dims, found)));
  EJKERNEL_TRY(CheckFactors("sinks", sinks, dims[0], dims[2], false));
  EJKERNEL_TRY(CheckFactors("key_scale", key_scale, dims[0], key_heads, true));
  EJKERNEL_TRY(CheckFactors("value_scale", value_scale, dims[0], key_heads, true));
  EJKERNEL_TRY(CheckStrides(kName, "key", key_strides, 0, dims[0], key_heads, key_size, key_pages, pages, page_size));
  EJKERNEL_TRY(CheckStrides(kName, "value", value_strides, first_value, dims[0], key_heads, found[3],
                            fused ? key_pages : value_pages, pages, page_size));
  if (boxes) EJKERNEL_TRY(CheckBoxes(key_pages, dims, found, sizes, key_strides, value_strides, together));
  if (window < 0 || window > kMostKeys) return Invalid(kName, "window must be 0 ... 2^30, got " + std::to_string(window));
  if (!std::isfinite(scale) || !std::isfinite(soft_cap) || soft_cap < 0)
    return Invalid(kName, "scale and soft_cap must be finite, and soft_cap not negative");
  if (stages < kLeastStages || stages > kMaxStages)
    return Invalid(kName, "stages must be 2 ... 8, got " + std::to_string(stages));
  EJKERNEL_TRY(CheckAligned(query, *out, *part, *part_weight));
  const int64_t group = dims[2] / key_heads;
  return CheckScratch(dims, found, *lse, part->dimensions(), part_weight->dimensions(), splits->dimensions(),
                      PartsOfBlock(key_pages, dims, found, group, together), together * std::min<int64_t>(group, kRows));
}

Side AsSide(Array array, int64_t first, Strides strides, int64_t size) {
  const int64_t bytes = ffi::ByteWidth(array.element_type());
  const char* data = static_cast<const char*>(array.untyped_data()) + first * bytes;
  const auto whole = [&](int64_t count) { return count * bytes % kAccess == 0; };
  const bool counted = int64_t(array.size_bytes()) / kAccess < int64_t{kNowhere};
  const bool packed = Aligned(data) && counted && whole(size) && std::all_of(strides.begin(), strides.end(), whole);
  return {data, strides[0] * bytes, strides[1] * bytes, strides[2] * bytes, strides[3] * bytes, int(size), packed};
}

ffi::Error MakeRowMap(const Problem& problem, const Side& side, CUtensorMap& map) {
  const auto axes = axes_of(problem, side);
  const auto text = [&] {
    return std::to_string(problem.requests.pages) + " pages of " + std::to_string(problem.requests.page_size) +
           " tokens in boxes of " + std::to_string(axes[1].box) + " x " + std::to_string(axes[2].box);
  };
  return EncodeMap(kName, CU_TENSOR_MAP_DATA_TYPE_UINT64, side.data, axes, text, map);
}

ffi::Error MakeBoxes(const Problem& problem, Boxes& boxes) {
  if (!problem.key.packed || !problem.value.packed)
    return Invalid(kName, "boxes need pages that begin at multiples of 16 bytes");
  boxes.tokens = tokens_of_box(problem.requests.page_size);
  EJKERNEL_TRY(MakeRowMap(problem, problem.key, boxes.key));
  return MakeRowMap(problem, problem.value, boxes.value);
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

// The merge begins while the last workers write what they found, where the code that was loaded waits for them: that of 9.0 and
// newer. For both to be on a multiprocessor at once its memory must be divided as workers want it.
template <int LANES>
ffi::Error Merge(cudaStream_t stream, const Problem& problem, const Results& results, int workers, int parts) {
  auto kernel = merge<LANES>;
  const MergeShape shape(problem, room_for(std::max(problem.key.size, problem.value.size)), workers, LANES, parts);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  Launch launch(stream, int64_t(shape.tiles) * shape.blocks, dim3(kMergeThreads), 0);
  launch.begin_early(kernel);
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, divisor(uint32_t(workers)), shape);
  return CheckLaunch(kName, "merge");
}

int BatchStride(Floats factors) { return factors.dimensions()[0] > 1 ? int(factors.dimensions()[1]) : 0; }

ffi::Error RunForward(cudaStream_t stream, Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths,
                      Integers tables, Floats sinks, Floats key_scale, Floats value_scale, Strides key_strides,
                      Strides value_strides, int64_t first_value, int64_t key_heads, int64_t key_size, int64_t pages,
                      int64_t page_size, bool fused, bool causal, int64_t window, float scale, float soft_cap, int64_t stages,
                      int64_t together, bool in_boxes, ffi::Result<Array> out, ffi::Result<Floats> lse,
                      ffi::Result<Floats> part, ffi::Result<Floats> part_weight, ffi::Result<Integers> splits) {
  EJKERNEL_TRY(Check(query, key_pages, value_pages, starts, lengths, tables, sinks, key_scale, value_scale, key_strides,
                     value_strides, first_value, key_heads, key_size, pages, page_size, fused, causal, window, scale, soft_cap,
                     stages, together, in_boxes, out, lse, part, part_weight, splits));
  const Dims dims = query.dimensions();
  if (query.element_count() == 0) return ffi::Error::Success();
  const auto data = [](Floats factors) { return factors.element_count() ? factors.typed_data() : nullptr; };
  const auto per_head = [](Floats factors) { return factors.dimensions()[1] > 1 ? 1 : 0; };
  const int64_t group = dims[2] / key_heads;
  const Call call{AsRequests(starts, lengths, tables, dims[1], pages, page_size),
                  query.untyped_data(),
                  AsSide(key_pages, 0, key_strides, key_size),
                  AsSide(fused ? key_pages : value_pages, first_value, value_strides, out->dimensions()[3]),
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
                  int(key_heads / together),
                  int(together),
                  int(window),
                  scale,
                  soft_cap,
                  causal,
                  query.element_type() == ffi::BF16,
                  std::countr_zero(unsigned(KeysOfStep(key_pages, dims, out->dimensions())))};
  const Problem problem(call);
  const Results results{out->untyped_data(), lse->element_count() ? lse->typed_data() : nullptr, part->typed_data(),
                        reinterpret_cast<float2*>(part_weight->typed_data()), reinterpret_cast<Split*>(splits->typed_data())};
  Boxes boxes{};
  if (in_boxes) EJKERNEL_TRY(MakeBoxes(problem, boxes));
  const Knobs knobs{stages, part->dimensions()[0], in_boxes ? &boxes : nullptr};
  int workers = 0;
  EJKERNEL_TRY(AttendStored(stream, key_pages.element_type(), problem, results, knobs, workers));
  const int parts = PartsOfBlock(key_pages, dims, out->dimensions(), group, together);
  return lanes_of_part(problem, workers) == 32 ? Merge<32>(stream, problem, results, workers, parts)
                                               : Merge<8>(stream, problem, results, workers, parts);
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
      .template Attr<int64_t>("together")
      .template Attr<bool>("boxes")
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Integers>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_paged_attention_forward, Bind, RunForward, Check)

}  // namespace ejkernel::paged_attention
