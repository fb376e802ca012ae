// Blocks of queries whose tiles several programs had, put together from their parts in a fixed order (Dao et al.,
// Flash-Decoding, 2023).
#pragma once

#include "flash_attention/kernels.cuh"
#include "pack.cuh"

namespace ejkernel::flash_attention {

constexpr int kMergeWarps = 8, kMergeThreads = 32 * kMergeWarps;  // of a block of the merge; a warp has a row

template <class S>
int merge_blocks(const Arguments& arguments) {
  return arguments.shares.blocks * (S::kBlockQ / kMergeWarps);
}

// It may begin before `attend` ends, for which it waits when it knows what to read. `out` is [batch, queries, heads,
// value_size].
template <class S>
__global__ void __launch_bounds__(kMergeThreads)
    merge(const __grid_constant__ Arguments arguments, typename S::T* out, int value_size) {
#ifdef EJKERNEL_HOPPER
  constexpr int kEach = 4, kSlices = (S::kSize + 32 * kEach - 1) / (32 * kEach);  // columns of a lane at once; how many times
  constexpr int kAtOnce = 4;                                                      // parts that are read beside each other
  const Shares& shares = arguments.shares;
  const float unit = arguments.logits.unit;
  const int lane = threadIdx.x % 32, number = int(blockIdx.x) * kMergeWarps + int(threadIdx.x) / 32;
  const int block = number / S::kBlockQ, row = number % S::kBlockQ;
  const Place place = arguments.order.place(shares.first + block);
  const int query = arguments.tokens(place.block * S::kBlockQ + row);
  const int first = shares.owner(block * shares.tiles), last = shares.owner((block + 1) * shares.tiles - 1);
  wait_for_last_kernel();
  if (query >= arguments.rules.queries || first == last) return;  // a block that one program had is there
  float largest = -INFINITY, total = 0.f;
  Pack<float, kEach> sums[kSlices] = {};
#pragma unroll 1
  for (int base = first; base <= last; base += kAtOnce) {
    float2 known[kAtOnce];
    Pack<float, kEach> values[kAtOnce][kSlices];
    float most = largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int program = base + i;
      const bool there = program <= last;
      const int64_t at = int64_t(2 * program + shares.number_in(program, block)) * S::kBlockQ + row;
      known[i] = there ? arguments.parts.weights[at] : float2{-INFINITY, 0.f};
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = (slice * 32 + lane) * kEach;
        values[i][slice] = {};
        if (there && column < S::kSize) values[i][slice] = load<float, kEach>(arguments.parts.values + at * S::kSize + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, known[i].x);
    const float shift = most == -INFINITY ? 0.f : most * unit, kept = fast_exp2(largest * unit - shift);
    largest = most, total *= kept;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = fast_exp2(known[i].x * unit - shift);
      total += weight * known[i].y;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          float& sum = sums[slice].data[j];
          sum = (i == 0 ? sum * kept : sum) + weight * values[i][slice].data[j];
        }
      }
    }
  }
  float lse;
  const float factor = finish_row(largest, total, unit, lse);
  const int64_t at = arguments.row_of(place, query, row);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int column = (slice * 32 + lane) * kEach;
    if (column >= value_size) break;
    float result[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) result[i] = sums[slice].data[i] * factor;
    store(out + at * value_size + column, rounded<typename S::T>(result));
  }
  if (lane == 0 && arguments.lse) arguments.lse[at] = lse;
#endif
}

}  // namespace ejkernel::flash_attention
