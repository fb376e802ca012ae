// Rotary position embedding of heads, in float inside.
#pragma once

#include "divide.cuh"
#include "pack.cuh"

namespace ejkernel::rope {

constexpr int kThreads = 256;  // maximum of a block
// Minimum resident blocks per multiprocessor; code for architectures other than 9.0 needs more registers than four blocks
// leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = 4;
#else
constexpr int kBlocks = 3;
#endif

// Heads of a thread whose loads are in flight together.
template <typename T>
constexpr int kHeadsInFlight = sizeof(T) == 2 ? 4 : 2;

// Heads [batch, length, heads, channels] or [batch, heads, length, channels]. Heads are counted in 32 bits, elements in 64.
struct Heads {
  uint32_t batch, length, heads;
  uint32_t step;  // from a head of a token to its next, in heads
  int width;
  int half;  // pairs that are rotated
  bool heads_first;

  // Index of a head among all heads.
  __device__ uint32_t index(uint32_t member, uint32_t token, uint32_t head) const {
    return heads_first ? (member * heads + head) * length + token : (member * length + token) * heads + head;
  }

  // The first element of a head; unsigned, to save registers.
  __device__ int64_t start(uint32_t index) const { return int64_t(uint64_t(index) * uint32_t(width)); }
};

// cos and sin, each [1 or batch, length, half or 2 * half].
struct Angles {
  const float* cos;
  const float* sin;
  bool one_cos, one_sin;  // shared by the batch
  bool per_pair;

  // The rows of a token.
  __device__ void rows(const Heads& heads, uint32_t member, uint32_t token, const float*& cos_row,
                       const float*& sin_row) const {
    const int channels = per_pair ? heads.half : 2 * heads.half;
    cos_row = cos + int64_t((one_cos ? 0 : member * heads.length) + token) * channels;
    sin_row = sin + int64_t((one_sin ? 0 : member * heads.length) + token) * channels;
  }
};

// Partition of heads into spans: adjacent heads of one token.
struct Spans {
  uint32_t chunks;        // of a token
  uint32_t count;         // of all tokens
  uint32_t size;          // heads of a span; the last of a token may have fewer
  Divisor inner, middle;  // spans of a row, adjacent in memory, and rows of a batch member
};

inline Spans spans_of(const Heads& heads, int64_t size) {
  const uint32_t most = uint32_t(size < heads.heads ? size : heads.heads), chunks = most ? (heads.heads + most - 1) / most : 0;
  const Divisor tokens = divisor(heads.length ? heads.length : 1), token_chunks = divisor(chunks ? chunks : 1);
  return {chunks, heads.batch * heads.length * chunks, most, heads.heads_first ? tokens : token_chunks,
          heads.heads_first ? token_chunks : tokens};
}

struct Span {
  uint32_t member, token;
  uint32_t index;  // of its first head
  uint32_t count;  // at least 1

  // That head, or the last one. A predicated load would not be issued together with the others.
  __device__ uint32_t near(uint32_t head) const { return head < count ? head : count - 1; }
};

// Adjacent spans are adjacent in memory; the spans of a batch member follow those of the one before.
__device__ inline Span span_of(uint32_t item, const Heads& heads, const Spans& spans) {
  const uint32_t rest = spans.inner.divide(item), at = item - rest * spans.inner.value;
  const uint32_t member = spans.middle.divide(rest), outer = rest - member * spans.middle.value;
  const uint32_t token = heads.heads_first ? at : outer, head = (heads.heads_first ? outer : at) * spans.size;
  const uint32_t left = heads.heads - head;
  return {member, token, heads.index(member, token, head), left < spans.size ? left : spans.size};
}

// Pairs per thread: four, so that many threads have registers for several heads, or a 16-byte vector if interleaved.
template <typename T, bool INTERLEAVED, bool PACKED>
constexpr int kPairs = !PACKED       ? 1
                       : INTERLEAVED ? 8 / int(sizeof(T))
                                     : 4;

// The same for a rotation only: 16-byte vectors of either half of a head.
template <typename T, bool INTERLEAVED, bool PACKED>
constexpr int kRotatedPairs = PACKED && !INTERLEAVED ? 16 / int(sizeof(T)) : kPairs<T, INTERLEAVED, PACKED>;

// First and second elements of M pairs, as stored.
template <typename T, int M, bool INTERLEAVED, bool PACKED>
struct Pairs {
  Pack<T, M> first, second;

  __device__ void read(const T* head, int pair, int half) {
    if constexpr (!INTERLEAVED) {
      first = load<T, M>(head + pair);
      second = load<T, M>(head + half + pair);
    } else if constexpr (PACKED) {
      deinterleave(load<T, 2 * M>(head + 2 * pair));
    } else {
      first.data[0] = head[2 * pair];
      second.data[0] = head[2 * pair + 1];
    }
  }

  // The compiler does not move these loads.
  __device__ void read_predicated(const T* head, int pair, int half) {
    if constexpr (!INTERLEAVED) {
      first = load_pack_predicated<T, M>(head + pair, true);
      second = load_pack_predicated<T, M>(head + half + pair, true);
    } else if constexpr (PACKED) {
      deinterleave(load_pack_predicated<T, 2 * M>(head + 2 * pair, true));
    } else {
      read(head, pair, half);
    }
  }

  __device__ void deinterleave(const Pack<T, 2 * M>& both) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
      first.data[i] = both.data[2 * i];
      second.data[i] = both.data[2 * i + 1];
    }
  }

  // Load them asynchronously into 2 * M elements of shared memory, which `read` takes as a head of M pairs; or write zeros.
  static __device__ void cp_async_pack(T* slot, const T* head, int pair, int half, bool valid) {
    if constexpr (INTERLEAVED && PACKED) {
      ejkernel::cp_async_pack<T, 2 * M>(slot, head + 2 * pair, valid);
    } else {
      ejkernel::cp_async_pack<T, M>(slot, head + (INTERLEAVED ? 2 * pair : pair), valid);
      ejkernel::cp_async_pack<T, M>(slot + M, head + (INTERLEAVED ? 2 * pair + 1 : half + pair), valid);
    }
  }

  // Store to global memory, or do nothing.
  __device__ void write(T* head, int pair, int half, bool wanted = true) const {
    if constexpr (!INTERLEAVED) {
      store_out<T, M>(head + pair, first, wanted);
      store_out<T, M>(head + half + pair, second, wanted);
    } else if constexpr (PACKED) {
      Pack<T, 2 * M> both;
#pragma unroll
      for (int i = 0; i < M; ++i) {
        both.data[2 * i] = first.data[i];
        both.data[2 * i + 1] = second.data[i];
      }
      store_out<T, 2 * M>(head + 2 * pair, both, wanted);
    } else if (wanted) {
      head[2 * pair] = first.data[0];
      head[2 * pair + 1] = second.data[0];
    }
  }
};

// cos or sin of M pairs.
template <int M, bool INTERLEAVED, bool PACKED, bool PER_PAIR>
__device__ inline Pairs<float, M, INTERLEAVED, PACKED> read_angles(const float* row, int pair, const Heads& heads) {
  Pairs<float, M, INTERLEAVED, PACKED> angles;
  if constexpr (PER_PAIR) {
    angles.first = angles.second = load_pack_predicated<float, M>(row + pair, true);
  } else {
    angles.read_predicated(row, pair, heads.half);
  }
  return angles;
}

// Copy the channels that are not rotated, one pack per thread.
template <typename T, int N>
__device__ inline void copy_rest(const T* from, T* to, const Heads& heads) {
  for (int column = 2 * heads.half + threadIdx.x * N; column < heads.width; column += blockDim.x * N) {
    store<T, N>(to + column, load<T, N>(from + column));
  }
}

// An input array, its output, and its spans.
template <typename T>
struct Operand {
  const T* x;
  T* out;
  Heads heads;
  Spans spans;
};

// Query and key, concatenated along the grid.
template <class Operand>
struct Operands {
  Operand of[2];
  uint32_t blocks;  // of the first

  __device__ Operand here() const { return of[blockIdx.x >= blocks]; }
  // The span of a row of threads; it may not exist.
  __device__ uint32_t item() const { return (blockIdx.x - (blockIdx.x >= blocks ? blocks : 0)) * blockDim.y + threadIdx.y; }
};

// Minimum resident blocks of kThreads; with fewer registers the compiler would not issue the loads of all heads together.
template <bool PER_PAIR, int SPAN>
constexpr int kMinRotateBlocks = SPAN == 4 && !PER_PAIR ? 1 : kBlocks + (PER_PAIR ? 2 : 1) - SPAN;

// A span of up to SPAN heads per row of threads. Each thread issues all loads of heads, cos and sin before it waits.
template <typename T, bool INTERLEAVED, bool PACKED, bool PER_PAIR, int SPAN>
__global__ void __launch_bounds__(kThreads, kMinRotateBlocks<PER_PAIR, SPAN>)
    rotate(Operands<Operand<T>> operands, Angles angles, bool inverse) {
  constexpr int M = kRotatedPairs<T, INTERLEAVED, PACKED>;
  using Values = Pairs<T, M, INTERLEAVED, PACKED>;
  const Operand<T> operand = operands.here();
  const Heads heads = operand.heads;
  const uint32_t item = operands.item();
  if (item >= operand.spans.count) return;
  const Span here = span_of(item, heads, operand.spans);
  const auto start_of = [&](uint32_t head) { return heads.start(here.index + head * heads.step); };
  const float *cos_row, *sin_row;
  angles.rows(heads, here.member, here.token, cos_row, sin_row);
  for (int pair = threadIdx.x * M; pair < heads.half; pair += blockDim.x * M) {
    Values values[SPAN];
#pragma unroll
    for (uint32_t at = 0; at < SPAN; ++at) values[at].read_predicated(operand.x + start_of(here.near(at)), pair, heads.half);
    const auto cos = read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(cos_row, pair, heads);
    auto sin = read_angles<M, INTERLEAVED, PACKED, PER_PAIR>(sin_row, pair, heads);
    if (inverse) {
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const float other = -sin.first.data[i];
        sin.first.data[i] = -sin.second.data[i];
        sin.second.data[i] = other;
      }
    }
#pragma unroll
    for (uint32_t at = 0; at < SPAN; ++at) {
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
      result.write(operand.out + start_of(at), pair, heads.half, at < here.count);
    }
  }
  if (2 * heads.half == heads.width) return;
  for (uint32_t head = 0; head < here.count; ++head) {
    const int64_t at = start_of(head);
    copy_rest<T, PACKED ? int(16 / sizeof(T)) : 1>(operand.x + at, operand.out + at, heads);
  }
}

// The transform for heads that are rotated as stored.
struct Identity {
  __device__ float of_head(uint32_t) const { return 1.f; }

  template <int M, bool INTERLEAVED, bool PACKED>
  __device__ void prepare(float (&)[M], float (&)[M], float, uint32_t, int, const Heads&) const {}
};

// Gradients of cos and sin from one array: sums over heads and over the batch members that share the angles, in a fixed order.
// One block per row of angles; its rows of threads share the heads. `add` accumulates; `transform` turns stored heads, with
// their statistics, into what was rotated.
template <typename T, bool INTERLEAVED, bool PACKED, class Transform>
__global__ void __launch_bounds__(kThreads, kBlocks)
    angle_gradients(const T* __restrict__ x, const T* __restrict__ grad, float* __restrict__ d_cos, float* __restrict__ d_sin,
                    Heads heads, bool shared, bool per_pair, bool add, Transform transform) {
  constexpr int M = kPairs<T, INTERLEAVED, PACKED>, IN_FLIGHT = kHeadsInFlight<T> / 2;
  EJKERNEL_SHARED(float, sums, kThreads * 4 * M);  // [blockDim.y, 4, slots]
  const uint32_t row = blockIdx.x, first_member = row / heads.length, token = row - first_member * heads.length;
  const uint32_t units = (shared ? heads.batch : 1) * heads.heads;
  const int slots = blockDim.x * M;
  for (int base = 0; base < heads.half; base += slots) {
    const int pair = base + threadIdx.x * M;
    float total[4][M] = {};  // cos and sin of the first elements, then of the second
    if (pair < heads.half) {
      for (uint32_t unit = threadIdx.y; unit < units; unit += IN_FLIGHT * blockDim.y) {
        Pairs<T, M, INTERLEAVED, PACKED> values[IN_FLIGHT], gradients[IN_FLIGHT];
        float of_head[IN_FLIGHT];
        uint32_t members[IN_FLIGHT];
#pragma unroll
        for (int at = 0; at < IN_FLIGHT; ++at) {
          if (unit + at * blockDim.y >= units) continue;
          const uint32_t member = (unit + at * blockDim.y) / heads.heads, head = unit + at * blockDim.y - member * heads.heads;
          members[at] = first_member + member;
          const uint32_t index = heads.index(members[at], token, head);
          values[at].read(x + heads.start(index), pair, heads.half);
          gradients[at].read(grad + heads.start(index), pair, heads.half);
          of_head[at] = transform.of_head(index);
        }
#pragma unroll
        for (int at = 0; at < IN_FLIGHT; ++at) {
          if (unit + at * blockDim.y >= units) continue;
          float a[M], b[M], g[M], h[M];
          widen(values[at].first, a);
          widen(values[at].second, b);
          widen(gradients[at].first, g);
          widen(gradients[at].second, h);
          transform.template prepare<M, INTERLEAVED, PACKED>(a, b, of_head[at], members[at], pair, heads);
#pragma unroll
          for (int i = 0; i < M; ++i) {
            total[0][i] += g[i] * a[i];
            total[1][i] -= g[i] * b[i];
            total[2][i] += h[i] * b[i];
            total[3][i] += h[i] * a[i];
          }
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
    // One thread per sum: of cos and sin of a pair, or of each of its elements.
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
      float* to = (kind % 2 ? d_sin : d_cos) + int64_t(row) * (per_pair ? heads.half : 2 * heads.half) + column;
      *to = add ? *to + value : value;
    }
  }
}

}  // namespace ejkernel::rope
