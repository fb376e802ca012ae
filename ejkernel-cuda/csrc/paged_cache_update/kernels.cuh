// Writing new keys and values into the pages where they lie. A block per token; tokens that nobody owns, and places that are
// not in the cache, are dropped.
#pragma once

#include "divide.cuh"
#include "pack.cuh"
#include "pages.cuh"

namespace ejkernel::paged_cache_update {

// A copy of the bits, of one type into the same.
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

// What is stored for a number: the nearest, ties to even, and for one-byte types within their range; NaN becomes 0 in int8.
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

// One array of pages, strides in elements, and what is written into it.
template <typename From, typename To>
struct Write {
  const From* from;    // [batch, tokens, heads, size]; null for nothing
  To* pages;           // at the first place of this kind
  const float* scale;  // [1 or batch, 1 or heads], null when absent
  int64_t page_stride, token_stride, head_stride, batch_stride;
  int64_t scale_batch_stride;
  int scale_head_stride;
  int heads, size;
};

constexpr int kAhead = 2;  // packs of a thread that are read while the place of the token is looked up

// What is written for one token: packs of N elements, of which the threads of the block take every blockDim.x-th.
template <int N, typename From, typename To>
struct Token {
  const Write<From, To>& write;
  const From* from;
  int packs;
  Pack<From, N> ahead[kAhead];

  __device__ Token(const Write<From, To>& write, int64_t row)
      : write(write),
        from(write.from + row * write.heads * write.size),
        packs(write.from ? write.heads * (write.size / N) : 0) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = int(threadIdx.x + k * blockDim.x);
      if (at < packs) ahead[k] = load<From, N>(from + int64_t(at) * N);
    }
  }

  __device__ void store_pack(const Pack<From, N>& values, To* to, const float* scales, int at) const {
    const int per_head = write.size / N, head = at / per_head, column = (at - head * per_head) * N;
    Pack<To, N> result;
    if constexpr (kIsBits<From>) {
      result = values;
    } else {
      const float scale = scales ? scales[head * write.scale_head_stride] : 1.f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float value = to_float(values.data[i]);
        result.data[i] = Stored<To>::of(scales ? value / scale : value);
      }
    }
    store<To, N>(to + head * write.head_stride + column, result);
  }

  __device__ void store_at(int64_t batch, int64_t page, int64_t offset) const {
    To* to = write.pages + batch * write.batch_stride + page * write.page_stride + offset * write.token_stride;
    const float* scales = write.scale ? write.scale + batch * write.scale_batch_stride : nullptr;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = int(threadIdx.x + k * blockDim.x);
      if (at < packs) store_pack(ahead[k], to, scales, at);
    }
    for (int at = int(threadIdx.x + kAhead * blockDim.x); at < packs; at += blockDim.x) {
      store_pack(load<From, N>(from + int64_t(at) * N), to, scales, at);
    }
  }
};

// N elements are an access of the new arrays.
template <typename From, typename To, int N>
__global__ void __launch_bounds__(512) update_pages(Requests requests, Write<From, To> first, Write<From, To> second) {
  const int64_t row = blockIdx.x;
  int64_t token;
  const int64_t batch = divide(row, requests.tokens, token);
  const Token<N, From, To> first_token(first, row), second_token(second, row);
  const int32_t* starts = requests.starts + (requests.one_starts ? 0 : batch * (requests.requests + 1));
  int64_t request = 0;  // how many requests end at this token or before
  for (int64_t base = 0; base < requests.requests; base += blockDim.x) {
    const int64_t other = base + threadIdx.x;
    request += __syncthreads_count(other < requests.requests && starts[other + 1] <= token);
  }
  if (request >= requests.requests || token < starts[request]) return;
  const int64_t length = requests.lengths[(requests.one_lengths ? 0 : batch * requests.requests) + request];
  const int64_t position = length - starts[request + 1] + token;
  if (position < 0 || position >= requests.table_width * requests.page_size) return;
  int64_t offset;
  const int64_t table = (requests.one_tables ? 0 : batch * requests.requests) + request;
  const int64_t page = requests.tables[table * requests.table_width + divide(position, requests.page_size, offset)];
  if (page < 0 || page >= requests.pages) return;
  first_token.store_at(batch, page, offset);
  second_token.store_at(batch, page, offset);
}

}  // namespace ejkernel::paged_cache_update
