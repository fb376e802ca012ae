// A warp's keys, values, queries and weights: layout in shared memory, and MMA fragments.
#pragma once

#include "mma.cuh"
#include "pack.cuh"
#include "pages.cuh"

namespace ejkernel::paged_attention {

constexpr int kWarpsBits = 2, kWarps = 1 << kWarpsBits;  // of a block, each with keys of its own
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;                           // of a tile: query heads of one token under one key head
constexpr int kVectorBytes = 16, kCacheLine = 128;  // bytes of a vector access, and of a prefetched cache line
constexpr int kMaxPrefetchLines = 1 << 20;          // of the tables
constexpr int kQueryPack = 4, kQueryBytes = 8;      // elements and bytes of a vector load of queries
constexpr int kMaxHeadSize = 256;                   // elements of a head
constexpr int kMinStages = 2, kMaxStages = 8;       // stages of a ring buffer
constexpr unsigned kWarp = 0xffffffffu;
constexpr uint32_t kNoRow = 0xffffffffu;  // instead of a vector offset

// The head size that a kernel is compiled for.
constexpr int padded_head_size(int size) { return size <= 64 ? 64 : size <= 128 ? 128 : kMaxHeadSize; }

// Keys of a warp's step. One-byte heads bring less work per key, so that a step has more keys to amortise its fixed cost.
constexpr int keys_per_step(int64_t element_bytes, int width) { return element_bytes == 1 && width <= 128 ? 32 : 16; }

// Whether a tile may have several key heads: single rows of up to 128 bytes use memory bandwidth badly.
constexpr bool allows_multi_head(int64_t element_bytes, int width) { return element_bytes == 1 && width <= 128; }

// Whether A and B may be swapped: keys as the rows of MMAs, queries as their columns.
constexpr bool swaps_ab(int64_t element_bytes, int width) { return element_bytes == 1 && width == 128; }

// Partial results that a block writes of a split tile: one or, with swapped A and B, one for each warp that interleaves a key
// head's steps, so that the warps need not synchronise.
constexpr int partials_per_block(int64_t element_bytes, int width, int64_t group, int64_t tile_key_heads) {
  return swaps_ab(element_bytes, width) && group <= kRows / 2 ? kWarps >> int(tile_key_heads) / 2 : 1;
}

// Strides of an array of pages in vectors.
struct VectorStrides {
  uint32_t page, token, head;
};

// Offset of a 16-byte chunk, swizzled so that neither adjacent rows nor the same chunk of 8 rows conflict in a bank.
template <int ROW_BYTES>
__device__ inline int swizzled_chunk(int row, int chunk) {
  constexpr int kChunks = ROW_BYTES / kVectorBytes, kSpan = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / (8 / kSpan) % kSpan)) * kVectorBytes;
}

// Issue the loads of key rows into tiles [KEYS, BLOCK] of elements of BYTES, one for each of HEADS heads, `tile_bytes` apart,
// whose rows are `head` vectors apart. HEADS warps share this; `share` is this warp's: KEYS / HEADS keys, of all heads, so that
// the rows of a key are loaded together. Lane l has the vector offset of the first head's row of key l % KEYS; kNoRow for a row
// of zeros. Columns from `row_bytes` on are zeros, too, and are not read.
template <int KEYS, int BYTES, int BLOCK, int HEADS>
__device__ inline void copy_rows(char* to, int tile_bytes, const char* from, uint32_t at, uint32_t head, int row_bytes,
                                 int share, int lane) {
  constexpr int kRowBytes = BLOCK * BYTES, kChunks = kRowBytes / kVectorBytes, kVectorsPerKey = HEADS * kChunks;
  constexpr int kKeysPerCopy = 32 / kVectorsPerKey, kCopies = KEYS / HEADS / kKeysPerCopy;  // keys of one copy, and copies
  constexpr int kInFlight = BLOCK > 128 ? 4 : kCopies;                                      // wide heads leave few registers
  static_assert(kVectorsPerKey <= 32 && KEYS / HEADS % 8 == 0);
  const int chunk = lane % kChunks, mine = swizzled_chunk<kRowBytes>(lane / kVectorsPerKey, chunk),
            start = share * (KEYS / HEADS);
  const uint32_t across = unsigned(chunk) + unsigned(lane / kChunks % HEADS) * head;
  const bool in_row = chunk * kVectorBytes < row_bytes;
  to += lane / kChunks % HEADS * tile_bytes + start * kRowBytes;
#pragma unroll 1
  for (int base = 0; base < kCopies; base += kInFlight) {
    uint32_t rows_at[kInFlight];  // all issued before the first copy, which waits for its own
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      rows_at[i] = __shfl_sync(kWarp, at, start + (base + i) * kKeysPerCopy + lane / kVectorsPerKey);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int first = (base + i) * kKeysPerCopy, swizzle = swizzled_chunk<kRowBytes>(first, 0) % kRowBytes;
      const bool there = in_row && rows_at[i] != kNoRow;
      cp_async<kVectorBytes>(to + (mine ^ swizzle) + first * kRowBytes, from + uint64_t(rows_at[i] + across) * kVectorBytes,
                             there);
    }
  }
}

// The same for rows that are not aligned to vectors, synchronously; `at` in bytes, -1 for a row of zeros.
template <int KEYS, int BYTES, int BLOCK>
__device__ inline void copy_elements(char* to, const char* from, int64_t at, int row_bytes, int lane) {
  using Raw = std::conditional_t<BYTES == 1, uint8_t, uint16_t>;
  constexpr int kRowBytes = BLOCK * BYTES;
#pragma unroll 1
  for (int byte = lane * BYTES; byte < KEYS * kRowBytes; byte += 32 * BYTES) {
    const int row = byte / kRowBytes, column = byte % kRowBytes;
    const int64_t row_at = __shfl_sync(kWarp, at, row);
    const bool there = row_at >= 0 && column < row_bytes;
    *reinterpret_cast<Raw*>(to + swizzled_chunk<kRowBytes>(row, column / kVectorBytes) + column % kVectorBytes) =
        there ? *reinterpret_cast<const Raw*>(from + row_at + column) : Raw(0);
  }
}

// Round two numbers into the halves of a register.
template <typename T>
__device__ inline uint32_t pair_of(float first, float second) {
  const float values[2] = {first, second};
  return __builtin_bit_cast(uint32_t, rounded<T, 2>(values));
}

// Convert four float8_e4m3fn to float16. Named halves of a word need no shifts.
__device__ inline void widen_e4m3(uint32_t word, uint32_t (&pairs)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(word));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i] = __builtin_bit_cast(uint32_t, __nv_cvt_fp8x2_to_halfraw2(uint16_t(word >> 16 * i), __NV_E4M3));
  }
#endif
}

// Convert four stored bytes to two pairs of float16, exactly: bytes 0, 1 and 2, 3, or if CROSSED 0, 2 and 1, 3.
template <typename S, bool CROSSED>
__device__ inline void widen_bytes(uint32_t word, uint32_t (&pairs)[2]) {
  if constexpr (std::is_same_v<S, E4M3>) {
    widen_e4m3(CROSSED ? __byte_perm(word, 0, 0x3120) : word, pairs);
  } else if constexpr (std::is_same_v<S, E5M2>) {  // the upper half of a float16
    pairs[0] = __byte_perm(word, 0, CROSSED ? 0x2404 : 0x1404);
    pairs[1] = __byte_perm(word, 0, CROSSED ? 0x3414 : 0x3424);
  } else {
    // A float16 between 2^10 and 2^11 has an integer fraction: 1024 + 128 + the stored value.
    const uint32_t raised = word ^ 0x80808080u;
    const __half2 above = __half2_raw{0x6480, 0x6480};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned which = CROSSED ? 0x4240 + 0x101 * i : 0x4140 + 0x202 * i;
      const __half2 numbers = __builtin_bit_cast(__half2_raw, __byte_perm(raised, 0x64646464u, which));
      pairs[i] = __builtin_bit_cast(uint32_t, __half2_raw(__hsub2(numbers, above)));
    }
  }
}

// How channels of keys and values map to MMA columns. Stored bytes come in pairs, as one 16-bit element, so that their columns
// differ from those of 16-bit elements.
template <typename T_, typename S_, int BLOCK>
struct Tile {
  using T = T_;
  using S = S_;
  static constexpr int kChannels = BLOCK;
  static constexpr bool kContiguousChannels = false;  // whether a lane's accumulators have contiguous channels
  static constexpr int kKeys = keys_per_step(sizeof(S), BLOCK);
  static constexpr unsigned kAllVisible = 0xffffffffu >> (32 - kKeys);
  static constexpr int kRowBytes = BLOCK * int(sizeof(S));
  static constexpr int kBytes = kKeys * kRowBytes;
  static constexpr bool kIsOneByte = sizeof(S) == 1;
  static constexpr bool kMultiHead = allows_multi_head(sizeof(S), BLOCK);
  static_assert(!kIsOneByte || std::is_same_v<T, __half>);

  template <typename Problem>
  __device__ explicit Tile(const Problem&) {}

  // Barrier of all threads that share a tile.
  static __device__ void sync_consumers() { __syncthreads(); }

  // The channel of a query's pair `half` (0, 1) in the `step`-th 16 columns.
  static __device__ int query_channel(int step, int half, int lane) {
    return step * 16 + (kIsOneByte ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half);
  }

  // The channel of the accumulators' element `second` (0, 1) in the `index`-th 8 columns.
  static __device__ int value_channel(int index, int second, int lane) {
    const int column = 2 * (lane % 4) + second;
    return kIsOneByte ? index / 2 * 16 + 2 * column + index % 2 : index * 8 + column;
  }

  // products[kKeys / 8] [kRows, 8] of queries and keys; `queries(step)` are those of 16 columns. SWAP_AB, for one-byte pages:
  // [kKeys / 16] [16, 8] of keys and up to 8 queries.
  template <bool SWAP_AB, int TILES, typename Queries>
  static __device__ void multiply_keys(float (&products)[TILES][4], const Queries& queries, const char* keys, int lane) {
    uint32_t found[4];
    if constexpr (kIsOneByte) {
      const int mine = swizzled_chunk<kRowBytes>(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step += 2) {
#pragma unroll
        for (int first = 0; first < kKeys; first += 16) {
          ldmatrix_x4(found, keys + (mine ^ step * kVectorBytes) + first * kRowBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t upper[2], lower[2];  // of keys first ... first + 7 and of those 8 further
            widen_bytes<S, false>(found[2 * half], upper);
            widen_bytes<S, false>(found[2 * half + 1], lower);
            const Pack<uint32_t, 4> query = queries(step + half);
            if constexpr (SWAP_AB) {
              mma_m16n8k16<T>(products[first / 16], {upper[0], lower[0], upper[1], lower[1]}, query.data[0], query.data[2]);
            } else {
              mma_m16n8k16<T>(products[first / 8], query.data, upper[0], upper[1]);
              mma_m16n8k16<T>(products[first / 8 + 1], query.data, lower[0], lower[1]);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < BLOCK / 16; ++step) {
        ldmatrix_x4(found, keys + swizzled_chunk<kRowBytes>(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
        const Pack<uint32_t, 4> query = queries(step);
        mma_m16n8k16<T>(products[0], query.data, found[0], found[1]);
        mma_m16n8k16<T>(products[1], query.data, found[2], found[3]);
      }
    }
  }

  // acc[BLOCK / 8] [kRows, 8] of weights, 16 by 16 keys, and values. SWAP_AB: [BLOCK / 16] [16, 8] of transposed values and the
  // weights of 8 keys each.
  template <bool SWAP_AB, int SUMS>
  static __device__ void add_values(float (&acc)[SUMS][4], const uint32_t (&weights)[kKeys / 4 / (SWAP_AB ? 2 : 1)],
                                    const char* values, int lane) {
    uint32_t found[4];
    const auto weights_of = [&](int first) {  // of 16 keys
      return Pack<uint32_t, 4>{weights[first / 4], weights[first / 4 + 1], weights[first / 4 + 2], weights[first / 4 + 3]};
    };
    if constexpr (kIsOneByte) {
      const int mine = swizzled_chunk<kRowBytes>(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step += 2) {
#pragma unroll
        for (int first = 0; first < kKeys; first += 16) {
          ldmatrix_x4_trans(found, values + (mine ^ step * kVectorBytes) + first * kRowBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t low[2], high[2];  // even channels and odd ones of keys first ... first + 7, and of those 8 further
            widen_bytes<S, true>(found[2 * half], low);
            widen_bytes<S, true>(found[2 * half + 1], high);
            if constexpr (SWAP_AB) {
              mma_m16n8k16<T>(acc[step + half], {low[0], low[1], high[0], high[1]}, weights[first / 8], weights[first / 8 + 1]);
            } else {
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) {
                mma_m16n8k16<T>(acc[2 * (step + half) + odd], weights_of(first).data, low[odd], high[odd]);
              }
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK / 16; ++i) {
        ldmatrix_x4_trans(found, values + swizzled_chunk<kRowBytes>(lane % 16, 2 * i + lane / 16));
        mma_m16n8k16<T>(acc[2 * i], weights_of(0).data, found[0], found[1]);
        mma_m16n8k16<T>(acc[2 * i + 1], weights_of(0).data, found[2], found[3]);
      }
    }
  }
};

}  // namespace ejkernel::paged_attention
