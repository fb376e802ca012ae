// Sums over the threads of one row, the same in every thread and in every run.
#pragma once

#include <cstdint>

namespace ejkernel {

constexpr int kMaxWarps = 32;

// Sum over `threads` neighbouring threads. Up to 32 (a power of two) they share a warp; above, they are the whole block in x.
// `scratch` has 2 * kMaxWarps floats; `turn` alternates 0, 1 from call to call, so that one barrier a call is enough.
__device__ inline float row_sum(float value, int threads, float* scratch, int turn) {
  for (int step = (threads < 32 ? threads : 32) / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  if (threads <= 32) return value;
  float* warps = scratch + turn * kMaxWarps;
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
  for (int warp = 0; warp < threads / 32; ++warp) total += warps[warp];
  return total;
}

// Add `parts` rows of `partial` [groups, parts, width] in a fixed order, into `total` [groups, width]. Blocks of 32 x 8 threads.
__global__ void sum_parts(const float* __restrict__ partial, float* __restrict__ total, int64_t parts, int64_t width) {
  __shared__ float sums[8][33];
  const int64_t tiles = (width + 31) / 32;
  const int64_t group = blockIdx.x / tiles;
  const int64_t column = (blockIdx.x % tiles) * 32 + threadIdx.x;
  float sum = 0.f;
  if (column < width) {
    for (int64_t part = threadIdx.y; part < parts; part += 8) sum += partial[(group * parts + part) * width + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (int other = 1; other < 8; ++other) sum += sums[other][threadIdx.x];
    total[group * width + column] = sum;
  }
}

}  // namespace ejkernel
