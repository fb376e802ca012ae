// Combine the partial results of query blocks that several CTAs split, in a fixed order (Dao et al., Flash-Decoding, 2023).
#pragma once

#include "flash_attention/kernels.cuh"
#include "pack.cuh"

namespace ejkernel::flash_attention {

constexpr int kCombineWarps = 8, kCombineThreads = 32 * kCombineWarps;  // of a block of the combine kernel; one warp per row

template <class S>
int combine_blocks(const Arguments& arguments) {
  return arguments.stream_k.blocks * (S::kBlockQ / kCombineWarps);
}

// It may start before `attend` ends, and waits for it before it reads partial results. `out` is [batch, queries, heads,
// value_size].
template <class S>
__global__ void __launch_bounds__(kCombineThreads)
    combine(const __grid_constant__ Arguments arguments, typename S::T* out, int value_size) {
#ifdef EJKERNEL_HOPPER
  constexpr int kEach = 4, kSlices = (S::kSize + 32 * kEach - 1) / (32 * kEach);  // columns of a lane per slice; slices
  constexpr int kInFlight = 4;  // partial results whose loads are in flight together
  const StreamK& stream_k = arguments.stream_k;
  const float unit = arguments.logits.unit;
  const int lane = threadIdx.x % 32, index = int(blockIdx.x) * kCombineWarps + int(threadIdx.x) / 32;
  const int block = index / S::kBlockQ, row = index % S::kBlockQ;
  const TileCoord coord = arguments.scheduler.coord(stream_k.first + block);
  const int query = arguments.tokens(coord.block * S::kBlockQ + row);
  const int first = stream_k.owner(block * stream_k.tiles), last = stream_k.owner((block + 1) * stream_k.tiles - 1);
  wait_for_prerequisites();
  if (query >= arguments.mask.queries || first == last) return;  // one CTA had the whole block and wrote it
  float row_max = -INFINITY, row_sum = 0.f;
  Pack<float, kEach> acc[kSlices] = {};
#pragma unroll 1
  for (int base = first; base <= last; base += kInFlight) {
    float2 stats[kInFlight];
    Pack<float, kEach> values[kInFlight][kSlices];
    float new_max = row_max;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int cta = base + i;
      const bool there = cta <= last;
      const int64_t at = int64_t(2 * cta + stream_k.segment_in(cta, block)) * S::kBlockQ + row;
      stats[i] = there ? arguments.partials.stats[at] : float2{-INFINITY, 0.f};
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = (slice * 32 + lane) * kEach;
        values[i][slice] = {};
        if (there && column < S::kSize)
          values[i][slice] = load<float, kEach>(arguments.partials.values + at * S::kSize + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) new_max = fmaxf(new_max, stats[i].x);
    const float shift = new_max == -INFINITY ? 0.f : new_max * unit, rescale = fast_exp2(row_max * unit - shift);
    row_max = new_max, row_sum *= rescale;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const float weight = fast_exp2(stats[i].x * unit - shift);
      row_sum += weight * stats[i].y;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          float& sum = acc[slice].data[j];
          sum = (i == 0 ? sum * rescale : sum) + weight * values[i][slice].data[j];
        }
      }
    }
  }
  float lse;
  const float factor = finish_row(row_max, row_sum, unit, lse);
  const int64_t at = arguments.row_of(coord, query, row);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int column = (slice * 32 + lane) * kEach;
    if (column >= value_size) break;
    float result[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) result[i] = acc[slice].data[i] * factor;
    store(out + at * value_size + column, rounded<typename S::T>(result));
  }
  if (lane == 0 && arguments.lse) arguments.lse[at] = lse;
#endif
}

}  // namespace ejkernel::flash_attention
