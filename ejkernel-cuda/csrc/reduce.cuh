// Reductions over the threads of a row, with the same result in every thread and every run; and the exchange between blocks of
// a cluster.
#pragma once

#include <cmath>

#include "pack.cuh"

namespace ejkernel {

constexpr int kMaxWarps = 16;
constexpr int kMaxCluster = 16;
constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxValues = 3;
template <int VALUES = kMaxValues>
constexpr int kScratch = 2 * VALUES * kMaxWarps;  // floats for reductions of so many values at once
constexpr int kClusterMbarriers = 4;

struct Add {
  static constexpr float kNeutral = 0.f;
  static __device__ float of(float a, float b) { return a + b; }
};

// Of a NaN and a number, the number.
struct Max {
  static constexpr float kNeutral = -INFINITY;
  static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

// What is known at compile time of a row's threads: (part of) a warp, several warps, either of the two, or several warps in
// each block of a cluster.
enum class Span { kWarp, kWarps, kBlock, kCluster };

// Reduction over `threads` adjacent threads: a power of two up to 32 within a warp, or all warps of a block. `scratch` has
// kScratch<values> floats of shared memory.
struct Reducer {
  float* scratch;
  int threads;
  int values = kMaxValues;  // maximum at once
  unsigned buffer = 0;      // the half of scratch in use: double-buffered, so that one barrier per reduction suffices

  template <class Op>
  static __device__ float warp(float value, int count) {
    float values[1] = {value};
    warp<Op>(values, count);
    return values[0];
  }

  // Butterfly reduction over `count` adjacent lanes, a power of two up to 32; every lane adds in the same order.
  template <class Op, int K>
  static __device__ void warp(float (&values)[K], int count) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (step >= count) continue;
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] = Op::of(values[k], __shfl_xor_sync(0xffffffffu, values[k], step));
    }
  }

  // Whether the row's threads span several warps.
  template <Span SPAN>
  __device__ bool is_wide() const {
    return SPAN == Span::kCluster || SPAN == Span::kWarps || (SPAN == Span::kBlock && threads > 32);
  }

  // Threads of the row within a warp.
  template <Span SPAN>
  __device__ int row_lanes() const {
    return is_wide<SPAN>() ? 32 : threads;
  }

  // Exchange warp-uniform values between warps: each of as many adjacent lanes as are returned gets one warp's values; `absent`
  // if there are more lanes than warps.
  template <int K>
  __device__ int gather(float (&found)[K], const float (&absent)[K]) {
    float* warps = scratch + buffer * values * kMaxWarps;  // [K, kMaxWarps]
    const int count = threads / 32, span = count > 8 ? 16 : 8, slot = threadIdx.x % span;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) warps[k * kMaxWarps + threadIdx.x / 32] = found[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) found[k] = slot < count ? warps[k * kMaxWarps + slot] : absent[k];
    buffer ^= 1;
    return span;
  }

  template <class Op, Span SPAN = Span::kBlock, int K>
  __device__ void all(float (&found)[K]) {
    warp<Op>(found, row_lanes<SPAN>());
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

// The power of two that rows of T are multiplied by before they are squared: `square_unit` of ejkernel.operations.common.rows.
template <typename T>
__host__ __device__ inline float square_unit(float epsilon) {
  const int least = int(__builtin_bit_cast(uint32_t, epsilon) >> 23) - 126 + 102;  // epsilon is not negative
  const int half = least < 0 ? 0 : least / 2 > 60 ? 60 : least / 2;
  return std::is_same_v<T, __half> || epsilon == 0.f ? 1.f : __builtin_bit_cast(float, uint32_t(127 - half) << 23);
}

// K statistics of a row that a block holds whole.
template <int K>
struct BlockResult {
  static constexpr bool kCluster = false;
  const float (&values)[K];
  __device__ explicit BlockResult(const float (&values)[K]) : values(values) {}
  __device__ float total(int k) const { return values[k]; }
};

// K statistics of every block of a cluster, of a row that they share. Each lane reads one block's, repeating, and the warp
// reduces them: one thread that reads block after block waits for shared memory as often as there are blocks.
template <int K>
struct ClusterResult {
  static constexpr bool kCluster = true;
  const float* values;  // [K, kMaxCluster]
  int blocks;           // a power of two
  __device__ int block() const { return int(threadIdx.x) & (blocks - 1); }
  __device__ float of_block(int k) const { return values[k * kMaxCluster + block()]; }
  // Reduce each lane's value of its block.
  template <class Op>
  __device__ float all(float value) const {
    return Reducer::warp<Op>(value, blocks);
  }
  __device__ float total(int k) const { return all<Add>(of_block(k)); }
};

// Exchange of statistics between the blocks of a cluster, row after row, over distributed shared memory. A block may send the
// next row's before it receives the last row's, if its threads synchronise between what they receive and the next but one that
// they send: then four slots suffice.
template <int K>
struct Exchange {
  static constexpr int kSlots = kClusterMbarriers * K * kMaxCluster;
  float* slots;  // kPlaces
  ClusterMbarrier* mbarriers;
  int blocks;
  unsigned sent = 0, received = 0;

  // The values are the same in every thread.
  __device__ void send(const float (&values)[K]) {
    const unsigned index = sent++ % kClusterMbarriers;
    if (threadIdx.x == 0) cluster_mbarrier_expect_tx(mbarriers + index, K * sizeof(float) * blocks);
    if (int(threadIdx.x) >= blocks) return;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float* slot = slots + (index * K + k) * kMaxCluster + cluster_rank();
      st_async(slot, mbarriers + index, threadIdx.x, values[k]);
    }
  }

  __device__ ClusterResult<K> receive() {
    const unsigned index = received % kClusterMbarriers;
    cluster_mbarrier_wait(mbarriers + index, received++ / kClusterMbarriers % 2);
    return {slots + index * K * kMaxCluster, blocks};
  }
};

// Maximum static shared memory of a row kernel.
constexpr int kScratchBytes =
    (kScratch<> + Exchange<kMaxValues>::kSlots) * sizeof(float) + kClusterMbarriers * sizeof(ClusterMbarrier);

// The dtype of a parameter's gradient.
enum class ScalarType { kFloat, kHalf, kBfloat16 };

// A reduction in a fixed order: of `partial` [groups, partials, width] into `total` [groups, width].
struct PartialSums {
  const float* partial;
  void* total;
  ScalarType scalar_type;    // of total
  int64_t groups, partials;  // groups = 0 for none
};

template <typename T, int N>
__device__ inline void store_each(void* to, int64_t at, const float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) static_cast<T*>(to)[at + i] = from_float<T>(values[i]);
}

constexpr int kSumThreads = 256;
constexpr int kPartialsInFlight = 8;

// Adjacent threads of a block of `sum_partials`, N columns each: few enough that each of the others prefetches all its partial
// sums, but at least 32 bytes wide.
template <int N>
inline int sum_lanes(int64_t partials) {
  int lanes = kSumThreads;
  while (lanes * N > 8 && kSumThreads / lanes * int64_t{kPartialsInFlight} < partials) lanes /= 2;
  return lanes;
}

// Blocks of kSumThreads threads, each for lanes * N columns of a group of `first`, then of `second`.
template <int N>
static __global__ void __launch_bounds__(kSumThreads)
    sum_partials(PartialSums first, PartialSums second, int64_t width, int lanes) {
  using Columns = Pack<float, N>;
  EJKERNEL_SHARED(Columns, sums, kSumThreads);
  const unsigned tiles = (unsigned(width) + lanes * N - 1) / (lanes * N), of_first = unsigned(first.groups) * tiles;
  const PartialSums here = blockIdx.x < of_first ? first : second;
  const unsigned index = blockIdx.x < of_first ? blockIdx.x : blockIdx.x - of_first, tile = index % tiles;
  const int rows = kSumThreads / lanes;
  const int64_t group = index / tiles, column = int64_t(tile * lanes + threadIdx.x % lanes) * N;
  float sum[N] = {};
  if (column < width) {
    for (int64_t base = threadIdx.x / lanes; base < here.partials; base += rows * kPartialsInFlight) {
#pragma unroll
      for (int next = 0; next < kPartialsInFlight; ++next) {
        const int64_t at = base + next * rows;
        const Columns found = at < here.partials ? load<float, N>(here.partial + (group * here.partials + at) * width + column)
                                                 : zeros<float, N>();
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += found.data[i];
      }
    }
  }
  // First rows within a warp, then warps with the same columns.
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
  switch (here.scalar_type) {
    case ScalarType::kFloat: return store_each<float>(here.total, at, sum);
    case ScalarType::kHalf: return store_each<__half>(here.total, at, sum);
    case ScalarType::kBfloat16: return store_each<__nv_bfloat16>(here.total, at, sum);
  }
}

}  // namespace ejkernel
