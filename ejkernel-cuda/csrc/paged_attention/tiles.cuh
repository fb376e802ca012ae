// What a warp holds of keys, values, queries and weights: places in shared memory, and elements as tensor cores take them.
#pragma once

#include "mma.cuh"
#include "pack.cuh"
#include "pages.cuh"

namespace ejkernel::paged_attention {

constexpr int kWarps = 4;  // of a block, each with keys of its own
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;                        // of a tile: query heads of one token under one key head
constexpr int kKeys = 16;                        // that a warp takes at a step
constexpr int kBlock = kWarps * kKeys;           // keys that are dealt out together
constexpr int kAccess = 16;                      // bytes of an access
constexpr int kWidest = 256;                     // elements of a head
constexpr int kLeastStages = 2, kMaxStages = 8;  // steps of a ring
constexpr unsigned kWarp = 0xffffffffu;

// Where a row's 16 bytes lie, so that neither rows next to each other nor the same bytes of 8 rows meet in one bank.
template <int ROW_BYTES>
__device__ inline int place(int row, int chunk) {
  constexpr int kChunks = ROW_BYTES / kAccess, kSpan = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / (8 / kSpan) % kSpan)) * kAccess;
}

// Begin to copy the rows of a warp's keys into a tile [kKeys, ROW_BYTES]. Lane l knows where the row of key l % kKeys begins,
// in bytes; -1 for a row of zeros, as columns from `row_bytes` on are. Elements of BYTES that no access fits are there at once.
template <int BYTES, int ROW_BYTES>
__device__ inline void copy_rows(char* to, const char* from, int64_t at, int row_bytes, bool packed, int lane) {
  constexpr int kChunks = ROW_BYTES / kAccess;
  if (packed) {
    constexpr int kCopies = kKeys * kChunks / 32, kTogether = kCopies > 8 ? 4 : kCopies;  // wide heads leave few registers
#pragma unroll kTogether
    for (int i = 0; i < kCopies; ++i) {
      const int row = (i * 32 + lane) / kChunks, chunk = lane % kChunks;
      const int64_t row_at = __shfl_sync(kWarp, at, row);
      const bool there = row_at >= 0 && chunk * kAccess < row_bytes;
      copy_bytes_ahead<kAccess>(to + place<ROW_BYTES>(row, chunk), there ? from + row_at + chunk * kAccess : from, there);
    }
    return;
  }
  using Raw = std::conditional_t<BYTES == 1, uint8_t, uint16_t>;
#pragma unroll 1
  for (int byte = lane * BYTES; byte < kKeys * ROW_BYTES; byte += 32 * BYTES) {
    const int row = byte / ROW_BYTES, column = byte % ROW_BYTES;
    const int64_t row_at = __shfl_sync(kWarp, at, row);
    const bool there = row_at >= 0 && column < row_bytes;
    *reinterpret_cast<Raw*>(to + place<ROW_BYTES>(row, column / kAccess) + column % kAccess) =
        there ? *reinterpret_cast<const Raw*>(from + row_at + column) : Raw(0);
  }
}

// Two numbers, rounded, as half a register each.
template <typename T>
__device__ inline uint32_t pair_of(float first, float second) {
  const float values[2] = {first, second};
  return __builtin_bit_cast(uint32_t, rounded<T, 2>(values));
}

// Two stored bytes as float16, which has all that such bytes can mean.
template <typename S>
__device__ inline uint32_t widened(uint32_t first, uint32_t second) {
  if constexpr (std::is_same_v<S, Int8>) {
    // A float between 2^23 and 2^24 has a whole number for its fraction.
    const auto number = [](uint32_t byte) { return __builtin_bit_cast(float, 0x4b000000u | (byte ^ 0x80u)) - 8388736.f; };
    return pair_of<__half>(number(first), number(second));
  } else {
    constexpr auto kKind = std::is_same_v<S, E4M3> ? __NV_E4M3 : __NV_E5M2;
    const auto both = static_cast<__nv_fp8x2_storage_t>(first | second << 8);
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(both, kKind);
    return __builtin_bit_cast(uint32_t, halves);
  }
}

__device__ inline uint32_t byte_of(uint32_t word, int which) { return word >> 8 * which & 0xffu; }

// How columns of a tile, keys' channels or values', meet the columns of products. Stored bytes come in pairs, as one element of
// 16 bits, so that a product's columns are other ones than for elements of 16 bits.
template <typename T, typename S, int BLOCK>
struct Tile {
  static constexpr int kRowBytes = BLOCK * int(sizeof(S));
  static constexpr int kBytes = kKeys * kRowBytes;
  static constexpr bool kIsBytes = sizeof(S) == 1;
  static_assert(!kIsBytes || std::is_same_v<T, __half>);

  // The channel of a query's pair `half` (0, 1) in the `step`-th 16 columns.
  static __device__ int query_channel(int step, int half, int lane) {
    return step * 16 + (kIsBytes ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half);
  }

  // The channel of the sums' element `second` (0, 1) in the `index`-th 8 columns.
  static __device__ int value_channel(int index, int second, int lane) {
    const int column = 2 * (lane % 4) + second;
    return kIsBytes ? index / 2 * 16 + 2 * column + index % 2 : index * 8 + column;
  }

  // products[2] [kRows, 8] of queries and the 16 keys; `queries(step)` are those of 16 columns.
  template <typename Queries>
  static __device__ void multiply_keys(float (&products)[2][4], const Queries& queries, const char* keys, int lane) {
    uint32_t found[4];
    if constexpr (kIsBytes) {
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step += 2) {
        load_matrices(found, keys + place<kRowBytes>(lane % 16, step + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t low = widened<S>(byte_of(found[i], 0), byte_of(found[i], 1));
          const uint32_t high = widened<S>(byte_of(found[i], 2), byte_of(found[i], 3));
          multiply_add<T>(products[i % 2], queries(step + i / 2).data, low, high);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < BLOCK / 16; ++step) {
        load_matrices(found, keys + place<kRowBytes>(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
        const Pack<uint32_t, 4> query = queries(step);
        multiply_add<T>(products[0], query.data, found[0], found[1]);
        multiply_add<T>(products[1], query.data, found[2], found[3]);
      }
    }
  }

  // sums[BLOCK / 8] [kRows, 8] of the 16 keys' weights and values.
  static __device__ void add_values(float (&sums)[BLOCK / 8][4], const uint32_t (&weights)[4], const char* values, int lane) {
    uint32_t found[4];
    constexpr int kColumns = kIsBytes ? 32 : 16;  // of four matrices
#pragma unroll
    for (int i = 0; i < BLOCK / kColumns; ++i) {
      load_turned_matrices(found, values + place<kRowBytes>(lane % 16, 2 * i + lane / 16));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = found[2 * half], high = found[2 * half + 1];
        if constexpr (kIsBytes) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            multiply_add<T>(sums[4 * i + 2 * half + odd], weights, widened<S>(byte_of(low, odd), byte_of(low, odd + 2)),
                            widened<S>(byte_of(high, odd), byte_of(high, odd + 2)));
          }
        } else {
          multiply_add<T>(sums[2 * i + half], weights, low, high);
        }
      }
    }
  }
};

}  // namespace ejkernel::paged_attention
