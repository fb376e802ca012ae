// Descriptions of arrays for the tensor memory accelerator. The driver makes them; it is asked for by name, so that the library
// loads where there is none.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "axis.h"
#include "handler.h"

namespace ejkernel {

constexpr int64_t kPanelColumns = 64;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled FindEncodeTiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  cudaGetLastError();  // a failure here is reported by whoever needs the map
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
}

// The map of an array whose axes have larger steps each than the one before, as the driver wants them; elements of the first
// one lie side by side. 128 bytes of a box are a row, whose chunks of 16 bytes are swizzled. Errors speak of what `text` says.
template <size_t RANK, typename Text>
ffi::Error EncodeMap(const char* operation, CUtensorMapDataType type, const void* data, const std::array<Axis, RANK>& axes,
                     Text text, CUtensorMap& map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) {
    return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation +
                                ": NVIDIA's driver has no cuTensorMapEncodeTiled; it needs to be that of CUDA 12 or newer");
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

// The map of an array [batch, length, heads, size] of bfloat16 or float16, copied in boxes of so many tokens and heads and 64
// columns: rows by token and then head. Length is an axis of its own: no box passes from one batch member to the next.
inline ffi::Error MakeMap(const char* operation, ffi::DataType type, const void* data, int64_t size, int64_t length,
                          int64_t heads, int64_t batch, int tokens_of_box, int heads_of_box, CUtensorMap& map) {
  const std::array axes{Axis{size, kPanelColumns, 2}, Axis{heads, heads_of_box, size * 2},
                        Axis{length, tokens_of_box, heads * size * 2}, Axis{batch, 1, length * heads * size * 2}};
  const auto text = [&] {
    return "[" + std::to_string(batch) + ", " + std::to_string(length) + ", " + std::to_string(heads) + ", " +
           std::to_string(size) + "] in boxes of " + std::to_string(tokens_of_box) + " x " + std::to_string(heads_of_box);
  };
  const CUtensorMapDataType number = type == ffi::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return EncodeMap(operation, number, data, axes, text, map);
}

}  // namespace ejkernel
