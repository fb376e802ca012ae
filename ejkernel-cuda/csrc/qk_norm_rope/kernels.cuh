// Root-mean-square normalisation of heads, and the rotation of what comes of it, in float inside.
//
// A head is pairs of channels: those that are rotated, and after them those that pass through, which are paired in the same way
// and turned by nothing. A row of threads, part of a warp, holds a whole head.
#pragma once

#include "reduce.cuh"
#include "rope/kernels.cuh"

namespace ejkernel::qk_norm_rope {

using rope::Angles;
using rope::Heads;
using rope::kPairs;
using rope::kThreads;
using rope::Pairs;
using rope::Sides;
using rope::Span;
using rope::Spans;

constexpr int kWidest = 256;  // channels of a head

// A scale [0 or 1 or batch, width] in float.
struct Parameter {
  const float* data;  // null when absent
  int64_t stride;     // from one batch member to the next; 0 when all share it

  __device__ const float* member(uint32_t index) const { return data ? data + index * stride : nullptr; }
};

constexpr int kHeld = 4;  // pairs of a thread, so that 32 of them hold the widest head

// Packs of pairs per thread.
template <typename T, bool INTERLEAVED, bool PACKED>
constexpr int kItems = kHeld / kPairs<T, INTERLEAVED, PACKED>;

// Where a pack of pairs lies in a head: that of the first thread for one that has none.
struct Place {
  int base;  // first channel of its part, rotated or not
  int pair;  // in that part
  int half;  // pairs of that part
  bool turned, there;
};

template <int M>
__device__ inline Place place_of(int item, const Heads& heads) {
  const int wanted = (item * int(blockDim.x) + int(threadIdx.x)) * M, all = heads.width / 2, pair = wanted < all ? wanted : 0;
  const bool turned = pair < heads.half;
  return {turned ? 0 : 2 * heads.half, turned ? pair : pair - heads.half, turned ? heads.half : all - heads.half, turned,
          wanted < all};
}

// scale + scale_offset.
template <int M, bool INTERLEAVED, bool PACKED>
__device__ inline Pairs<float, M, INTERLEAVED, PACKED> factors_at(const float* scale, float scale_offset, const Place& place) {
  Pairs<float, M, INTERLEAVED, PACKED> factors;
  if (scale) factors.read(scale + place.base, place.pair, place.half);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    factors.first.data[i] = scale ? factors.first.data[i] + scale_offset : 1.f;
    factors.second.data[i] = scale ? factors.second.data[i] + scale_offset : 1.f;
  }
  return factors;
}

// Blocks of kThreads that have enough registers on a processor; for less the assembler would not ask for all heads together.
template <typename T, bool PACKED, int SPAN>
constexpr int kNormalising = !PACKED ? 1 : SPAN * int(sizeof(T)) <= 8 ? 3 : 2;

template <int M, bool INTERLEAVED, bool PACKED>
struct Turn {
  Pairs<float, M, INTERLEAVED, PACKED> cos, sin;

  template <bool PER_PAIR>
  __device__ void read(const Angles& angles, const Heads& heads, const Span& span, const Place& place) {
    const float *cos_row, *sin_row;
    angles.rows(heads, span.member, span.token, cos_row, sin_row);
    const int pair = place.turned ? place.pair : 0;
    cos = rope::read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(cos_row, pair, heads);
    sin = rope::read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(sin_row, pair, heads);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      cos.first.data[i] = place.turned ? cos.first.data[i] : 1.f;
      cos.second.data[i] = place.turned ? cos.second.data[i] : 1.f;
      sin.first.data[i] = place.turned ? sin.first.data[i] : 0.f;
      sin.second.data[i] = place.turned ? sin.second.data[i] : 0.f;
    }
  }

  // For pairs that the factors have yet to multiply.
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

// An array, what comes of it, and how it is cut.
template <typename T>
struct Side {
  const T* x;
  Parameter scale;
  T* out;
  float* rstd;  // null when not asked for
  Heads heads;
  Spans spans;
};

// A span of up to SPAN heads for each row of threads of a block, which asks for all of them, scale, cos and sin before it waits.
template <typename T, bool INTERLEAVED, bool PACKED, bool PER_PAIR, int SPAN>
__global__ void __launch_bounds__(kThreads, kNormalising<T, PACKED, SPAN>)
    norm_rotate(Sides<Side<T>> sides, Angles angles, float epsilon, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<T, INTERLEAVED, PACKED>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  const Side<T> side = sides.here();
  const Heads heads = side.heads;
  const uint32_t item = sides.item();
  const bool active = item < side.spans.count;
  const Span here = rope::span_of(active ? item : 0, heads, side.spans);
  const uint32_t count = active ? here.count : 0;
  const auto start_of = [&](uint32_t head) { return heads.start(here.index + head * heads.step); };
  Values values[SPAN][ITEMS];
  Turn<M, INTERLEAVED, PACKED> turns[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Place place = place_of<M>(i, heads);
#pragma unroll
    for (uint32_t at = 0; at < SPAN; ++at)
      values[at][i].read_early(side.x + start_of(here.near(at)) + place.base, place.pair, place.half);
    const auto factors = factors_at<M, INTERLEAVED, PACKED>(side.scale.member(here.member), scale_offset, place);
    turns[i].template read<PER_PAIR>(angles, heads, here, place);
    turns[i].scale(factors);
  }
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
      for (int j = 0; j < M; ++j) sum += first[j] * first[j] + second[j] * second[j];
      squares[at] += place_of<M>(i, heads).there ? sum : 0.f;
    }
  }
  Reducer::warp<Add>(squares, int(blockDim.x));
  const float share = 1.f / float(heads.width);
#pragma unroll
  for (uint32_t at = 0; at < SPAN; ++at) {
    const bool wanted = at < count;
    const float inverse = rsqrtf(squares[at] * share + epsilon);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const Place place = place_of<M>(i, heads);
      float first[M], second[M];
      widen(values[at][i].first, first);
      widen(values[at][i].second, second);
#pragma unroll
      for (int j = 0; j < M; ++j) {
        const float a = first[j] * inverse, b = second[j] * inverse;
        first[j] = a * turns[i].cos.first.data[j] - b * turns[i].sin.first.data[j];
        second[j] = b * turns[i].cos.second.data[j] + a * turns[i].sin.second.data[j];
      }
      const Values result{rounded<T, M>(first), rounded<T, M>(second)};
      result.write(side.out + start_of(at) + place.base, place.pair, place.half, wanted && place.there);
    }
    if (side.rstd && wanted && threadIdx.x == 0) side.rstd[here.index + at * heads.step] = inverse;
  }
}

// Heads of a row of threads in shared memory, those on their way and the one in work.
template <typename T>
constexpr int kStages = sizeof(T) == 2 ? 4 : 2;

// Where a row of threads is in its spans.
struct Cursor {
  uint32_t base;         // span of the first row of threads, in the group
  uint32_t index;        // of the head
  uint32_t head, count;  // in the span
};

// d_x, and for each worker, a block, one partial sum of the gradient of scale, [groups, parts, width]; null when not asked for.
// The spans of a group, all or those of a batch member, are dealt out to its workers. Every thread copies its own packs of the
// heads to come into shared memory, so that memory stays busy while a head is reduced.
template <typename T, bool INTERLEAVED, bool PACKED>
__global__ void __launch_bounds__(kThreads, kItems<T, INTERLEAVED, PACKED> == 1 ? 3 : 2)
    gradients(const T* __restrict__ x, const float* __restrict__ rstd, const T* __restrict__ grad, Parameter scale,
              T* __restrict__ d_x, float* __restrict__ d_scale, Angles angles, Heads heads, Spans spans,
              uint32_t spans_per_group, uint32_t parts, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<T, INTERLEAVED, PACKED>, STAGES = kStages<T>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  using Floats = Pairs<float, M, INTERLEAVED, PACKED>;
  using Slot = Pack<T, 2 * M>;
  EJKERNEL_SHARED(Slot, slots, STAGES * 2 * ITEMS * kThreads);
  EJKERNEL_SHARED(float, statistics, STAGES* kThreads);
  const uint32_t worker = blockIdx.x, group = worker / parts;
  const uint32_t step = parts * blockDim.y, first_base = worker % parts * blockDim.y;
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  const auto slot_of = [&](int stage, int item) { return slots[((stage * ITEMS + item) * 2) * kThreads + thread].data; };
  const auto cursor_at = [&](uint32_t base) -> Cursor {
    if (base + threadIdx.y >= spans_per_group) return {base, 0, 0, 0};
    const Span span = rope::span_of(group * spans_per_group + base + threadIdx.y, heads, spans);
    return {base, span.index, 0, span.count};
  };
  Cursor ahead = cursor_at(first_base);
  const auto fetch = [&](int stage) {
    const bool there = ahead.head < ahead.count;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const Place place = place_of<M>(i, heads);
      const int64_t start = heads.start(ahead.index) + place.base;
      T* const slot = slot_of(stage, i);
      Values::copy_ahead(slot, x + start, place.pair, place.half, there && place.there);
      Values::copy_ahead(slot + 2 * M * kThreads, grad + start, place.pair, place.half, there && place.there);
    }
    copy_ahead<float, 1>(statistics + stage * kThreads + thread, rstd + ahead.index, there);
    commit_copies();
    ahead.index += heads.step;
    if (++ahead.head >= spans.size) ahead = cursor_at(ahead.base + step);
  };
  int stage = 0;
#pragma unroll 1
  for (; stage < STAGES - 1; ++stage) fetch(stage);

  Floats factors[ITEMS], totals[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    factors[i] = factors_at<M, INTERLEAVED, PACKED>(scale.member(group), scale_offset, place_of<M>(i, heads));
    totals[i] = {zeros<float, M>(), zeros<float, M>()};
  }
  const float share = 1.f / float(heads.width);
  for (uint32_t base = first_base; base < spans_per_group; base += step) {
    const bool active = base + threadIdx.y < spans_per_group;
    const Span here = rope::span_of(group * spans_per_group + (active ? base + threadIdx.y : base), heads, spans);
    const uint32_t count = active ? here.count : 0;
    Turn<M, INTERLEAVED, PACKED> turns[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const Place place = place_of<M>(i, heads);
      if (angles.per_pair) {
        turns[i].template read<true>(angles, heads, here, place);
      } else {
        turns[i].template read<false>(angles, heads, here, place);
      }
    }
    // To the same end in every thread, as a warp reduces together; heads that are not there are zeros.
    for (uint32_t head = 0; head < spans.size; ++head) {
      fetch(stage);
      wait_for_copies(STAGES - 1);
      stage = stage + 1 == STAGES ? 0 : stage + 1;  // the oldest
      const float inverse = statistics[stage * kThreads + thread];
      float back[ITEMS][2][M];  // gradients on the normalised pairs
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
          const float u = g[j] * turns[i].cos.first.data[j] + h[j] * turns[i].sin.second.data[j];
          const float v = h[j] * turns[i].cos.second.data[j] - g[j] * turns[i].sin.first.data[j];
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
        const Place place = place_of<M>(i, heads);
        if (!place.there) continue;
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
        result.write(d_x + heads.start(here.index + head * heads.step) + place.base, place.pair, place.half);
      }
    }
  }
  wait_for_copies(0);
  if (!d_scale) return;
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(slots);  // [blockDim.y, width]
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Place place = place_of<M>(i, heads);
    if (!place.there) continue;
    float* const row = sums + threadIdx.y * heads.width + place.base;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const int pair = place.pair + j;
      row[INTERLEAVED ? 2 * pair : pair] = totals[i].first.data[j];
      row[INTERLEAVED ? 2 * pair + 1 : pair + place.half] = totals[i].second.data[j];
    }
  }
  __syncthreads();
  for (int column = thread; column < heads.width; column += kThreads) {
    float sum = 0.f;
    for (int row = 0; row < int(blockDim.y); ++row) sum += sums[row * heads.width + column];
    d_scale[int64_t(worker) * heads.width + column] = sum;
  }
}

// What `rope::angle_gradients` takes as turned: the normalised heads.
struct Normalised {
  const float* rstd;
  Parameter scale;
  float scale_offset;

  __device__ float of_head(uint32_t index) const { return rstd[index]; }

  template <int M, bool INTERLEAVED, bool PACKED>
  __device__ void prepare(float (&first)[M], float (&second)[M], float inverse, uint32_t member, int pair,
                          const Heads& heads) const {
    const Place place{0, pair, heads.half, true, true};
    const auto factors = factors_at<M, INTERLEAVED, PACKED>(scale.member(member), scale_offset, place);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      first[i] *= inverse * factors.first.data[i];
      second[i] *= inverse * factors.second.data[i];
    }
  }
};

}  // namespace ejkernel::qk_norm_rope
