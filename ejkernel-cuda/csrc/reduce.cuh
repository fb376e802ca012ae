// Sums and maxima over the threads of one row, the same in every thread and in every run; and what blocks tell each other.
#pragma once

#include <cmath>

#include "pack.cuh"

namespace ejkernel {

constexpr int kMaxWarps = 16;
constexpr int kMaxCluster = 16;
constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxValues = 2;
template <int VALUES = kMaxValues>
constexpr int kScratch = 2 * VALUES * kMaxWarps;  // of a reduction of so many values at once
constexpr int kMailboxes = 4;

struct Add {
  static constexpr float kNeutral = 0.f;
  static __device__ float of(float a, float b) { return a + b; }
};

// Of two numbers of which one is NaN, the other.
struct Largest {
  static constexpr float kNeutral = -INFINITY;
  static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

// What is known of the threads of a row when a kernel is compiled: they are a warp or a part of one, several warps, either of the
// two, or several warps in each block of a cluster.
enum class Span { kWarp, kWarps, kBlock, kCluster };

// Reduction over `threads` neighbouring threads: a power of two up to 32, which share a warp, or all warps of a block. In shared
// memory `scratch` has kScratch<values> floats.
struct Reducer {
  float* scratch;
  int threads;
  int values = kMaxValues;  // at once, at most
  unsigned turn = 0;        // the half of scratch in use: with two of them, one barrier per reduction is enough

  template <class Op>
  static __device__ float warp(float value, int count) {
    float values[1] = {value};
    warp<Op>(values, count);
    return values[0];
  }

  // Neighbours up to `count`, a power of two up to 32, in the same order in each of them.
  template <class Op, int K>
  static __device__ void warp(float (&values)[K], int count) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (step >= count) continue;
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = Op::of(values[k], __shfl_xor_sync(0xffffffffu, values[k], step));
    }
  }

  // Whether threads of other warps have the row, too.
  template <Span SPAN>
  __device__ bool is_wide() const {
    return SPAN == Span::kCluster || SPAN == Span::kWarps || (SPAN == Span::kBlock && threads > 32);
  }

  // Threads of the row that share a warp.
  template <Span SPAN>
  __device__ int neighbours() const {
    return is_wide<SPAN>() ? 32 : threads;
  }

  // From values that are equal in a warp to those of all warps, each in one of as many neighbours as come back; `absent` where
  // there are more neighbours than warps.
  template <int K>
  __device__ int gather(float (&found)[K], const float (&absent)[K]) {
    float* warps = scratch + turn * values * kMaxWarps;  // [K, kMaxWarps]
    const int count = threads / 32, span = count > 8 ? 16 : 8, slot = threadIdx.x % span;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) warps[k * kMaxWarps + threadIdx.x / 32] = found[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) found[k] = slot < count ? warps[k * kMaxWarps + slot] : absent[k];
    turn ^= 1;
    return span;
  }

  template <class Op, Span SPAN = Span::kBlock, int K>
  __device__ void all(float (&found)[K]) {
    warp<Op>(found, neighbours<SPAN>());
    if (!is_wide<SPAN>()) return;
    float absent[K];
#pragma unroll
    for (int k = 0; k < K; ++k) absent[k] = Op::kNeutral;
    const int warps = gather(found, absent);
    warp<Op>(found, warps);
  }

  template <class Op>
  __device__ float all(float value) {
    float found[1] = {value};
    all<Op>(found);
    return found[0];
  }
};

// What a block that has whole rows found of one, K numbers.
template <int K>
struct Alone {
  static constexpr bool kCluster = false;
  const float (&values)[K];
  __device__ explicit Alone(const float (&values)[K]) : values(values) {}
  __device__ float total(int k) const { return values[k]; }
};

// What every block of a cluster found of a row that they share. The lanes of a warp have a block each, over and over, and reduce
// together: one thread that reads block after block waits for shared memory as often as there are blocks.
template <int K>
struct Shared {
  static constexpr bool kCluster = true;
  const float* values;  // [K, kMaxCluster]
  int blocks;           // a power of two
  __device__ int block() const { return int(threadIdx.x) & (blocks - 1); }
  __device__ float of_block(int k) const { return values[k * kMaxCluster + block()]; }
  // Of what each lane has of its block.
  template <class Op>
  __device__ float all(float value) const {
    return Reducer::warp<Op>(value, blocks);
  }
  __device__ float total(int k) const { return all<Add>(of_block(k)); }
};

// What the blocks of a cluster tell each other of one row after the other. A block may send of the next row before it receives of
// the last one, if its threads wait for each other between what they receive and the next but one that they send: then four
// places are enough.
template <int K>
struct Exchange {
  static constexpr int kPlaces = kMailboxes * K * kMaxCluster;
  float* places;  // kPlaces
  Mailbox* mailboxes;
  int blocks;
  unsigned sent = 0, received = 0;

  // The same values in every thread.
  __device__ void send(const float (&values)[K]) {
    const unsigned box = sent++ % kMailboxes;
    if (threadIdx.x == 0) expect_bytes(mailboxes + box, K * sizeof(float) * blocks);
    if (int(threadIdx.x) >= blocks) return;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float* place = places + (box * K + k) * kMaxCluster + cluster_rank();
      send_to_rank(place, mailboxes + box, threadIdx.x, values[k]);
    }
  }

  __device__ Shared<K> receive() {
    const unsigned box = received % kMailboxes;
    wait_for_mail(mailboxes + box, received++ / kMailboxes % 2);
    return {places + box * K * kMaxCluster, blocks};
  }
};

// Shared memory beside what a launch asks for, at most.
constexpr int kScratchBytes = (kScratch<> + Exchange<kMaxValues>::kPlaces) * sizeof(float) + kMailboxes * sizeof(Mailbox);

// How the gradient of a parameter is stored.
enum class Number { kFloat, kHalf, kBfloat16 };

// Rows to add up in a fixed order: of `partial` [groups, parts, width] into `total` [groups, width].
struct Parts {
  const float* partial;
  void* total;
  Number number;          // of total
  int64_t groups, parts;  // no groups for nothing
};

template <typename T, int N>
__device__ inline void store_each(void* to, int64_t at, const float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) static_cast<T*>(to)[at + i] = from_float<T>(values[i]);
}

constexpr int kSumThreads = 256;
constexpr int kPartsAtOnce = 8;

// Threads of a block of `sum_parts` that are beside each other, N columns each: as few as leave the others so many parts that each
// asks for all of its own together, but no fewer than 32 bytes take.
template <int N>
inline int lanes_of_sum(int64_t parts) {
  int lanes = kSumThreads;
  while (lanes * N > 8 && kSumThreads / lanes * int64_t{kPartsAtOnce} < parts) lanes /= 2;
  return lanes;
}

// Blocks of kSumThreads threads, one for lanes * N columns of a group of `first`, then of `second`.
template <int N>
static __global__ void __launch_bounds__(kSumThreads) sum_parts(Parts first, Parts second, int64_t width, int lanes) {
  using Columns = Pack<float, N>;
  EJKERNEL_SHARED(Columns, sums, kSumThreads);
  const unsigned tiles = (unsigned(width) + lanes * N - 1) / (lanes * N), of_first = unsigned(first.groups) * tiles;
  const Parts here = blockIdx.x < of_first ? first : second;
  const unsigned index = blockIdx.x < of_first ? blockIdx.x : blockIdx.x - of_first, tile = index % tiles;
  const int rows = kSumThreads / lanes;
  const int64_t group = index / tiles, column = int64_t(tile * lanes + threadIdx.x % lanes) * N;
  float sum[N] = {};
  if (column < width) {
    for (int64_t part = threadIdx.x / lanes; part < here.parts; part += rows * kPartsAtOnce) {
#pragma unroll
      for (int next = 0; next < kPartsAtOnce; ++next) {
        const int64_t at = part + next * rows;
        const Columns found =
            at < here.parts ? load<float, N>(here.partial + (group * here.parts + at) * width + column) : zeros<float, N>();
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += found.data[i];
      }
    }
  }
  // First the rows that share a warp, then the warps that have the same columns.
  for (int step = 16; step >= lanes; step /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = Add::of(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], step));
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.x].data[i] = sum[i];
  __syncthreads();
  if (int(threadIdx.x) >= lanes || column >= width) return;
  for (int other = max(lanes, 32); other < kSumThreads; other += max(lanes, 32)) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += sums[threadIdx.x + other].data[i];
  }
  const int64_t at = group * width + column;
  switch (here.number) {
    case Number::kFloat: return store_each<float>(here.total, at, sum);
    case Number::kHalf: return store_each<__half>(here.total, at, sum);
    case Number::kBfloat16: return store_each<__nv_bfloat16>(here.total, at, sum);
  }
}

}  // namespace ejkernel
