// XLA FFI handler of paged_attention for many new tokens: checks of shapes and dtypes, choice of the kernel, launch.
//
// query is [batch, tokens, heads, size] and out the same with value_size, both sizes rounded up to a multiple of 8; sinks are one
// per head, [1 or batch, heads], and have no columns if absent. Of pages only the number of elements and four strides (page, token,
// head, batch) matter; values within the array of keys begin at `first_value` and have an empty array of their own.
#include <cmath>

#include "check_pages.h"
#include "hopper_launch.h"
#include "paged_prefill/launch.cuh"
#include "tensor_map.h"

namespace ejkernel::paged_prefill {
namespace {

constexpr const char* kName = "paged_attention";
constexpr int64_t kMaxKeys = int64_t{1} << 30, kVectorElements = 8;

int64_t padded(int64_t size) { return (size + kVectorElements - 1) / kVectorElements * kVectorElements; }

// Sizes beyond those of the arrays.
struct Sizes {
  int64_t key_heads, key_size, value_size, pages, page_size, pack;
};

ffi::Error CheckArrays(Array query, Array key_pages, Array value_pages, Array out, Floats lse, Floats sinks, Sizes sizes) {
  const ffi::DataType type = query.element_type();
  if (type != ffi::BF16 && type != ffi::F16) return Invalid(kName, "query must be bfloat16 or float16");
  if (key_pages.element_type() != type || value_pages.element_type() != type || out.element_type() != type)
    return Invalid(kName, "pages and out must be of the query's type");
  const Dims q = query.dimensions(), o = out.dimensions(), rows = lse.dimensions(), factors = sinks.dimensions();
  if (q.size() != 4 || o.size() != 4 || !std::equal(q.begin(), q.begin() + 3, o.begin())) {
    return Invalid(kName, "query must be [batch, tokens, heads, size] and out the same but for the last, got " + Text(q) +
                              " and " + Text(o));
  }
  if (sizes.key_size < 1 || sizes.value_size < 1 || std::max(q[3], o[3]) > flash_attention::kMaxHeadSize)
    return Invalid(kName, "heads must have 1 ... 256 elements, got " + Text(q) + " and " + Text(o));
  if (q[3] != padded(sizes.key_size) || o[3] != padded(sizes.value_size)) {
    return Invalid(kName, "heads of query and out must have key_size and value_size rounded up to a multiple of 8, got " +
                              Text(q) + " and " + Text(o));
  }
  if (sizes.key_heads < 1 || q[2] % sizes.key_heads)
    return Invalid(kName, "key_heads must divide the heads of query " + Text(q) + ", got " + std::to_string(sizes.key_heads));
  const int64_t group = q[2] / sizes.key_heads, pack = sizes.pack;
  if (pack < 1 || pack > flash_attention::kRows || (pack & (pack - 1)) || group % pack) {
    return Invalid(kName, "pack must be a power of two up to 64 that divides the " + std::to_string(group) +
                              " query heads of a key head, got " + std::to_string(pack));
  }
  if (lse.element_count() && !(rows.size() == 3 && std::equal(rows.begin(), rows.end(), q.begin())))
    return Invalid(kName, "lse must be [batch, tokens, heads] of query " + Text(q) + " or empty, got " + Text(rows));
  if (factors.size() != 2 || (factors[1] != 0 && (factors[1] != q[2] || !SharedOr(factors[0], q[0]))))
    return Invalid(kName, "sinks must be [1 or batch, 0 or " + std::to_string(q[2]) + "], got " + Text(factors));
  return ffi::Error::Success();
}

ffi::Error CheckPages(Dims query, Dims table, Sizes sizes, Strides key, Strides value) {
  if (sizes.pages < 1 || sizes.pages > kMaxGrid || sizes.page_size < 1 || sizes.page_size % kKeysOfBit) {
    return Invalid(kName, "needs pages whose size is a multiple of 8, got " + std::to_string(sizes.pages) + " of " +
                              std::to_string(sizes.page_size));
  }
  const auto whole = [](Strides strides) {
    return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % kVectorElements == 0; });
  };
  if (!whole(key) || !whole(value))
    return Invalid(kName, "strides of pages must be multiples of 8 elements, got " + Text(key) + " and " + Text(value));
  if (table[2] * sizes.page_size > kMaxKeys)
    return Invalid(kName, "tables name " + std::to_string(table[2] * sizes.page_size) + " keys, more than 2^30");
  const int64_t blocks = query[0] * (query[2] / sizes.pack) * (query[1] / (flash_attention::kRows / sizes.pack) + table[1] + 2);
  if (query[1] > flash_attention::kMaxTokens || blocks > flash_attention::kMaxBlocks)
    return Invalid(kName, "more than 2^27 tokens or 2^30 blocks of 64 queries");
  return ffi::Error::Success();
}

ffi::Error Check(Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths, Integers tables,
                 Floats sinks, Strides key_strides, Strides value_strides, int64_t first_value, int64_t key_heads,
                 int64_t key_size, int64_t value_size, int64_t pages, int64_t page_size, bool fused, bool, int64_t window,
                 float scale, float cap, int64_t pack, ffi::Result<Array> out, ffi::Result<Floats> lse) {
  const Sizes sizes{key_heads, key_size, value_size, pages, page_size, pack};
  EJKERNEL_TRY(CheckArrays(query, key_pages, value_pages, *out, *lse, sinks, sizes));
  const Dims dims = query.dimensions();
  EJKERNEL_TRY(CheckRequests(kName, dims[0], starts, lengths, tables));
  EJKERNEL_TRY(CheckStrides(kName, "key", key_strides, 0, dims[0], key_heads, key_size, key_pages, pages, page_size));
  EJKERNEL_TRY(CheckStrides(kName, "value", value_strides, first_value, dims[0], key_heads, value_size,
                            fused ? key_pages : value_pages, pages, page_size));
  EJKERNEL_TRY(CheckPages(dims, tables.dimensions(), sizes, key_strides, value_strides));
  if (first_value % kVectorElements) return Invalid(kName, "first_value must be a multiple of 8");
  if (window < 0 || window > kMaxKeys) return Invalid(kName, "window must be 0 ... 2^30, got " + std::to_string(window));
  if (!std::isfinite(scale) || !std::isfinite(cap) || cap < 0)
    return Invalid(kName, "scale and cap must be finite, and cap not negative");
  if (cap > 0 && query.element_type() == ffi::F16)
    return Invalid(kName, "cap needs bfloat16: its tanh is too inaccurate for float16");
  return ffi::Error::Success();
}

template <class S>
ffi::Error Attend(cudaStream_t stream, ffi::DataType type, const Call& call) {
  int64_t sms = 0;
  EJKERNEL_TRY(PrepareHopper<attend<S>>(kName, S::kShared + kExtraShared, sms));
  ffi::Error refused = ffi::Error::Success();
  const auto make_tensor_map = [&](const flash_attention::TensorMapSpec& spec) {
    CUtensorMap map{};
    if (!refused.failure()) {
      refused = MakeTensorMap(kName, type, spec.data, spec.size, spec.length, spec.heads, spec.batch, spec.box_tokens,
                              spec.box_heads, map);
    }
    return map;
  };
  const auto make_page_map = [&](const Pages& pages, const std::array<TensorMapAxis, 5>& axes) {
    CUtensorMap map{};
    const CUtensorMapDataType number = type == ffi::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const auto text = [&] { return "pages in TMA boxes of " + std::to_string(box_tokens_of<S>(call)) + " tokens"; };
    if (!refused.failure()) refused = EncodeTensorMap(kName, number, pages.data, axes, text, map);
    return map;
  };
  const Arguments arguments = arguments_of<S>(call, make_tensor_map, make_page_map);
  if (refused.failure()) return refused;
  const int64_t ctas = call.batch * ctas_of_member<S>(call);
  attend<S><<<unsigned(ctas), S::kThreads, S::kShared + kExtraShared, stream>>>(arguments);
  return CheckLaunch(kName, "launch");
}

ffi::Error Run(cudaStream_t stream, Array query, Array key_pages, Array value_pages, Integers starts, Integers lengths,
               Integers tables, Floats sinks, Strides key_strides, Strides value_strides, int64_t first_value,
               int64_t key_heads, int64_t key_size, int64_t value_size, int64_t pages, int64_t page_size, bool fused,
               bool causal, int64_t window, float scale, float cap, int64_t pack, ffi::Result<Array> out,
               ffi::Result<Floats> lse) {
  EJKERNEL_TRY(Check(query, key_pages, value_pages, starts, lengths, tables, sinks, key_strides, value_strides, first_value,
                     key_heads, key_size, value_size, pages, page_size, fused, causal, window, scale, cap, pack, out, lse));
  if (out->element_count() == 0) return ffi::Error::Success();
  const Dims dims = query.dimensions();
  const auto pages_of = [&](Array array, int64_t first, Strides strides, int64_t size) {
    return Pages{static_cast<const char*>(array.untyped_data()) + 2 * first, strides[0], strides[1], strides[2], strides[3], size};
  };
  const Call call{AsRequests(starts, lengths, tables, dims[1], pages, page_size),
                  pages_of(key_pages, 0, key_strides, key_size),
                  pages_of(fused ? key_pages : value_pages, first_value, value_strides, value_size),
                  query.untyped_data(),
                  out->untyped_data(),
                  lse->element_count() ? lse->typed_data() : nullptr,
                  sinks.element_count() ? sinks.typed_data() : nullptr,
                  sinks.dimensions()[0] > 1 ? dims[2] : 0,
                  dims[0],
                  dims[2],
                  key_heads,
                  dims[3],
                  out->dimensions()[3],
                  window,
                  pack,
                  scale,
                  cap,
                  causal,
                  dims[0] > 1 && key_strides[3] > 0};
  for (const void* data : {call.query, call.key.data, call.value.data, static_cast<const void*>(call.out)}) {
    if (!Aligned(data)) return Invalid(kName, "arrays must begin on 16 bytes");
  }
  const ffi::DataType type = query.element_type();
  const auto launch = [&]<class S>() { return Attend<S>(stream, type, call); };
  const int64_t size = std::max(call.size, call.value_size);
  return type == ffi::BF16 ? flash_attention::for_shape<__nv_bfloat16>(size, launch)
                           : flash_attention::for_shape<__half>(size, launch);
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
      .template Attr<Strides>("key_strides")
      .template Attr<Strides>("value_strides")
      .template Attr<int64_t>("first_value")
      .template Attr<int64_t>("key_heads")
      .template Attr<int64_t>("key_size")
      .template Attr<int64_t>("value_size")
      .template Attr<int64_t>("pages")
      .template Attr<int64_t>("page_size")
      .template Attr<bool>("fused")
      .template Attr<bool>("causal")
      .template Attr<int64_t>("window")
      .template Attr<float>("scale")
      .template Attr<float>("cap")
      .template Attr<int64_t>("pack")
      .template Ret<Array>()
      .template Ret<Floats>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_paged_prefill_forward, Bind, Run, Check)

}  // namespace ejkernel::paged_prefill
