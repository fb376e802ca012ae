// Sums and maxima over the threads of one row, the same in every thread and in every run.
#pragma once

#include <cmath>

#include "device.cuh"

namespace ejkernel {

constexpr int kMaxWarps = 16;
constexpr int kMaxCluster = 16;
constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxValues = 2;
constexpr int kScratch = 2 * kMaxValues * (kMaxWarps + kMaxCluster);
constexpr int kMailboxes = 2;
constexpr int kScratchBytes = kScratch * sizeof(float) + kMailboxes * sizeof(Mailbox);

struct Add {
  static constexpr float kNeutral = 0.f;
  static __device__ float of(float a, float b) { return a + b; }
};

// Of two numbers of which one is NaN, the other.
struct Largest {
  static constexpr float kNeutral = -INFINITY;
  static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

// Reduction over `threads` neighbouring threads: a power of two up to 32, which share a warp, or all warps of a block; and over
// the `blocks` of a cluster. In shared memory `scratch` has kScratch floats, and there are kMailboxes, open in a cluster.
template <bool CLUSTER>
struct Reducer {
  static constexpr bool kCluster = CLUSTER;
  float* scratch;
  Mailbox* mailboxes;
  int threads;
  int blocks;
  // The half of scratch for warps in use: with two of them, one barrier per reduction is enough. Above that bit, deliveries so
  // far; each half of the scratch for them has its own mailbox.
  unsigned turns;

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

  // Over the threads of this block.
  template <class Op, int K>
  __device__ void block(float (&values)[K]) {
    static_assert(K <= kMaxValues);
    if (threads <= 32) return warp<Op>(values, threads);
    warp<Op>(values, 32);
    float* warps = scratch + turns % 2 * kMaxValues * kMaxWarps;  // [K, kMaxWarps]
    const int count = threads / 32, span = count > 8 ? 16 : 8, slot = threadIdx.x % span;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) warps[k * kMaxWarps + threadIdx.x / 32] = values[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = slot < count ? warps[k * kMaxWarps + slot] : Op::kNeutral;
    warp<Op>(values, span);
    turns ^= 1;
  }

  __device__ int rank() const { return CLUSTER ? int(cluster_rank()) : 0; }

  // What every block of the cluster gives, [K, kMaxCluster]; valid until the next but one, after a `block` in between.
  template <int K>
  __device__ const float* exchange(const float (&values)[K]) {
    static_assert(K <= kMaxValues);
    const unsigned half = turns / 2 % 2;
    float* found = scratch + 2 * kMaxValues * kMaxWarps + half * kMaxValues * kMaxCluster;
    if (threadIdx.x == 0) expect_bytes(mailboxes + half, K * sizeof(float) * blocks);
    if (int(threadIdx.x) < blocks) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        send_to_rank(found + k * kMaxCluster + cluster_rank(), mailboxes + half, threadIdx.x, values[k]);
      }
    }
    wait_for_mail(mailboxes + half, turns / 4 % 2);
    turns += 2;
    return found;
  }

  // Over all threads of the row.
  template <class Op, int K>
  __device__ void all(float (&values)[K]) {
    block<Op>(values);
    if constexpr (CLUSTER) {
      const float* found = exchange(values);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        values[k] = found[k * kMaxCluster];
        for (int other = 1; other < blocks; ++other) values[k] = Op::of(values[k], found[k * kMaxCluster + other]);
      }
    }
  }

  template <class Op>
  __device__ float block(float value) {
    float values[1] = {value};
    block<Op>(values);
    return values[0];
  }

  template <class Op>
  __device__ float all(float value) {
    float values[1] = {value};
    all<Op>(values);
    return values[0];
  }
};

// Rows to add up in a fixed order: of `partial` [groups, parts, width] into `total` [groups, width].
struct Parts {
  const float* partial;
  float* total;
  int64_t groups, parts;  // no groups for nothing
};

constexpr int kPartRows = 32;  // rows of threads that share the parts

// Blocks of 32 x kPartRows threads, one for 32 columns of a group of `first`, then of `second`.
static __global__ void sum_parts(Parts first, Parts second, int64_t width) {
  EJKERNEL_SHARED(float, sums, kPartRows * 33);
  const int64_t tiles = (width + 31) / 32, of_first = first.groups * tiles;
  const Parts here = blockIdx.x < of_first ? first : second;
  const int64_t index = blockIdx.x < of_first ? blockIdx.x : blockIdx.x - of_first;
  const int64_t group = index / tiles, column = index % tiles * 32 + threadIdx.x;
  float sum = 0.f;
  if (column < width) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < here.parts; part += kPartRows) {
      sum += here.partial[(group * here.parts + part) * width + column];
    }
  }
  sums[threadIdx.y * 33 + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
#pragma unroll
    for (int other = 1; other < kPartRows; ++other) sum += sums[other * 33 + threadIdx.x];
    here.total[group * width + column] = sum;
  }
}

}  // namespace ejkernel
