// XLA FFI handler of flash_attention: checks of shapes and dtypes, choice of the kernel, launch.
//
// query is [batch, queries, heads, size], key [batch, keys, key heads, size], value [batch, keys, key heads, value size]; out
// is [batch, queries, heads, value size] and lse [batch, queries, heads], or [0] if it is not requested. Query i sees keys i -
// below ... i + above. The partial results of split-KV CTAs are results, too; their first axis bounds the number of CTAs. The
// kernel's arguments hold tensor maps with the arrays' addresses. A CUDA graph keeps the arguments that it recorded; XLA
// records a call again after a buffer's address has changed.
#include <array>
#include <tuple>

#include "flash_attention/launch.cuh"
#include "hopper_launch.h"
#include "launch.h"
#include "tensor_map.h"

namespace ejkernel::flash_attention {
namespace {

constexpr const char* kName = "flash_attention";
constexpr int64_t kMaxSplitKvCtas = int64_t{1} << 16;

ffi::Error CheckArrays(Array query, Array key, Array value) {
  const Dims q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  const ffi::DataType type = query.element_type();
  if (type != ffi::BF16 && type != ffi::F16) return Invalid(kName, "query must be bfloat16 or float16");
  if (key.element_type() != type || value.element_type() != type)
    return Invalid(kName, "key and value must have the query's type");
  if (q.size() != 4) return Invalid(kName, "query must be [batch, queries, heads, size], got " + Text(q));
  if (k.size() != 4 || k[0] != q[0] || k[3] != q[3]) {
    return Invalid(kName, "key must be [batch, keys, key heads, size] for query " + Text(q) + ", got " + Text(k));
  }
  if (v.size() != 4 || !std::equal(v.begin(), v.begin() + 3, k.begin())) {
    return Invalid(kName, "value must be [batch, keys, key heads, value size] for key " + Text(k) + ", got " + Text(v));
  }
  if (k[2] == 0 || q[2] % k[2]) {
    return Invalid(kName, "heads of query " + Text(q) + " must be a multiple of those of key " + Text(k));
  }
  if (k[1] == 0) return Invalid(kName, "key must have tokens, got " + Text(k));
  for (const int64_t size : {q[3], v[3]}) {
    if (size < 8 || size > kMaxHeadSize || size % 8) {
      return Invalid(kName, "head sizes must be multiples of 8 up to 256, got " + std::to_string(size));
    }
  }
  if (std::max(q[1], k[1]) > kMaxTokens) return Invalid(kName, "more than 2^27 tokens");
  if (q[0] * q[2] * ((q[1] + kRows - 1) / kRows) > kMaxBlocks) return Invalid(kName, "more than 2^30 blocks of 64 queries");
  return ffi::Error::Success();
}

// Partial results of as many CTAs as split blocks, or of none.
ffi::Error CheckPartials(ffi::DataType type, Dims query, Dims value, Dims partial, Dims partial_stats) {
  const auto shape_of = [&]<class S>() { return std::array<int64_t, 3>{2, S::kBlockQ, S::kSize}; };
  const int64_t head_size = std::max(query[3], value[3]);
  const auto wanted =
      type == ffi::BF16 ? for_shape<__nv_bfloat16>(head_size, shape_of) : for_shape<__half>(head_size, shape_of);
  if (partial.size() != 4 || partial[0] > kMaxSplitKvCtas || !std::equal(wanted.begin(), wanted.end(), partial.begin() + 1)) {
    return Invalid(kName, "partial must be [CTAs, 2, " + std::to_string(wanted[1]) + ", " + std::to_string(wanted[2]) +
                              "] with up to 2^16 CTAs, got " + Text(partial));
  }
  if (partial_stats.size() != 4 || partial_stats[3] != 2 ||
      !std::equal(partial.begin(), partial.end() - 1, partial_stats.begin())) {
    return Invalid(kName,
                   "partial_stats must be the first axes of partial " + Text(partial) + " and 2, got " + Text(partial_stats));
  }
  return ffi::Error::Success();
}

ffi::Error Check(Array query, Array key, Array value, int64_t below, int64_t above, float scale, float cap, int64_t pack, bool,
                 bool, ffi::Result<Array> out, ffi::Result<Floats> lse, ffi::Result<Floats> partial,
                 ffi::Result<Floats> partial_stats) {
  EJKERNEL_TRY(CheckArrays(query, key, value));
  const int64_t group = query.dimensions()[2] / key.dimensions()[2];
  if (pack < 1 || pack > kRows || (pack & (pack - 1)) || group % pack) {
    return Invalid(kName, "pack must be a power of two up to 64 that divides the " + std::to_string(group) +
                              " query heads of a key head, got " + std::to_string(pack));
  }
  const Dims q = query.dimensions(), o = out->dimensions(), rows = lse->dimensions();
  if (std::max(std::abs(below), std::abs(above)) > kMaxOffset) return Invalid(kName, "below and above must be within 2^30");
  if (!(cap >= 0.f)) return Invalid(kName, "cap must not be negative, got " + std::to_string(cap));
  if (cap > 0.f && query.element_type() == ffi::F16) {
    return Invalid(kName, "cap needs bfloat16: its tanh is too inaccurate for float16");
  }
  if (out->element_type() != query.element_type() || o.size() != 4 || !std::equal(o.begin(), o.begin() + 3, q.begin()) ||
      o[3] != value.dimensions()[3]) {
    return Invalid(kName, "out must be [batch, queries, heads, value size] of query " + Text(q) + " and value " +
                              Text(value.dimensions()) + ", got " + Text(o));
  }
  const bool absent = rows.size() == 1 && rows[0] == 0;
  if (!absent && (rows.size() != 3 || !std::equal(rows.begin(), rows.end(), q.begin()))) {
    return Invalid(kName, "lse must be [batch, queries, heads] of query " + Text(q) + " or [0], got " + Text(rows));
  }
  return CheckPartials(query.element_type(), q, value.dimensions(), partial->dimensions(), partial_stats->dimensions());
}

template <class S>
ffi::Error Attend(cudaStream_t stream, ffi::DataType type, const Call& call) {
  int64_t sms = 0;
  EJKERNEL_TRY(PrepareHopper<attend<S>>(kName, S::kShared, sms));
  ffi::Error refused = ffi::Error::Success();
  const auto make_tensor_map = [&](const TensorMapSpec& spec) {
    CUtensorMap map{};
    if (!refused.failure()) {
      refused = MakeTensorMap(kName, type, spec.data, spec.size, spec.length, spec.heads, spec.batch, spec.box_tokens,
                              spec.box_heads, map);
    }
    return map;
  };
  const Arguments arguments = arguments_of<S>(call, sms, make_tensor_map);
  if (refused.failure()) return refused;
  attend<S><<<arguments.ctas, S::kThreads, S::kShared, stream>>>(arguments);
  EJKERNEL_TRY(CheckLaunch(kName, "launch"));
  if (!arguments.stream_k.blocks) return ffi::Error::Success();
  Launch launch(stream, combine_blocks<S>(arguments), dim3(kCombineThreads), 0);
  launch.enable_programmatic_launch(combine<S>);
  cudaLaunchKernelEx(&launch.config, combine<S>, arguments, static_cast<typename S::T*>(call.out), int(call.value_size));
  return CheckLaunch(kName, "combine");
}

ffi::Error Run(cudaStream_t stream, Array query, Array key, Array value, int64_t below, int64_t above, float scale, float cap,
               int64_t pack, bool ping_pong, bool persistent, ffi::Result<Array> out, ffi::Result<Floats> lse,
               ffi::Result<Floats> partial, ffi::Result<Floats> partial_stats) {
  EJKERNEL_TRY(
      Check(query, key, value, below, above, scale, cap, pack, ping_pong, persistent, out, lse, partial, partial_stats));
  if (out->element_count() == 0) return ffi::Error::Success();
  for (const void* data : {query.untyped_data(), key.untyped_data(), value.untyped_data(), out->untyped_data(),
                           partial->untyped_data(), partial_stats->untyped_data()}) {
    if (!Aligned(data)) return Invalid(kName, "arrays must begin on 16 bytes");
  }
  const Dims q = query.dimensions(), v = value.dimensions();
  const Call call{query.untyped_data(),
                  key.untyped_data(),
                  value.untyped_data(),
                  out->untyped_data(),
                  lse->element_count() ? lse->typed_data() : nullptr,
                  {partial->typed_data(), reinterpret_cast<float2*>(partial_stats->typed_data())},
                  q[0],
                  q[1],
                  v[1],
                  q[2],
                  v[2],
                  q[3],
                  v[3],
                  below,
                  above,
                  pack,
                  partial->dimensions()[0],
                  scale,
                  cap,
                  ping_pong,
                  persistent};
  const ffi::DataType type = query.element_type();
  const auto launch = [&]<class S>() { return Attend<S>(stream, type, call); };
  const int64_t head_size = std::max(q[3], v[3]);
  return type == ffi::BF16 ? for_shape<__nv_bfloat16>(head_size, launch) : for_shape<__half>(head_size, launch);
}

template <typename Binding>
auto Bind(Binding binding) {
  return std::move(binding)
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Array>()
      .template Attr<int64_t>("below")
      .template Attr<int64_t>("above")
      .template Attr<float>("scale")
      .template Attr<float>("cap")
      .template Attr<int64_t>("pack")
      .template Attr<bool>("ping_pong")
      .template Attr<bool>("persistent")
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_flash_attention_forward, Bind, Run, Check)

}  // namespace ejkernel::flash_attention
