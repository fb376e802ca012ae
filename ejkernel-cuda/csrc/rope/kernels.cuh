// Rotary position embedding of one array of heads, in float inside.
#pragma once

#include "divide.cuh"
#include "pack.cuh"

namespace ejkernel::rope {

constexpr int kThreads = 256;
constexpr int kAtOnce = 2;  // heads whose reads are in flight together
// On a processor at least; code for 10.0 takes more registers than three leave to each.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

// Heads [batch, length, heads, channels] or [batch, heads, length, channels]; strides in elements.
struct Heads {
  int64_t batch, length, heads;
  int64_t batch_stride, token_stride, head_stride;
  int width;
  int half;  // pairs that are rotated
  bool heads_first;
};

// cos and sin, each [1 or batch, length, half or 2 * half].
struct Angles {
  const float* cos;
  const float* sin;
  bool one_cos, one_sin;  // shared by the batch
  bool per_pair;
};

// Some neighbouring heads of one token.
struct Span {
  int64_t batch, token, first_head;
  int count;
  int64_t start;  // its first element
};

__device__ inline int64_t spans_of(const Heads& heads, int span) {
  return heads.batch * heads.length * ((heads.heads + span - 1) / span);
}

// Neighbouring spans are of what lies beside each other; those of a batch member follow on those of the one before.
__device__ inline Span span_of(int64_t item, const Heads& heads, int span) {
  const int64_t chunks = (heads.heads + span - 1) / span;
  int64_t inner, middle;
  const int64_t batch =
      divide(divide(item, heads.heads_first ? heads.length : chunks, inner), heads.heads_first ? chunks : heads.length, middle);
  const int64_t token = heads.heads_first ? inner : middle;
  const int64_t first_head = (heads.heads_first ? middle : inner) * span;
  return {batch, token, first_head, int(first_head + span < heads.heads ? span : heads.heads - first_head),
          batch * heads.batch_stride + token * heads.token_stride + first_head * heads.head_stride};
}

// Pairs that one thread takes at once: 16 bytes of each half, or of neighbours.
template <typename T, bool INTERLEAVED, bool PACKED>
constexpr int kPairs = !PACKED ? 1 : int(16 / sizeof(T)) / (INTERLEAVED ? 2 : 1);

// First and second members of M pairs, as they are stored.
template <typename T, int M, bool INTERLEAVED, bool PACKED>
struct Pairs {
  Pack<T, M> first, second;

  __device__ void read(const T* head, int pair, int half) {
    if constexpr (!INTERLEAVED) {
      first = load<T, M>(head + pair);
      second = load<T, M>(head + half + pair);
    } else if constexpr (PACKED) {
      const Pack<T, 2 * M> both = load<T, 2 * M>(head + 2 * pair);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        first.data[i] = both.data[2 * i];
        second.data[i] = both.data[2 * i + 1];
      }
    } else {
      first.data[0] = head[2 * pair];
      second.data[0] = head[2 * pair + 1];
    }
  }

  __device__ void write(T* head, int pair, int half) const {
    if constexpr (!INTERLEAVED) {
      store<T, M>(head + pair, first);
      store<T, M>(head + half + pair, second);
    } else if constexpr (PACKED) {
      Pack<T, 2 * M> both;
#pragma unroll
      for (int i = 0; i < M; ++i) {
        both.data[2 * i] = first.data[i];
        both.data[2 * i + 1] = second.data[i];
      }
      store<T, 2 * M>(head + 2 * pair, both);
    } else {
      head[2 * pair] = first.data[0];
      head[2 * pair + 1] = second.data[0];
    }
  }
};

template <int M, bool INTERLEAVED, bool PACKED>
__device__ inline Pairs<float, M, INTERLEAVED, PACKED> read_angles(const float* row, int pair, const Heads& heads,
                                                                   bool per_pair) {
  Pairs<float, M, INTERLEAVED, PACKED> angles;
  if (per_pair) {
    angles.first = angles.second = load<float, M>(row + pair);
  } else {
    angles.read(row, pair, heads.half);
  }
  return angles;
}

// Channels that are not rotated. A thread per pack.
template <typename T, int N>
__device__ inline void copy_rest(const T* from, T* to, const Heads& heads) {
  for (int column = 2 * heads.half + threadIdx.x * N; column < heads.width; column += blockDim.x * N) {
    store<T, N>(to + column, load<T, N>(from + column));
  }
}

// Some heads of one token for each row of threads of a block; cos and sin are read once for all of them.
template <typename T, bool INTERLEAVED, bool PACKED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    rotate(const T* __restrict__ x, T* __restrict__ out, Angles angles, Heads heads, int span, bool inverse) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  const int64_t item = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (item >= spans_of(heads, span)) return;
  const auto [batch, token, first_head, count, start] = span_of(item, heads, span);
  const int channels = angles.per_pair ? heads.half : 2 * heads.half;
  const float* cos_row = angles.cos + ((angles.one_cos ? 0 : batch * heads.length) + token) * channels;
  const float* sin_row = angles.sin + ((angles.one_sin ? 0 : batch * heads.length) + token) * channels;
  for (int pair = threadIdx.x * M; pair < heads.half; pair += blockDim.x * M) {
    const auto cos = read_angles<M, INTERLEAVED, PACKED>(cos_row, pair, heads, angles.per_pair);
    auto sin = read_angles<M, INTERLEAVED, PACKED>(sin_row, pair, heads, angles.per_pair);
    if (inverse) {
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const float other = -sin.first.data[i];
        sin.first.data[i] = -sin.second.data[i];
        sin.second.data[i] = other;
      }
    }
    for (int head = 0; head < count; head += kAtOnce) {
      Values values[kAtOnce];
#pragma unroll
      for (int at = 0; at < kAtOnce; ++at) {
        if (head + at < count) values[at].read(x + start + (head + at) * heads.head_stride, pair, heads.half);
      }
#pragma unroll
      for (int at = 0; at < kAtOnce; ++at) {
        if (head + at >= count) continue;
        float first[M], second[M];
        widen(values[at].first, first);
        widen(values[at].second, second);
#pragma unroll
        for (int i = 0; i < M; ++i) {
          const float a = first[i], b = second[i];
          first[i] = a * cos.first.data[i] - b * sin.first.data[i];
          second[i] = b * cos.second.data[i] + a * sin.second.data[i];
        }
        const Values result{rounded<T, M>(first), rounded<T, M>(second)};
        result.write(out + start + (head + at) * heads.head_stride, pair, heads.half);
      }
    }
  }
  for (int head = 0; head < count; ++head) {
    const int64_t at = start + head * heads.head_stride;
    copy_rest<T, PACKED ? int(16 / sizeof(T)) : 1>(x + at, out + at, heads);
  }
}

// What is turned where that is what is stored.
struct AsStored {
  template <int M, bool INTERLEAVED, bool PACKED>
  __device__ void prepare(float (&)[M], float (&)[M], int64_t, int64_t, int, const Heads&) const {}
};

// The gradients of cos and sin by one array: sums over heads and over the batch members that share them, in a fixed order. A
// block per row of angles; its rows of threads share the heads. `add` adds to what is there; `before` makes what is turned of
// what is stored.
template <typename T, bool INTERLEAVED, bool PACKED, class Before>
__global__ void __launch_bounds__(kThreads)
    angle_gradients(const T* __restrict__ x, const T* __restrict__ grad, float* __restrict__ d_cos, float* __restrict__ d_sin,
                    Heads heads, bool shared, bool per_pair, bool add, Before before) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>;
  EJKERNEL_SHARED(float, sums, kThreads * 4 * M);  // [blockDim.y, 4, slots]
  const int64_t row = blockIdx.x;
  int64_t token;
  const int64_t batch = divide(row, heads.length, token);
  const int64_t units = (shared ? heads.batch : 1) * heads.heads;
  const int slots = blockDim.x * M;
  for (int base = 0; base < heads.half; base += slots) {
    const int pair = base + threadIdx.x * M;
    float total[4][M] = {};  // cos and sin of the first members, then of the second
    if (pair < heads.half) {
      for (int64_t unit = threadIdx.y; unit < units; unit += blockDim.y) {
        int64_t head;
        const int64_t member = batch + divide(unit, heads.heads, head);
        const int64_t start = member * heads.batch_stride + token * heads.token_stride + head * heads.head_stride;
        Pairs<T, M, INTERLEAVED, PACKED> value, gradient;
        value.read(x + start, pair, heads.half);
        gradient.read(grad + start, pair, heads.half);
        float first[M], second[M];
        widen(value.first, first);
        widen(value.second, second);
        before.template prepare<M, INTERLEAVED, PACKED>(first, second, member, start, pair, heads);
#pragma unroll
        for (int i = 0; i < M; ++i) {
          const float a = first[i], b = second[i];
          const float g = to_float(gradient.first.data[i]), h = to_float(gradient.second.data[i]);
          total[0][i] += g * a;
          total[1][i] -= g * b;
          total[2][i] += h * b;
          total[3][i] += h * a;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int kind = 0; kind < 4; ++kind) {
#pragma unroll
      for (int i = 0; i < M; ++i) sums[(threadIdx.y * 4 + kind) * slots + threadIdx.x * M + i] = total[kind][i];
    }
    __syncthreads();
    // One thread per sum: of cos and sin of a pair, or of each of its members.
    const int kinds = per_pair ? 2 : 4;
    for (int sum = threadIdx.y * blockDim.x + threadIdx.x; sum < kinds * slots; sum += blockDim.x * blockDim.y) {
      const int kind = sum / slots, slot = sum % slots;
      if (base + slot >= heads.half) continue;
      float value = 0.f;
      for (int other = 0; other < int(blockDim.y); ++other) {
        value += sums[(other * 4 + kind) * slots + slot];
        if (per_pair) value += sums[(other * 4 + kind + 2) * slots + slot];
      }
      const int64_t column = per_pair      ? base + slot
                             : INTERLEAVED ? 2 * (base + slot) + kind / 2
                                           : base + slot + kind / 2 * heads.half;
      float* to = (kind % 2 ? d_sin : d_cos) + row * (per_pair ? heads.half : 2 * heads.half) + column;
      *to = add ? *to + value : value;
    }
  }
}

}  // namespace ejkernel::rope
