// Writing new keys and values into their pages. Tokens that no request owns, and positions outside of the cache, are dropped.
#pragma once

#include "divide.cuh"
#include "pack.cuh"
#include "pages.cuh"

namespace ejkernel::paged_cache_update {

// A bitwise copy between equal types.
template <int BYTES>
struct Bits;
template <>
struct Bits<1> {
  uint8_t bits;
};
template <>
struct Bits<2> {
  uint16_t bits;
};
template <>
struct Bits<4> {
  uint32_t bits;
};

template <typename T>
constexpr bool kIsBits = false;
template <int BYTES>
constexpr bool kIsBits<Bits<BYTES>> = true;

// The stored value of a number: nearest, ties to even, saturated for one-byte types; NaN becomes 0 in int8.
template <typename To>
struct Stored {
  static __device__ To of(float value) { return from_float<To>(value); }
};
template <>
struct Stored<Int8> {
  static __device__ Int8 of(float value) {
    const int rounded = value != value ? 0 : __float2int_rn(fminf(fmaxf(value, -128.f), 127.f));
    return {static_cast<uint8_t>(rounded)};
  }
};
template <>
struct Stored<E4M3> {
  static __device__ E4M3 of(float value) { return {__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)}; }
};
template <>
struct Stored<E5M2> {
  static __device__ E5M2 of(float value) { return {__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2)}; }
};

// An array of pages, strides in elements, and its new elements.
template <typename From, typename To>
struct PageWrite {
  const From* from;    // [batch, tokens, heads, size]; null for nothing
  To* pages;           // at the first element of this kind
  const float* scale;  // [1 or batch, 1 or heads], null when absent
  int64_t page_stride, token_stride, head_stride, batch_stride;
  int64_t scale_batch_stride;
  int scale_head_stride;
  int heads, size;
};

constexpr int kMaxTokens = 32;      // of a block; a lane of its first warp looks up each
constexpr int kTokensInFlight = 2;  // tokens of a thread whose loads are in flight together

// Destinations of tokens: offsets in elements of the pages, and the batch member; keys = -1 for a dropped token.
struct TokenOffsets {
  int64_t* keys;    // [kMaxTokens]
  int64_t* values;  // [kMaxTokens]
  int* batches;     // [kMaxTokens]
};

// The number of requests that end at or before this token.
__device__ inline int64_t request_of(const int32_t* starts, int64_t requests, int64_t token) {
  int64_t below = 0, above = requests;
  while (below < above) {
    const int64_t middle = (below + above) / 2;
    if (starts[middle + 1] <= token) {
      below = middle + 1;
    } else {
      above = middle;
    }
  }
  return below;
}

// Page and offset of a token of a batch member; page = -1 if it has none in the cache.
__device__ inline int64_t page_of(const Requests& requests, int64_t batch, int64_t token, int64_t& offset) {
  const int32_t* starts = requests.starts + (requests.one_starts ? 0 : batch * (requests.requests + 1));
  const int64_t request = request_of(starts, requests.requests, token);
  if (request >= requests.requests || token < starts[request]) return -1;
  const int64_t length = requests.lengths[(requests.one_lengths ? 0 : batch * requests.requests) + request];
  const int64_t position = length - starts[request + 1] + token;
  if (position < 0 || position >= requests.table_width * requests.page_size) return -1;
  const int64_t table = (requests.one_tables ? 0 : batch * requests.requests) + request;
  const int64_t page = requests.tables[table * requests.table_width + divide(position, requests.page_size, offset)];
  return page < requests.pages ? page : -1;
}

template <typename From, typename To>
__device__ inline int64_t offset_of(const PageWrite<From, To>& write, int64_t batch, int64_t page, int64_t offset) {
  return batch * write.batch_stride + page * write.page_stride + offset * write.token_stride;
}

// Store pack `at` of a token's packs of N elements, divided by the scale of its head.
template <int N, typename From, typename To>
__device__ inline void store_pack(const PageWrite<From, To>& write, const Pack<From, N>& values, int64_t offset, int batch,
                                  int at) {
  const int per_head = write.size / N, head = at / per_head, column = (at - head * per_head) * N;
  Pack<To, N> result;
  if constexpr (kIsBits<From>) {
    result = values;
  } else {
    const float* scales = write.scale ? write.scale + batch * write.scale_batch_stride : nullptr;
    const float scale = scales ? scales[head * write.scale_head_stride] : 1.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = to_float(values.data[i]);
      result.data[i] = Stored<To>::of(scales ? value / scale : value);
    }
  }
  store<To, N>(write.pages + offset + head * write.head_stride + column, result);
}

// A thread's packs of keys or values: pack `at` of kTokensInFlight tokens, blockDim.y apart.
template <int N, typename From, typename To>
struct PackBuffer {
  const PageWrite<From, To>& write;
  int packs;
  Pack<From, N> packs_of[kTokensInFlight];

  __device__ explicit PackBuffer(const PageWrite<From, To>& write)
      : write(write), packs(write.from ? write.heads * (write.size / N) : 0) {}

  __device__ void read(int64_t begin, int token, int tokens, int at) {
    if (at >= packs) return;
#pragma unroll
    for (int k = 0; k < kTokensInFlight; ++k) {
      const int other = token + k * int(blockDim.y);
      if (other < tokens) packs_of[k] = load<From, N>(write.from + ((begin + other) * packs + at) * N);
    }
  }

  __device__ void store_packs(const int64_t* offsets, const TokenOffsets& lookup, int token, int tokens, int at) const {
    if (at >= packs) return;
#pragma unroll
    for (int k = 0; k < kTokensInFlight; ++k) {
      const int other = token + k * int(blockDim.y);
      if (other < tokens && lookup.keys[other] >= 0)
        store_pack<N>(write, packs_of[k], offsets[other], lookup.batches[other], at);
    }
  }
};

// A block of [threads per token, tokens in parallel] stores `tokens` tokens. Its first loads overlap the lookup of
// destinations. A vector of the new arrays has N elements.
template <typename From, typename To, int N>
__global__ void __launch_bounds__(512)
    update_pages(Requests requests, PageWrite<From, To> first, PageWrite<From, To> second, int64_t rows, int tokens) {
  EJKERNEL_SHARED(int64_t, keys, kMaxTokens);
  EJKERNEL_SHARED(int64_t, values, kMaxTokens);
  EJKERNEL_SHARED(int, batches, kMaxTokens);
  const TokenOffsets lookup{keys, values, batches};
  const int64_t begin = int64_t(blockIdx.x) * tokens;
  const int here = int(rows - begin < tokens ? rows - begin : tokens);
  PackBuffer<N, From, To> first_packs(first), second_packs(second);
  const int most = first_packs.packs > second_packs.packs ? first_packs.packs : second_packs.packs;
  const int per_round = kTokensInFlight * int(blockDim.y), rounds = (here + per_round - 1) / per_round;
  bool known = false;
  for (int at = threadIdx.x; at - int(threadIdx.x) < most; at += blockDim.x) {
    for (int round = 0; round < rounds; ++round) {
      const int token = round * per_round + int(threadIdx.y);
      first_packs.read(begin, token, here, at);
      second_packs.read(begin, token, here, at);
      if (!known) {
        const int mine = int(threadIdx.y * blockDim.x + threadIdx.x);
        if (mine < here) {
          int64_t token_of_batch, offset = 0;
          const int64_t batch = divide(begin + mine, requests.tokens, token_of_batch);
          const int64_t page = page_of(requests, batch, token_of_batch, offset);
          keys[mine] = page < 0 ? -1 : offset_of(first, batch, page, offset);
          values[mine] = offset_of(second, batch, page, offset);
          batches[mine] = int(batch);
        }
        __syncthreads();
        known = true;
      }
      first_packs.store_packs(keys, lookup, token, here, at);
      second_packs.store_packs(values, lookup, token, here, at);
    }
  }
}

}  // namespace ejkernel::paged_cache_update
