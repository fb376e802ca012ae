// Definitions that all handlers share: shape checks, messages, dispatch by element type, and the symbols that XLA calls.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "export.h"
#include "xla/ffi/api/ffi.h"

namespace ejkernel {

namespace ffi = xla::ffi;
using Array = ffi::AnyBuffer;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Dims = Array::Dimensions;
using Stream = ffi::PlatformStream<cudaStream_t>;

constexpr int64_t kMaxGrid = 0x7fffffff;

// Return from the caller unless `expression` is a success.
#define EJKERNEL_TRY(expression) \
  if (ffi::Error failed = (expression); failed.failure()) return failed

inline ffi::Error Invalid(const char* operation, const std::string& message) {
  return ffi::Error::InvalidArgument(std::string("ejkernel_cuda ") + operation + ": " + message);
}

inline ffi::Error CheckLaunch(const char* operation, const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation + ": " + what + ": " + cudaGetErrorString(error));
}

// Before an update in place: XLA may pass a result buffer that does not alias its argument.
inline ffi::Error CopyUnlessInPlace(const char* operation, cudaStream_t stream, Array from, Array to) {
  if (to.untyped_data() != from.untyped_data() && from.size_bytes())
    cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  return CheckLaunch(operation, "copy");
}

inline std::string Text(Dims dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline bool Same(Dims a, Dims b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()); }

inline bool IsFloat(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

inline ffi::Error CheckFloat(const char* operation, const char* name, Array array) {
  if (IsFloat(array.element_type())) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must be float32, bfloat16 or float16");
}

inline ffi::Error CheckLike(const char* operation, const char* name, Array array, const char* model_name, Array model) {
  if (array.element_type() == model.element_type() && Same(array.dimensions(), model.dimensions()))
    return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must be like " + model_name + " " + Text(model.dimensions()) + ", got " +
                                Text(array.dimensions()));
}

inline bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Call `run.operator()<T, N>()` for the type; N elements are 16 bytes if `packed`, else one element.
template <typename Run>
ffi::Error ForFloat(ffi::DataType type, bool packed, Run run) {
  switch (type) {
    case ffi::F32: return packed ? run.template operator()<float, 4>() : run.template operator()<float, 1>();
    case ffi::BF16: return packed ? run.template operator()<__nv_bfloat16, 8>() : run.template operator()<__nv_bfloat16, 1>();
    default: return packed ? run.template operator()<__half, 8>() : run.template operator()<__half, 1>();
  }
}

}  // namespace ejkernel

// The symbol of a handler, and one with the suffix `_check` that only checks, for a host without a GPU. Handlers only enqueue
// launches and copies on the stream, so XLA may record them into a CUDA graph.
#define EJKERNEL_HANDLER(symbol, bind, run, check)                                                                      \
  EJKERNEL_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                                                     \
    static auto* handler = bind(ffi::Ffi::Bind().Ctx<Stream>()).To(run, {ffi::Traits::kCmdBufferCompatible}).release(); \
    return handler->Call(frame);                                                                                        \
  }                                                                                                                     \
  EJKERNEL_EXPORT XLA_FFI_Error* symbol##_check(XLA_FFI_CallFrame* frame) {                                             \
    static auto* handler = bind(ffi::Ffi::Bind()).To(check).release();                                                  \
    return handler->Call(frame);                                                                                        \
  }
