// RMS normalisation of heads and rotary embedding, in float inside.
//
// A head is a sequence of pairs of channels: the rotated ones, then the pass-through ones, which are paired in the same way and
// rotated by 0. A row of threads, part of a warp, holds a whole head.
#pragma once

#include "reduce.cuh"
#include "rope/kernels.cuh"

namespace ejkernel::qk_norm_rope {

using rope::Angles;
using rope::Heads;
using rope::kPairs;
using rope::kThreads;
using rope::Operands;
using rope::Pairs;
using rope::Span;
using rope::Spans;

constexpr int kMaxHeadSize = 256;  // channels of a head

// A scale [0 or 1 or batch, width] in float.
struct Parameter {
  const float* data;  // null when absent
  int64_t stride;     // between batch members; 0 if they share it

  __device__ const float* member(uint32_t index) const { return data ? data + index * stride : nullptr; }
};

constexpr int kPairsPerThread = 4;  // pairs of a thread, so that 32 threads hold the widest head

// Packs of pairs per thread.
template <typename T, bool INTERLEAVED, bool PACKED>
constexpr int kItems = kPairsPerThread / kPairs<T, INTERLEAVED, PACKED>;

// Coordinate of a pack of pairs in a head; that of the first thread if the pack does not exist.
struct PackCoord {
  int base;  // first channel of the rotated or pass-through part
  int pair;  // in that part
  int half;  // pairs of that part
  bool rotated, valid;
};

template <int M>
__device__ inline PackCoord coord_of(int item, const Heads& heads) {
  const int wanted = (item * int(blockDim.x) + int(threadIdx.x)) * M, all = heads.width / 2, pair = wanted < all ? wanted : 0;
  const bool rotated = pair < heads.half;
  return {rotated ? 0 : 2 * heads.half, rotated ? pair : pair - heads.half, rotated ? heads.half : all - heads.half, rotated,
          wanted < all};
}

// scale + scale_offset.
template <int M, bool INTERLEAVED, bool PACKED>
__device__ inline Pairs<float, M, INTERLEAVED, PACKED> factors_at(const float* scale, float scale_offset,
                                                                  const PackCoord& coord) {
  Pairs<float, M, INTERLEAVED, PACKED> factors;
  if (scale) factors.read(scale + coord.base, coord.pair, coord.half);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    factors.first.data[i] = scale ? factors.first.data[i] + scale_offset : 1.f;
    factors.second.data[i] = scale ? factors.second.data[i] + scale_offset : 1.f;
  }
  return factors;
}

// Minimum resident blocks of kThreads; with fewer registers the compiler would not issue the loads of all heads together.
template <typename T, bool PACKED, int SPAN>
constexpr int kMinNormBlocks = !PACKED                      ? 1
                               : SPAN * int(sizeof(T)) <= 8 ? 3
                                                            : 2;

template <int M, bool INTERLEAVED, bool PACKED>
struct Rotation {
  Pairs<float, M, INTERLEAVED, PACKED> cos, sin;

  template <bool PER_PAIR>
  __device__ void read(const Angles& angles, const Heads& heads, const Span& span, const PackCoord& coord) {
    const float *cos_row, *sin_row;
    angles.rows(heads, span.member, span.token, cos_row, sin_row);
    const int pair = coord.rotated ? coord.pair : 0;
    cos = rope::read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(cos_row, pair, heads);
    sin = rope::read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(sin_row, pair, heads);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      cos.first.data[i] = coord.rotated ? cos.first.data[i] : 1.f;
      cos.second.data[i] = coord.rotated ? cos.second.data[i] : 1.f;
      sin.first.data[i] = coord.rotated ? sin.first.data[i] : 0.f;
      sin.second.data[i] = coord.rotated ? sin.second.data[i] : 0.f;
    }
  }

  // For pairs before they are multiplied by the factors.
  __device__ void scale(const Pairs<float, M, INTERLEAVED, PACKED>& factors) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
      cos.first.data[i] *= factors.first.data[i];
      sin.first.data[i] *= factors.second.data[i];
      cos.second.data[i] *= factors.second.data[i];
      sin.second.data[i] *= factors.first.data[i];
    }
  }
};

// An input array, its scale and outputs, and its spans.
template <typename T>
struct Operand {
  const T* x;
  Parameter scale;
  T* out;
  float* rstd;  // null if not requested
  Heads heads;
  Spans spans;
};

// A span of up to SPAN heads per row of threads. Each thread issues all loads of heads, scale, cos and sin before it waits.
template <typename T, bool INTERLEAVED, bool PACKED, bool PER_PAIR, int SPAN>
__global__ void __launch_bounds__(kThreads, kMinNormBlocks<T, PACKED, SPAN>)
    norm_rotate(Operands<Operand<T>> operands, Angles angles, float epsilon, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<T, INTERLEAVED, PACKED>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  const Operand<T> operand = operands.here();
  const Heads heads = operand.heads;
  const uint32_t item = operands.item();
  const bool active = item < operand.spans.count;
  const Span here = rope::span_of(active ? item : 0, heads, operand.spans);
  const uint32_t count = active ? here.count : 0;
  const auto start_of = [&](uint32_t head) { return heads.start(here.index + head * heads.step); };
  Values values[SPAN][ITEMS];
  Rotation<M, INTERLEAVED, PACKED> rotations[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const PackCoord coord = coord_of<M>(i, heads);
#pragma unroll
    for (uint32_t at = 0; at < SPAN; ++at)
      values[at][i].read_predicated(operand.x + start_of(here.near(at)) + coord.base, coord.pair, coord.half);
    const auto factors = factors_at<M, INTERLEAVED, PACKED>(operand.scale.member(here.member), scale_offset, coord);
    rotations[i].template read<PER_PAIR>(angles, heads, here, coord);
    rotations[i].scale(factors);
  }
  const float unit = square_unit<T>(epsilon);
  float squares[SPAN] = {};
#pragma unroll
  for (uint32_t at = 0; at < SPAN; ++at) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float first[M], second[M];
      widen(values[at][i].first, first);
      widen(values[at][i].second, second);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < M; ++j) {
        const float a = first[j] * unit, b = second[j] * unit;
        sum += a * a + b * b;
      }
      squares[at] += coord_of<M>(i, heads).valid ? sum : 0.f;
    }
  }
  Reducer::warp<Add>(squares, int(blockDim.x));
  const float share = 1.f / float(heads.width);
#pragma unroll
  for (uint32_t at = 0; at < SPAN; ++at) {
    const bool wanted = at < count;
    const float inverse = unit * rsqrtf(squares[at] * share + epsilon * unit * unit);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const PackCoord coord = coord_of<M>(i, heads);
      float first[M], second[M];
      widen(values[at][i].first, first);
      widen(values[at][i].second, second);
#pragma unroll
      for (int j = 0; j < M; ++j) {
        const float a = first[j] * inverse, b = second[j] * inverse;
        first[j] = a * rotations[i].cos.first.data[j] - b * rotations[i].sin.first.data[j];
        second[j] = b * rotations[i].cos.second.data[j] + a * rotations[i].sin.second.data[j];
      }
      const Values result{rounded<T, M>(first), rounded<T, M>(second)};
      result.write(operand.out + start_of(at) + coord.base, coord.pair, coord.half, wanted && coord.valid);
    }
    if (operand.rstd && wanted && threadIdx.x == 0) operand.rstd[here.index + at * heads.step] = inverse;
  }
}

// Pipeline stages of a row of threads in shared memory, one head each.
template <typename T>
constexpr int kStages = sizeof(T) == 2 ? 4 : 2;

// Position of a row of threads in its spans.
struct Cursor {
  uint32_t base;         // span of the first row of threads, within the group
  uint32_t index;        // of the head
  uint32_t head, count;  // in the span
};

// d_x, and per worker (a block) one partial sum of the gradient of scale, [groups, partials, width]; null if not requested. The
// spans of a group, all or those of a batch member, are distributed to its workers. Every thread loads its own packs of the
// next heads into shared memory, so that loads overlap the reduction of a head.
template <typename T, bool INTERLEAVED, bool PACKED>
__global__ void __launch_bounds__(kThreads, kItems<T, INTERLEAVED, PACKED> == 1 ? 3 : 2)
    gradients(const T* __restrict__ x, const float* __restrict__ rstd, const T* __restrict__ grad, Parameter scale,
              T* __restrict__ d_x, float* __restrict__ d_scale, Angles angles, Heads heads, Spans spans,
              uint32_t spans_per_group, uint32_t partials, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<T, INTERLEAVED, PACKED>, STAGES = kStages<T>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  using Floats = Pairs<float, M, INTERLEAVED, PACKED>;
  using Slot = Pack<T, 2 * M>;
  EJKERNEL_SHARED(Slot, slots, STAGES * 2 * ITEMS * kThreads);
  EJKERNEL_SHARED(float, statistics, STAGES* kThreads);
  const uint32_t worker = blockIdx.x, group = worker / partials;
  const uint32_t step = partials * blockDim.y, first_base = worker % partials * blockDim.y;
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  const auto slot_of = [&](int stage, int item) { return slots[((stage * ITEMS + item) * 2) * kThreads + thread].data; };
  const auto cursor_at = [&](uint32_t base) -> Cursor {
    if (base + threadIdx.y >= spans_per_group) return {base, 0, 0, 0};
    const Span span = rope::span_of(group * spans_per_group + base + threadIdx.y, heads, spans);
    return {base, span.index, 0, span.count};
  };
  Cursor next = cursor_at(first_base);
  const auto prefetch = [&](int stage) {
    const bool valid = next.head < next.count;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const PackCoord coord = coord_of<M>(i, heads);
      const int64_t start = heads.start(next.index) + coord.base;
      T* const slot = slot_of(stage, i);
      Values::cp_async_pack(slot, x + start, coord.pair, coord.half, valid && coord.valid);
      Values::cp_async_pack(slot + 2 * M * kThreads, grad + start, coord.pair, coord.half, valid && coord.valid);
    }
    cp_async_pack<float, 1>(statistics + stage * kThreads + thread, rstd + next.index, valid);
    cp_async_commit_group();
    next.index += heads.step;
    if (++next.head >= spans.size) next = cursor_at(next.base + step);
  };
  int stage = 0;
#pragma unroll 1
  for (; stage < STAGES - 1; ++stage) prefetch(stage);

  Floats factors[ITEMS], totals[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    factors[i] = factors_at<M, INTERLEAVED, PACKED>(scale.member(group), scale_offset, coord_of<M>(i, heads));
    totals[i] = {zeros<float, M>(), zeros<float, M>()};
  }
  const float share = 1.f / float(heads.width);
  for (uint32_t base = first_base; base < spans_per_group; base += step) {
    const bool active = base + threadIdx.y < spans_per_group;
    const Span here = rope::span_of(group * spans_per_group + (active ? base + threadIdx.y : base), heads, spans);
    const uint32_t count = active ? here.count : 0;
    Rotation<M, INTERLEAVED, PACKED> rotations[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const PackCoord coord = coord_of<M>(i, heads);
      if (angles.per_pair) {
        rotations[i].template read<true>(angles, heads, here, coord);
      } else {
        rotations[i].template read<false>(angles, heads, here, coord);
      }
    }
    // All threads run the same number of iterations, as warps reduce together; heads that do not exist are zeros.
    for (uint32_t head = 0; head < spans.size; ++head) {
      prefetch(stage);
      cp_async_wait_group(STAGES - 1);
      stage = stage + 1 == STAGES ? 0 : stage + 1;  // the oldest stage
      const float inverse = statistics[stage * kThreads + thread];
      float back[ITEMS][2][M];  // gradients of the normalised pairs
      float dot[1] = {};
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        Values value, gradient;
        value.read(slot_of(stage, i), 0, M);
        gradient.read(slot_of(stage, i) + 2 * M * kThreads, 0, M);
        float a[M], b[M], g[M], h[M];
        widen(value.first, a);
        widen(value.second, b);
        widen(gradient.first, g);
        widen(gradient.second, h);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          const float u = g[j] * rotations[i].cos.first.data[j] + h[j] * rotations[i].sin.second.data[j];
          const float v = h[j] * rotations[i].cos.second.data[j] - g[j] * rotations[i].sin.first.data[j];
          a[j] *= inverse, b[j] *= inverse;
          totals[i].first.data[j] += u * a[j];
          totals[i].second.data[j] += v * b[j];
          back[i][0][j] = u * factors[i].first.data[j];
          back[i][1][j] = v * factors[i].second.data[j];
          dot[0] += back[i][0][j] * a[j];
          dot[0] += back[i][1][j] * b[j];
        }
      }
      Reducer::warp<Add>(dot, int(blockDim.x));
      const float mean = dot[0] * share * inverse;
      if (head >= count) continue;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const PackCoord coord = coord_of<M>(i, heads);
        if (!coord.valid) continue;
        Values value;
        value.read(slot_of(stage, i), 0, M);
        float a[M], b[M];
        widen(value.first, a);
        widen(value.second, b);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          a[j] = inverse * (back[i][0][j] - a[j] * mean);
          b[j] = inverse * (back[i][1][j] - b[j] * mean);
        }
        const Values result{rounded<T, M>(a), rounded<T, M>(b)};
        result.write(d_x + heads.start(here.index + head * heads.step) + coord.base, coord.pair, coord.half);
      }
    }
  }
  cp_async_wait_group(0);
  if (!d_scale) return;
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(slots);  // [blockDim.y, width]
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const PackCoord coord = coord_of<M>(i, heads);
    if (!coord.valid) continue;
    float* const row = sums + threadIdx.y * heads.width + coord.base;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const int pair = coord.pair + j;
      row[INTERLEAVED ? 2 * pair : pair] = totals[i].first.data[j];
      row[INTERLEAVED ? 2 * pair + 1 : pair + coord.half] = totals[i].second.data[j];
    }
  }
  __syncthreads();
  for (int column = thread; column < heads.width; column += kThreads) {
    float sum = 0.f;
    for (int row = 0; row < int(blockDim.y); ++row) sum += sums[row * heads.width + column];
    d_scale[int64_t(worker) * heads.width + column] = sum;
  }
}

// The transform of `rope::angle_gradients` for normalised heads.
struct Normalised {
  const float* rstd;
  Parameter scale;
  float scale_offset;

  __device__ float of_head(uint32_t index) const { return rstd[index]; }

  template <int M, bool INTERLEAVED, bool PACKED>
  __device__ void prepare(float (&first)[M], float (&second)[M], float inverse, uint32_t member, int pair,
                          const Heads& heads) const {
    const PackCoord coord{0, pair, heads.half, true, true};
    const auto factors = factors_at<M, INTERLEAVED, PACKED>(scale.member(member), scale_offset, coord);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      first[i] *= inverse * factors.first.data[i];
      second[i] *= inverse * factors.second.data[i];
    }
  }
};

}  // namespace ejkernel::qk_norm_rope
