// Tensor maps for TMA. The driver encodes them; its function is looked up by name, so that the library loads without a driver.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "tensor_map_axis.h"
#include "handler.h"

namespace ejkernel {

constexpr int64_t kAtomColumns = 64;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled FindEncodeTiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  cudaGetLastError();  // whoever needs the map reports the failure
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
}

// The tensor map of an array whose axes have ascending strides, as the driver requires; the first axis is contiguous. A box has
// rows of 128 bytes with swizzled chunks of 16 bytes. `text` describes the array in error messages.
template <size_t RANK, typename Text>
ffi::Error EncodeTensorMap(const char* operation, CUtensorMapDataType type, const void* data,
                           const std::array<TensorMapAxis, RANK>& axes, Text text, CUtensorMap& map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) {
    return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation +
                                ": NVIDIA's driver has no cuTensorMapEncodeTiled; install a driver of CUDA 12 or newer");
  }
  cuuint64_t extents[RANK], strides[RANK];
  cuuint32_t box[RANK], steps[RANK];
  for (size_t i = 0; i < RANK; ++i) {
    extents[i] = cuuint64_t(axes[i].extent), strides[i] = cuuint64_t(axes[i].stride);
    box[i] = cuuint32_t(axes[i].box), steps[i] = 1;
  }
  const CUresult result =
      encode(&map, type, RANK, const_cast<void*>(data), extents, strides + 1, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation + ": the driver refuses to describe " + text() +
                              " (error " + std::to_string(int(result)) + ")");
}

// The tensor map of an array [batch, length, heads, size] of bfloat16 or float16, in boxes of `box_tokens` tokens, `box_heads`
// heads and 64 columns, ordered by token, then head. Length is an axis of its own, so that no box crosses into the next batch
// member.
inline ffi::Error MakeTensorMap(const char* operation, ffi::DataType type, const void* data, int64_t size, int64_t length,
                                int64_t heads, int64_t batch, int box_tokens, int box_heads, CUtensorMap& map) {
  const std::array axes{TensorMapAxis{size, kAtomColumns, 2}, TensorMapAxis{heads, box_heads, size * 2},
                        TensorMapAxis{length, box_tokens, heads * size * 2},
                        TensorMapAxis{batch, 1, length * heads * size * 2}};
  const auto text = [&] {
    return "[" + std::to_string(batch) + ", " + std::to_string(length) + ", " + std::to_string(heads) + ", " +
           std::to_string(size) + "] in TMA boxes of " + std::to_string(box_tokens) + " x " + std::to_string(box_heads);
  };
  const CUtensorMapDataType number = type == ffi::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return EncodeTensorMap(operation, number, data, axes, text, map);
}

}  // namespace ejkernel
