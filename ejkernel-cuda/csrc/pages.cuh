// Definitions that kernels over paged KV caches share: requests, one-byte page types, a prefix sum.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace ejkernel {

struct Int8 {
  uint8_t bits;
};
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

struct Requests {
  const int32_t* starts;                     // [1 or batch, requests + 1]
  const int32_t* lengths;                    // [1 or batch, requests]
  const int32_t* tables;                     // [1 or batch, requests, table_width]
  bool one_starts, one_lengths, one_tables;  // shared by the batch
  int64_t tokens, requests, table_width, pages, page_size;
};

// Inclusive prefix sum over the lanes.
__device__ inline int inclusive_scan(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_sync(0xffffffffu, value, max(lane - step, 0));
    value += lane >= step ? other : 0;
  }
  return value;
}

}  // namespace ejkernel
