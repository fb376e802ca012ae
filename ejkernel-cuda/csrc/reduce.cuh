// Sums and maxima over the threads of one row, the same in every thread and in every run; and what blocks tell each other.
#pragma once

#include <cmath>

#include "device.cuh"

namespace ejkernel {

constexpr int kMaxWarps = 16;
constexpr int kMaxCluster = 16;
constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxValues = 2;
constexpr int kScratch = 2 * kMaxValues * kMaxWarps;
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

// Reduction over `threads` neighbouring threads: a power of two up to 32, which share a warp, or all warps of a block. In shared
// memory `scratch` has kScratch floats.
struct Reducer {
  float* scratch;
  int threads;
  unsigned turn;  // the half of scratch in use: with two of them, one barrier per reduction is enough

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

  // Threads of the row that share a warp.
  __device__ int neighbours() const { return threads < 32 ? threads : 32; }

  // From values that are equal in a warp to those of all warps, each in one of as many neighbours as come back; `absent` where
  // there are more neighbours than warps.
  template <int K>
  __device__ int gather(float (&values)[K], const float (&absent)[K]) {
    static_assert(K <= kMaxValues);
    float* warps = scratch + turn * kMaxValues * kMaxWarps;  // [K, kMaxWarps]
    const int count = threads / 32, span = count > 8 ? 16 : 8, slot = threadIdx.x % span;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) warps[k * kMaxWarps + threadIdx.x / 32] = values[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = slot < count ? warps[k * kMaxWarps + slot] : absent[k];
    turn ^= 1;
    return span;
  }

  template <class Op, int K>
  __device__ void all(float (&values)[K]) {
    warp<Op>(values, neighbours());
    if (threads <= 32) return;
    float absent[K];
#pragma unroll
    for (int k = 0; k < K; ++k) absent[k] = Op::kNeutral;
    const int warps = gather(values, absent);
    warp<Op>(values, warps);
  }

  template <class Op>
  __device__ float all(float value) {
    float values[1] = {value};
    all<Op>(values);
    return values[0];
  }
};

// What a block that has whole rows found of one, K numbers.
template <int K>
struct Alone {
  static constexpr bool kCluster = false;
  float values[K];
  __device__ float total(int k) const { return values[k]; }
};

// What every block of a cluster found of a row that they share.
template <int K>
struct Shared {
  static constexpr bool kCluster = true;
  const float* values;  // [K, kMaxCluster]
  int blocks;
  __device__ float of(int k, int block) const { return values[k * kMaxCluster + block]; }
  __device__ float total(int k) const {
    float sum = of(k, 0);
    for (int block = 1; block < blocks; ++block) sum += of(k, block);
    return sum;
  }
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
constexpr int kScratchBytes = (kScratch + Exchange<kMaxValues>::kPlaces) * sizeof(float) + kMailboxes * sizeof(Mailbox);

// Rows to add up in a fixed order: of `partial` [groups, parts, width] into `total` [groups, width].
struct Parts {
  const float* partial;
  float* total;
  int64_t groups, parts;  // no groups for nothing
};

constexpr int kPartRows = 32;  // rows of threads that share the parts
constexpr int kPartsAtOnce = 8;

// Blocks of 32 x kPartRows threads, one for 32 columns of a group of `first`, then of `second`.
static __global__ void sum_parts(Parts first, Parts second, int64_t width) {
  EJKERNEL_SHARED(float, sums, kPartRows * 33);
  const int64_t tiles = (width + 31) / 32, of_first = first.groups * tiles;
  const Parts here = blockIdx.x < of_first ? first : second;
  const int64_t index = blockIdx.x < of_first ? blockIdx.x : blockIdx.x - of_first;
  const int64_t group = index / tiles, column = index % tiles * 32 + threadIdx.x;
  float sum = 0.f;
  if (column < width) {
    for (int64_t part = threadIdx.y; part < here.parts; part += kPartRows * kPartsAtOnce) {
#pragma unroll
      for (int next = 0; next < kPartsAtOnce; ++next) {
        const int64_t at = part + next * kPartRows;
        sum += at < here.parts ? here.partial[(group * here.parts + at) * width + column] : 0.f;
      }
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
