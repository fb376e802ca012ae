// Several elements that move as one access, and their conversion to float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ejkernel {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) { return value; }
template <>
__device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// N elements, aligned so that the compiler moves them with one access of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T data[N];
};

template <typename T, int N>
__device__ inline Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <typename T, int N>
__device__ inline void store(T* to, const Pack<T, N>& value) {
  *reinterpret_cast<Pack<T, N>*>(to) = value;
}

}  // namespace ejkernel
