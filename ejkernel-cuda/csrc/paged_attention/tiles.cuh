// What a warp holds of keys, values, queries and weights: places in shared memory, and elements as tensor cores take them.
#pragma once

#include "mma.cuh"
#include "pack.cuh"
#include "pages.cuh"

namespace ejkernel::paged_attention {

constexpr int kWarpsBits = 2, kWarps = 1 << kWarpsBits;  // of a block, each with keys of its own
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;                        // of a tile: query heads of one token under one key head
constexpr int kAccess = 16, kLine = 128;         // bytes of an access, and of what is fetched ahead at once
constexpr int kMostLines = 1 << 20;              // of tables that are fetched ahead
constexpr int kQueryPack = 4, kQueryBytes = 8;   // elements and bytes of queries that are read at once
constexpr int kWidest = 256;                     // elements of a head
constexpr int kLeastStages = 2, kMaxStages = 8;  // steps of a ring
constexpr unsigned kWarp = 0xffffffffu;
constexpr uint32_t kNowhere = 0xffffffffu;  // in place of a count of accesses

// Elements that a kernel makes room for in a head.
constexpr int room_for(int size) { return size <= 64 ? 64 : size <= 128 ? 128 : kWidest; }

// Keys that a warp takes at a step, of heads that have room for `width` elements: bytes bring less work for each, so that what
// a step costs whatever it holds is shared by more of them.
constexpr int keys_of_step(int64_t element_bytes, int width) { return element_bytes == 1 && width <= 128 ? 32 : 16; }

// Whether a block may read several key heads: rows of 128 bytes and less, each alone, are too short for the memory.
constexpr bool shares_heads(int64_t element_bytes, int width) { return element_bytes == 1 && width <= 128; }

// Whether keys may be the rows of products, and queries their columns.
constexpr bool turns(int64_t element_bytes, int width) { return element_bytes == 1 && width == 128; }

// Parts that a block leaves of a tile that it shares: one, or beside such products one of each of the warps that take turns at
// a key head's keys, so that they need not meet.
constexpr int parts_of_block(int64_t element_bytes, int width, int64_t group, int64_t together) {
  return turns(element_bytes, width) && group <= kRows / 2 ? kWarps >> int(together) / 2 : 1;
}

// Strides of an array of pages as counts of accesses.
struct Accesses {
  uint32_t page, token, head;
};

// Where a row's 16 bytes lie, so that neither rows next to each other nor the same bytes of 8 rows meet in one bank.
template <int ROW_BYTES>
__device__ inline int place(int row, int chunk) {
  constexpr int kChunks = ROW_BYTES / kAccess, kSpan = kChunks < 8 ? kChunks : 8;
  return (row * kChunks + (chunk ^ row / (8 / kSpan) % kSpan)) * kAccess;
}

// Begin to copy rows of keys into tiles [KEYS, BLOCK] of elements of BYTES, one for each of HEADS heads, `tile_bytes` apart,
// whose rows are `head` accesses apart. HEADS warps share this, and `part` is what this one does: KEYS / HEADS keys, of all
// heads, so that the rows of a key are asked for side by side. Lane l knows how many accesses there are before the first head's
// row of key l % KEYS; kNowhere for rows of zeros, as columns from `row_bytes` on are: what is not there is not read.
template <int KEYS, int BYTES, int BLOCK, int HEADS>
__device__ inline void copy_rows(char* to, int tile_bytes, const char* from, uint32_t at, uint32_t head, int row_bytes,
                                 int part, int lane) {
  constexpr int kRowBytes = BLOCK * BYTES, kChunks = kRowBytes / kAccess, kAcross = HEADS * kChunks;
  constexpr int kTogether = 32 / kAcross, kCopies = KEYS / HEADS / kTogether;  // keys of one copy, and copies
  constexpr int kAtOnce = BLOCK > 128 ? 4 : kCopies;                           // wide heads leave few registers
  static_assert(kAcross <= 32 && KEYS / HEADS % 8 == 0);
  const int chunk = lane % kChunks, mine = place<kRowBytes>(lane / kAcross, chunk), start = part * (KEYS / HEADS);
  const uint32_t across = unsigned(chunk) + unsigned(lane / kChunks % HEADS) * head;
  const bool in_row = chunk * kAccess < row_bytes;
  to += lane / kChunks % HEADS * tile_bytes + start * kRowBytes;
#pragma unroll 1
  for (int base = 0; base < kCopies; base += kAtOnce) {
    uint32_t rows_at[kAtOnce];  // all of them asked for before the first copy, which waits for its own
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows_at[i] = __shfl_sync(kWarp, at, start + (base + i) * kTogether + lane / kAcross);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int first = (base + i) * kTogether, turned = place<kRowBytes>(first, 0) % kRowBytes;
      const bool there = in_row && rows_at[i] != kNowhere;
      copy_bytes_ahead<kAccess>(to + (mine ^ turned) + first * kRowBytes, from + uint64_t(rows_at[i] + across) * kAccess,
                                there);
    }
  }
}

// The same of rows that no access fits, which are there at once; `at` in bytes, -1 for a row of zeros.
template <int KEYS, int BYTES, int BLOCK>
__device__ inline void copy_elements(char* to, const char* from, int64_t at, int row_bytes, int lane) {
  using Raw = std::conditional_t<BYTES == 1, uint8_t, uint16_t>;
  constexpr int kRowBytes = BLOCK * BYTES;
#pragma unroll 1
  for (int byte = lane * BYTES; byte < KEYS * kRowBytes; byte += 32 * BYTES) {
    const int row = byte / kRowBytes, column = byte % kRowBytes;
    const int64_t row_at = __shfl_sync(kWarp, at, row);
    const bool there = row_at >= 0 && column < row_bytes;
    *reinterpret_cast<Raw*>(to + place<kRowBytes>(row, column / kAccess) + column % kAccess) =
        there ? *reinterpret_cast<const Raw*>(from + row_at + column) : Raw(0);
  }
}

// Two numbers, rounded, as half a register each.
template <typename T>
__device__ inline uint32_t pair_of(float first, float second) {
  const float values[2] = {first, second};
  return __builtin_bit_cast(uint32_t, rounded<T, 2>(values));
}

// Four float8_e4m3fn as float16. Halves of a word that are named as such need no shifts.
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

// Four stored bytes as two pairs of float16, which has all that such bytes can mean: of bytes 0, 1 and 2, 3, or where pairs are
// CROSSED of 0, 2 and 1, 3.
template <typename S, bool CROSSED>
__device__ inline void widen_bytes(uint32_t word, uint32_t (&pairs)[2]) {
  if constexpr (std::is_same_v<S, E4M3>) {
    widen_e4m3(CROSSED ? __byte_perm(word, 0, 0x3120) : word, pairs);
  } else if constexpr (std::is_same_v<S, E5M2>) {  // the upper half of a float16
    pairs[0] = __byte_perm(word, 0, CROSSED ? 0x2404 : 0x1404);
    pairs[1] = __byte_perm(word, 0, CROSSED ? 0x3414 : 0x3424);
  } else {
    // A float16 between 2^10 and 2^11 has a whole number for its fraction: 1024 + 128 + what a byte means.
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

// How columns of a tile, keys' channels or values', meet the columns of products. Stored bytes come in pairs, as one element of
// 16 bits, so that a product's columns are other ones than for elements of 16 bits.
template <typename T_, typename S_, int BLOCK>
struct Tile {
  using T = T_;
  using S = S_;
  static constexpr int kChannels = BLOCK;
  static constexpr bool kInRuns = false;  // whether a lane's sums are of channels side by side
  static constexpr int kKeys = keys_of_step(sizeof(S), BLOCK);
  static constexpr unsigned kAllSeen = 0xffffffffu >> (32 - kKeys);
  static constexpr int kRowBytes = BLOCK * int(sizeof(S));
  static constexpr int kBytes = kKeys * kRowBytes;
  static constexpr bool kIsBytes = sizeof(S) == 1;
  static constexpr bool kShares = shares_heads(sizeof(S), BLOCK);
  static_assert(!kIsBytes || std::is_same_v<T, __half>);

  template <typename Problem>
  __device__ explicit Tile(const Problem&) {}

  // All threads that share a tile.
  static __device__ void meet_all() { __syncthreads(); }

  // The channel of a query's pair `half` (0, 1) in the `step`-th 16 columns.
  static __device__ int query_channel(int step, int half, int lane) {
    return step * 16 + (kIsBytes ? 4 * (lane % 4) + 2 * half : 2 * (lane % 4) + 8 * half);
  }

  // The channel of the sums' element `second` (0, 1) in the `index`-th 8 columns.
  static __device__ int value_channel(int index, int second, int lane) {
    const int column = 2 * (lane % 4) + second;
    return kIsBytes ? index / 2 * 16 + 2 * column + index % 2 : index * 8 + column;
  }

  // products[kKeys / 8] [kRows, 8] of queries and the keys; `queries(step)` are those of 16 columns. TURNED, where keys are
  // bytes: [kKeys / 16] [16, 8] of the keys and up to 8 queries.
  template <bool TURNED, int TILES, typename Queries>
  static __device__ void multiply_keys(float (&products)[TILES][4], const Queries& queries, const char* keys, int lane) {
    uint32_t found[4];
    if constexpr (kIsBytes) {
      const int mine = place<kRowBytes>(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step += 2) {
#pragma unroll
        for (int first = 0; first < kKeys; first += 16) {
          load_matrices(found, keys + (mine ^ step * kAccess) + first * kRowBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t upper[2], lower[2];  // of keys first ... first + 7 and of those 8 further
            widen_bytes<S, false>(found[2 * half], upper);
            widen_bytes<S, false>(found[2 * half + 1], lower);
            const Pack<uint32_t, 4> query = queries(step + half);
            if constexpr (TURNED) {
              multiply_add<T>(products[first / 16], {upper[0], lower[0], upper[1], lower[1]}, query.data[0], query.data[2]);
            } else {
              multiply_add<T>(products[first / 8], query.data, upper[0], upper[1]);
              multiply_add<T>(products[first / 8 + 1], query.data, lower[0], lower[1]);
            }
          }
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

  // sums[BLOCK / 8] [kRows, 8] of the keys' weights, 16 by 16, and values. TURNED: [BLOCK / 16] [16, 8] of values, turned, and
  // the weights of 8 keys each.
  template <bool TURNED, int SUMS>
  static __device__ void add_values(float (&sums)[SUMS][4], const uint32_t (&weights)[kKeys / 4 / (TURNED ? 2 : 1)],
                                    const char* values, int lane) {
    uint32_t found[4];
    const auto weights_of = [&](int first) {  // of 16 keys
      return Pack<uint32_t, 4>{weights[first / 4], weights[first / 4 + 1], weights[first / 4 + 2], weights[first / 4 + 3]};
    };
    if constexpr (kIsBytes) {
      const int mine = place<kRowBytes>(lane % 16, lane / 16);
#pragma unroll
      for (int step = 0; step < BLOCK / 16; step += 2) {
#pragma unroll
        for (int first = 0; first < kKeys; first += 16) {
          load_turned_matrices(found, values + (mine ^ step * kAccess) + first * kRowBytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t low[2], high[2];  // even channels and odd ones of keys first ... first + 7, and of those 8 further
            widen_bytes<S, true>(found[2 * half], low);
            widen_bytes<S, true>(found[2 * half + 1], high);
            if constexpr (TURNED) {
              multiply_add<T>(sums[step + half], {low[0], low[1], high[0], high[1]}, weights[first / 8],
                              weights[first / 8 + 1]);
            } else {
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) {
                multiply_add<T>(sums[2 * (step + half) + odd], weights_of(first).data, low[odd], high[odd]);
              }
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK / 16; ++i) {
        load_turned_matrices(found, values + place<kRowBytes>(lane % 16, 2 * i + lane / 16));
        multiply_add<T>(sums[2 * i], weights_of(0).data, found[0], found[1]);
        multiply_add<T>(sums[2 * i + 1], weights_of(0).data, found[2], found[3]);
      }
    }
  }
};

}  // namespace ejkernel::paged_attention
