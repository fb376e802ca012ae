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
using rope::Span;

constexpr int kWidest = 256;  // channels of a head

// A scale [0 or 1 or batch, width] in float.
struct Parameter {
  const float* data;  // null when absent
  int64_t stride;     // from one batch member to the next; 0 when all share it

  __device__ const float* member(int64_t index) const { return data ? data + index * stride : nullptr; }
};

// Packs of pairs per thread, so that 32 threads hold the widest head.
template <bool INTERLEAVED, bool PACKED>
constexpr int kItems = !PACKED       ? 4
                       : INTERLEAVED ? 2
                                     : 1;

// Where a pack of pairs lies in a head.
struct Place {
  int base;  // first channel of its part, rotated or not
  int pair;  // in that part
  int half;  // pairs of that part
  bool turned, there;
};

template <int M>
__device__ inline Place place_of(int item, const Heads& heads) {
  const int pair = (item * int(blockDim.x) + int(threadIdx.x)) * M, all = heads.width / 2;
  const bool turned = pair < heads.half;
  return {turned ? 0 : 2 * heads.half, turned ? pair : pair - heads.half, turned ? heads.half : all - heads.half, turned,
          pair < all};
}

// scale + scale_offset.
template <int M, bool INTERLEAVED, bool PACKED>
__device__ inline Pairs<float, M, INTERLEAVED, PACKED> factors_at(const float* scale, float scale_offset, const Place& place) {
  Pairs<float, M, INTERLEAVED, PACKED> factors;
  const bool there = scale && place.there;
  if (there) factors.read(scale + place.base, place.pair, place.half);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    factors.first.data[i] = there ? factors.first.data[i] + scale_offset : 1.f;
    factors.second.data[i] = there ? factors.second.data[i] + scale_offset : 1.f;
  }
  return factors;
}

template <int M, bool INTERLEAVED, bool PACKED>
struct Turn {
  Pairs<float, M, INTERLEAVED, PACKED> cos, sin;

  __device__ void read(const Angles& angles, const Heads& heads, const Span& span, const Place& place) {
    if (place.turned) {
      const int channels = angles.per_pair ? heads.half : 2 * heads.half;
      const float* cos_row = angles.cos + ((angles.one_cos ? 0 : span.batch * heads.length) + span.token) * channels;
      const float* sin_row = angles.sin + ((angles.one_sin ? 0 : span.batch * heads.length) + span.token) * channels;
      cos = rope::read_angles<M, INTERLEAVED, PACKED>(cos_row, place.pair, heads, angles.per_pair);
      sin = rope::read_angles<M, INTERLEAVED, PACKED>(sin_row, place.pair, heads, angles.per_pair);
    } else {
#pragma unroll
      for (int i = 0; i < M; ++i) {
        cos.first.data[i] = cos.second.data[i] = 1.f;
        sin.first.data[i] = sin.second.data[i] = 0.f;
      }
    }
  }
};

// Where the statistic of a head lies; heads lie one after the other.
__device__ inline int64_t head_index(int64_t start, const Heads& heads) {
  int64_t rest;
  return divide(start, heads.width, rest);
}

// A span of heads for each row of threads of a block.
template <typename T, bool INTERLEAVED, bool PACKED>
__global__ void __launch_bounds__(kThreads)
    norm_rotate(const T* __restrict__ x, Parameter scale, T* __restrict__ out, float* __restrict__ rstd, Angles angles,
                Heads heads, int span, float epsilon, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<INTERLEAVED, PACKED>, kAtOnce = 4;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  const int64_t item = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = item < rope::spans_of(heads, span);
  const Span here = rope::span_of(active ? item : 0, heads, span);
  const int count = active ? here.count : 0;
  Turn<M, INTERLEAVED, PACKED> turns[ITEMS];
  Pairs<float, M, INTERLEAVED, PACKED> factors[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Place place = place_of<M>(i, heads);
    factors[i] = factors_at<M, INTERLEAVED, PACKED>(scale.member(here.batch), scale_offset, place);
    if (place.there) turns[i].read(angles, heads, here, place);
  }
  // To the same end in every thread, as a warp reduces together.
  for (int head = 0; head < span && head < heads.heads; head += kAtOnce) {
    Values values[kAtOnce][ITEMS];
    float squares[kAtOnce] = {};
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      if (head + at >= count) continue;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const Place place = place_of<M>(i, heads);
        if (place.there)
          values[at][i].read(x + here.start + (head + at) * heads.head_stride + place.base, place.pair, place.half);
      }
    }
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      if (head + at >= count) continue;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!place_of<M>(i, heads).there) continue;
        float first[M], second[M];
        widen(values[at][i].first, first);
        widen(values[at][i].second, second);
#pragma unroll
        for (int j = 0; j < M; ++j) squares[at] += first[j] * first[j] + second[j] * second[j];
      }
    }
    Reducer::warp<Add>(squares, int(blockDim.x));
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      if (head + at >= count) continue;
      const int64_t start = here.start + (head + at) * heads.head_stride;
      const float inverse = rsqrtf(squares[at] / float(heads.width) + epsilon);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const Place place = place_of<M>(i, heads);
        if (!place.there) continue;
        float first[M], second[M];
        widen(values[at][i].first, first);
        widen(values[at][i].second, second);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          const float a = first[j] * inverse * factors[i].first.data[j], b = second[j] * inverse * factors[i].second.data[j];
          first[j] = a * turns[i].cos.first.data[j] - b * turns[i].sin.first.data[j];
          second[j] = b * turns[i].cos.second.data[j] + a * turns[i].sin.second.data[j];
        }
        const Values result{rounded<T, M>(first), rounded<T, M>(second)};
        result.write(out + start + place.base, place.pair, place.half);
      }
      if (rstd && threadIdx.x == 0) rstd[head_index(start, heads)] = inverse;
    }
  }
}

// d_x, and for each worker, a block, one partial sum of the gradient of scale, [groups, parts, width]; null when not asked for.
// The spans of a group, all or those of a batch member, are dealt out to its workers.
template <typename T, bool INTERLEAVED, bool PACKED>
__global__ void __launch_bounds__(kThreads, 2)
    gradients(const T* __restrict__ x, const float* __restrict__ rstd, const T* __restrict__ grad, Parameter scale,
              T* __restrict__ d_x, float* __restrict__ d_scale, Angles angles, Heads heads, int span, int64_t spans_per_group,
              int64_t parts, float scale_offset) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, ITEMS = kItems<INTERLEAVED, PACKED>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  EJKERNEL_SHARED(float, sums, kThreads * 2 * M * ITEMS);  // [blockDim.y, width]
  const int64_t worker = blockIdx.x, group = worker / parts;
  Pairs<float, M, INTERLEAVED, PACKED> factors[ITEMS];
  float total[ITEMS][2][M] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    factors[i] = factors_at<M, INTERLEAVED, PACKED>(scale.member(group), scale_offset, place_of<M>(i, heads));
  }
  for (int64_t base = worker % parts * blockDim.y; base < spans_per_group; base += parts * blockDim.y) {
    const bool active = base + threadIdx.y < spans_per_group;
    const Span here = rope::span_of(group * spans_per_group + (active ? base + threadIdx.y : base), heads, span);
    const int count = active ? here.count : 0;
    Turn<M, INTERLEAVED, PACKED> turns[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const Place place = place_of<M>(i, heads);
      if (place.there) turns[i].read(angles, heads, here, place);
    }
    // One head at a time, for the registers of two blocks on a processor; to the same end in every thread, as a warp reduces
    // together.
    for (int head = 0; head < span && head < heads.heads; ++head) {
      const bool present = head < count;
      const int64_t start = here.start + head * heads.head_stride;
      const float inverse = present ? rstd[head_index(start, heads)] : 0.f;
      Values values[ITEMS], grads[ITEMS];
      // The normalised pairs of an item, and the gradients on them, turned back, before the factor.
      const auto unpack = [&](int i, float (&a)[M], float (&b)[M], float (&g)[M], float (&h)[M]) {
        widen(values[i].first, a);
        widen(values[i].second, b);
        widen(grads[i].first, g);
        widen(grads[i].second, h);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          a[j] *= inverse, b[j] *= inverse;
          const float u = g[j], v = h[j];
          g[j] = u * turns[i].cos.first.data[j] + v * turns[i].sin.second.data[j];
          h[j] = v * turns[i].cos.second.data[j] - u * turns[i].sin.first.data[j];
        }
      };
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const Place place = place_of<M>(i, heads);
        if (!present || !place.there) continue;
        values[i].read(x + start + place.base, place.pair, place.half);
        grads[i].read(grad + start + place.base, place.pair, place.half);
      }
      float dot[1] = {};
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!present || !place_of<M>(i, heads).there) continue;
        float a[M], b[M], g[M], h[M];
        unpack(i, a, b, g, h);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          total[i][0][j] += g[j] * a[j];
          total[i][1][j] += h[j] * b[j];
          dot[0] += g[j] * factors[i].first.data[j] * a[j] + h[j] * factors[i].second.data[j] * b[j];
        }
      }
      Reducer::warp<Add>(dot, int(blockDim.x));
      const float mean = dot[0] / float(heads.width);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const Place place = place_of<M>(i, heads);
        if (!present || !place.there) continue;
        float a[M], b[M], g[M], h[M];
        unpack(i, a, b, g, h);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          g[j] = inverse * (g[j] * factors[i].first.data[j] - a[j] * mean);
          h[j] = inverse * (h[j] * factors[i].second.data[j] - b[j] * mean);
        }
        const Values result{rounded<T, M>(g), rounded<T, M>(h)};
        result.write(d_x + start + place.base, place.pair, place.half);
      }
    }
  }
  if (!d_scale) return;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const Place place = place_of<M>(i, heads);
    if (!place.there) continue;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const int pair = place.pair + j;
      float* row = sums + threadIdx.y * heads.width + place.base;
      row[INTERLEAVED ? 2 * pair : pair] = total[i][0][j];
      row[INTERLEAVED ? 2 * pair + 1 : pair + place.half] = total[i][1][j];
    }
  }
  __syncthreads();
  for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < heads.width; column += blockDim.x * blockDim.y) {
    float sum = 0.f;
    for (int row = 0; row < int(blockDim.y); ++row) sum += sums[row * heads.width + column];
    d_scale[worker * heads.width + column] = sum;
  }
}

// What `rope::angle_gradients` takes as turned: the normalised heads.
struct Normalised {
  const float* rstd;
  Parameter scale;
  float scale_offset;

  template <int M, bool INTERLEAVED, bool PACKED>
  __device__ void prepare(float (&first)[M], float (&second)[M], int64_t member, int64_t start, int pair,
                          const Heads& heads) const {
    const float inverse = rstd[head_index(start, heads)];
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
