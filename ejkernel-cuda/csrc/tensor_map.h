// Descriptions of arrays for the tensor memory accelerator. The driver makes them; it is asked for by name, so that the library
// loads where there is none.
#pragma once

#include <cuda.h>

#include <cstdint>

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

// The map of an array [batch, length, heads, size] of bfloat16 or float16, copied in boxes of so many tokens and heads and 64
// columns: rows by token and then head, whose chunks of 16 bytes are swizzled. Its axes are columns, heads, tokens and batch,
// each with larger steps than the one before, as the driver wants them. Length is an axis of its own: no box passes from one
// batch member to the next.
inline ffi::Error MakeMap(const char* operation, ffi::DataType type, const void* data, int64_t size, int64_t length,
                          int64_t heads, int64_t batch, int tokens_of_box, int heads_of_box, CUtensorMap& map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) {
    return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation +
                                ": NVIDIA's driver has no cuTensorMapEncodeTiled; it needs to be that of CUDA 12 or newer");
  }
  const cuuint64_t extents[] = {cuuint64_t(size), cuuint64_t(heads), cuuint64_t(length), cuuint64_t(batch)};
  const cuuint64_t head = cuuint64_t(size) * 2, row = cuuint64_t(heads) * head;
  const cuuint64_t strides[] = {head, row, cuuint64_t(length) * row};
  const cuuint32_t box[] = {cuuint32_t(kPanelColumns), cuuint32_t(heads_of_box), cuuint32_t(tokens_of_box), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, type == ffi::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("ejkernel_cuda ") + operation + ": the driver refuses to describe [" +
                              std::to_string(batch) + ", " + std::to_string(length) + ", " + std::to_string(heads) + ", " +
                              std::to_string(size) + "] in boxes of " + std::to_string(tokens_of_box) + " x " +
                              std::to_string(heads_of_box) + " (error " + std::to_string(int(result)) + ")");
}

}  // namespace ejkernel
