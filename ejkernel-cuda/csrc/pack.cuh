// Vectors of elements that move with one access, and their conversion to float.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace ejkernel {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements, aligned so that the compiler uses one access of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T data[N];
};

template <typename T, int N>
__device__ inline Pack<T, N> zeros() {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.data[i] = from_float<T>(0.f);
  return pack;
}

template <typename T, int N>
__device__ inline Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// Load a pack of global memory that nothing writes during the kernel, or return zeros; the compiler does not move loads of 8
// bytes and more.
template <typename T, int N>
__device__ inline Pack<T, N> load_pack_predicated(const T* from, bool valid) {
  if constexpr (sizeof(T) * N >= 8) {
    using Word = std::conditional_t<sizeof(T) * N == 8, uint2, uint4>;
    constexpr int kWords = sizeof(T) * N / sizeof(Word);
    struct Words {
      Word data[kWords];
    } words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.data[i] = load_predicated<Word>(from + i * (N / kWords), valid);
    return __builtin_bit_cast(Pack<T, N>, words);
  } else {
    return valid ? load<T, N>(from) : zeros<T, N>();
  }
}

// Copy N elements to shared memory asynchronously, or write zeros; less than 4 bytes are copied synchronously.
template <typename T, int N>
__device__ inline void cp_async_pack(T* to, const T* from, bool valid) {
  if constexpr (sizeof(T) * N >= 4) {
    cp_async<sizeof(T) * N>(to, from, valid);
  } else {
    *to = valid ? *from : from_float<T>(0.f);
  }
}

// Convert all elements to float; bfloat16 are halves of words, one instruction each.
template <typename T, int N>
__device__ inline void widen(const Pack<T, N>& pack, float (&to)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    struct Words {
      uint32_t data[N / 2];
    };
    const Words words = __builtin_bit_cast(Words, pack);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      to[2 * i] = __builtin_bit_cast(float, words.data[i] << 16);
      to[2 * i + 1] = __builtin_bit_cast(float, words.data[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(pack.data[i]);
  }
}

// The largest element of many packs, ignoring NaN; two-byte elements are compared in pairs.
template <typename T, int N>
struct PackMax {
  static constexpr bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  std::conditional_t<kPairs, uint32_t, float> found;

  __device__ PackMax() {
    if constexpr (kPairs) {
      found = std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u : 0xfc00fc00u;
    } else {
      found = -INFINITY;
    }
  }

  __device__ void update(const Pack<T, N>& pack) {
    if constexpr (kPairs) {
      struct Words {
        uint32_t data[N / 2];
      };
      const Words words = __builtin_bit_cast(Words, pack);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) found = packed_max<T>(found, words.data[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) found = fmaxf(found, to_float(pack.data[i]));
    }
  }

  __device__ float value() const {
    if constexpr (kPairs) {
      float halves[2];
      widen(__builtin_bit_cast(Pack<T, 2>, found), halves);
      return fmaxf(halves[0], halves[1]);
    } else {
      return found;
    }
  }
};

// Round to T, in pairs if T has such an instruction.
template <typename T, int N>
__device__ inline Pack<T, N> rounded(const float (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
      pack.data[i] = pair.x, pack.data[i + 1] = pair.y;
    } else if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
      pack.data[i] = pair.x, pack.data[i + 1] = pair.y;
    } else {
      pack.data[i] = values[i], pack.data[i + 1] = values[i + 1];
    }
  }
  if constexpr (N % 2) pack.data[N - 1] = from_float<T>(values[N - 1]);
  return pack;
}

// The same by other instructions, so that the compiler does not keep the floats of the first conversion, which take twice the
// registers of the pack: for the second (1) or third (2) conversion.
template <int TIME = 1, typename T, int N>
__device__ inline void widen_again(const Pack<T, N>& pack, float (&to)[N]) {
  constexpr unsigned kZero = TIME == 1 ? 0x44 : 0x55;  // any byte of the second word
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    struct Words {
      uint32_t data[N / 2];
    };
    const Words words = __builtin_bit_cast(Words, pack);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        to[2 * i] = __builtin_bit_cast(float, __byte_perm(words.data[i], 0, 0x1000 | kZero));
        to[2 * i + 1] = __builtin_bit_cast(float, __byte_perm(words.data[i], 0, 0x3200 | kZero));
      } else {
        to[2 * i] = to_float(__builtin_bit_cast(T, uint16_t(__byte_perm(words.data[i], 0, kZero << 8 | 0x10))));
        to[2 * i + 1] = to_float(__builtin_bit_cast(T, uint16_t(__byte_perm(words.data[i], 0, kZero << 8 | 0x32))));
      }
    }
  } else {
    widen(pack, to);
  }
}

template <typename T, int N>
__device__ inline void store(T* to, const Pack<T, N>& value) {
  *reinterpret_cast<Pack<T, N>*>(to) = value;
}

// Store to global memory that the kernel does not read again, with one access: the compiler split stores of unpacked packs. Or
// do nothing.
template <typename T, int N>
__device__ inline void store_out(T* to, const Pack<T, N>& value, bool valid = true) {
  if constexpr (sizeof(T) * N == 8) {
    store_predicated(to, __builtin_bit_cast(uint2, value), valid);
  } else if constexpr (sizeof(T) * N == 16) {
    store_predicated(to, __builtin_bit_cast(uint4, value), valid);
  } else if (valid) {
    store<T, N>(to, value);
  }
}

}  // namespace ejkernel
