// XLA's door to flash_attention: checks of every shape and dtype, the choice of kernel, the launch.
//
// query is [batch, queries, heads, size], key [batch, keys, key heads, size], value [batch, keys, key heads, value size]; out
// is [batch, queries, heads, value size] and lse [batch, queries, heads], or [0] where nobody wants it. Query i sees keys i -
// below ... i + above. What programs that share blocks leave for the merge lies in results too; part says how many they may be.
// The kernel's arguments hold descriptions of the arrays with their addresses. A CUDA graph keeps them as they were when it was
// recorded; XLA records a call anew when the address of a buffer has changed since.
#include <array>
#include <map>
#include <mutex>
#include <tuple>

#include "flash_attention/launch.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace ejkernel::flash_attention {
namespace {

constexpr const char* kName = "flash_attention";
constexpr int64_t kMostSharers = int64_t{1} << 16;

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
    if (size < 8 || size > kWidest || size % 8) {
      return Invalid(kName, "head sizes must be multiples of 8 up to 256, got " + std::to_string(size));
    }
  }
  if (std::max(q[1], k[1]) > kMostTokens) return Invalid(kName, "more than 2^27 tokens");
  if (q[0] * q[2] * ((q[1] + kRows - 1) / kRows) > kMostBlocks) return Invalid(kName, "more than 2^30 blocks of 64 queries");
  return ffi::Error::Success();
}

// Of as many programs as share blocks, or of none.
ffi::Error CheckParts(ffi::DataType type, Dims query, Dims value, Dims part, Dims part_weight) {
  const auto shape_of = [&]<class S>() { return std::array<int64_t, 3>{2, S::kBlockQ, S::kSize}; };
  const int64_t widest = std::max(query[3], value[3]);
  const auto wanted = type == ffi::BF16 ? for_shape<__nv_bfloat16>(widest, shape_of) : for_shape<__half>(widest, shape_of);
  if (part.size() != 4 || part[0] > kMostSharers || !std::equal(wanted.begin(), wanted.end(), part.begin() + 1)) {
    return Invalid(kName, "part must be [programs, 2, " + std::to_string(wanted[1]) + ", " + std::to_string(wanted[2]) +
                              "] with up to 2^16 programs, got " + Text(part));
  }
  if (part_weight.size() != 4 || part_weight[3] != 2 || !std::equal(part.begin(), part.end() - 1, part_weight.begin())) {
    return Invalid(kName, "part_weight must be the first axes of part " + Text(part) + " and 2, got " + Text(part_weight));
  }
  return ffi::Error::Success();
}

ffi::Error Check(Array query, Array key, Array value, int64_t below, int64_t above, float scale, float cap, int64_t pack, bool,
                 bool, ffi::Result<Array> out, ffi::Result<Floats> lse, ffi::Result<Floats> part,
                 ffi::Result<Floats> part_weight) {
  EJKERNEL_TRY(CheckArrays(query, key, value));
  const int64_t group = query.dimensions()[2] / key.dimensions()[2];
  if (pack < 1 || pack > kRows || (pack & (pack - 1)) || group % pack) {
    return Invalid(kName, "pack must be a power of two up to 64 that divides the " + std::to_string(group) +
                              " query heads of a key head, got " + std::to_string(pack));
  }
  const Dims q = query.dimensions(), o = out->dimensions(), rows = lse->dimensions();
  if (std::max(std::abs(below), std::abs(above)) > kFarthest) return Invalid(kName, "below and above must be within 2^30");
  if (!(cap >= 0.f)) return Invalid(kName, "cap must not be negative, got " + std::to_string(cap));
  if (cap > 0.f && query.element_type() == ffi::F16) {
    return Invalid(kName, "cap needs bfloat16: its tangent is too rough for float16");
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
  return CheckParts(query.element_type(), q, value.dimensions(), part->dimensions(), part_weight->dimensions());
}

// Multiprocessors of the device, which has seen this kernel before or is told now that it wants so much shared memory.
template <class S>
ffi::Error Prepare(int64_t& processors) {
  static std::mutex mutex;
  static std::map<int, int> known;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = known.try_emplace(device, 0);
  if (is_new) {
    int major = 0, minor = 0, count = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    cudaFuncAttributes code{};
    cudaFuncGetAttributes(&code, attend<S>);
    // A device of capability 9.0 may be given code of 8.0 where the library was built without 9.0a: without this kernel.
    const bool fits = major == 9 && minor == 0 && code.binaryVersion == 90;
    if (fits) cudaFuncSetAttribute(attend<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared);
    if (ffi::Error failed = CheckLaunch(kName, "preparation"); failed.failure()) {
      known.erase(at);
      return failed;
    }
    at->second = fits ? count : -1;
  }
  if (at->second < 0) {
    return Invalid(kName, "needs a device of compute capability 9.0 and a library built for sm_90a");
  }
  processors = at->second;
  return ffi::Error::Success();
}

template <class S>
ffi::Error Attend(cudaStream_t stream, ffi::DataType type, const Call& call) {
  int64_t processors = 0;
  EJKERNEL_TRY(Prepare<S>(processors));
  ffi::Error refused = ffi::Error::Success();
  const auto make_map = [&](const Boxes& boxes) {
    CUtensorMap map{};
    if (!refused.failure()) {
      refused = MakeMap(kName, type, boxes.data, boxes.size, boxes.length, boxes.heads, boxes.batch, boxes.tokens,
                        boxes.heads_of_box, map);
    }
    return map;
  };
  const Arguments arguments = arguments_of<S>(call, processors, make_map);
  if (refused.failure()) return refused;
  attend<S><<<arguments.programs, S::kThreads, S::kShared, stream>>>(arguments);
  EJKERNEL_TRY(CheckLaunch(kName, "launch"));
  if (!arguments.shares.blocks) return ffi::Error::Success();
  Launch together(stream, merge_blocks<S>(arguments), dim3(kMergeThreads), 0);
  together.begin_early(merge<S>);
  cudaLaunchKernelEx(&together.config, merge<S>, arguments, static_cast<typename S::T*>(call.out), int(call.value_size));
  return CheckLaunch(kName, "merge");
}

ffi::Error Run(cudaStream_t stream, Array query, Array key, Array value, int64_t below, int64_t above, float scale, float cap,
               int64_t pack, bool take_turns, bool persistent, ffi::Result<Array> out, ffi::Result<Floats> lse,
               ffi::Result<Floats> part, ffi::Result<Floats> part_weight) {
  EJKERNEL_TRY(Check(query, key, value, below, above, scale, cap, pack, take_turns, persistent, out, lse, part, part_weight));
  if (out->element_count() == 0) return ffi::Error::Success();
  for (const void* data : {query.untyped_data(), key.untyped_data(), value.untyped_data(), out->untyped_data(),
                           part->untyped_data(), part_weight->untyped_data()}) {
    if (!Aligned(data)) return Invalid(kName, "arrays must begin on 16 bytes");
  }
  const Dims q = query.dimensions(), v = value.dimensions();
  const Call call{query.untyped_data(),
                  key.untyped_data(),
                  value.untyped_data(),
                  out->untyped_data(),
                  lse->element_count() ? lse->typed_data() : nullptr,
                  {part->typed_data(), reinterpret_cast<float2*>(part_weight->typed_data())},
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
                  part->dimensions()[0],
                  scale,
                  cap,
                  take_turns,
                  persistent};
  const ffi::DataType type = query.element_type();
  const auto launch = [&]<class S>() { return Attend<S>(stream, type, call); };
  const int64_t widest = std::max(q[3], v[3]);
  return type == ffi::BF16 ? for_shape<__nv_bfloat16>(widest, launch) : for_shape<__half>(widest, launch);
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
      .template Attr<bool>("take_turns")
      .template Attr<bool>("persistent")
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>()
      .template Ret<Floats>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_flash_attention_forward, Bind, Run, Check)

}  // namespace ejkernel::flash_attention
