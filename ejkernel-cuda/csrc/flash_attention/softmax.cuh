// Online softmax in wgmma accumulators: a thread has two rows, which it shares with the other three lanes of its quad.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

constexpr float kLn2 = 0.693147180559945309f, kLog2E = 1.44269504088896341f;

// How dot products become logits.
enum class LogitKind : int { kPlain, kScaled, kCapped };

// Weights are 2 ** (unit * (x - maximum)); x is the dot product itself, times `factor`, or the tanh of that.
struct Logits {
  LogitKind kind;
  float factor, unit;
};

#ifdef EJKERNEL_HOPPER

// The normalisation factor of a row and its log-sum-exp, from its maximum and sum.
EJKERNEL_INLINE float finish_row(float row_max, float sum, float unit, float& lse) {
  const bool empty = sum == 0.f;
  lse = empty ? -INFINITY : (row_max * unit + log2f(sum)) * kLn2;
  return empty ? 0.f : 1.f / sum;
}

// The same with a sink, a logit in the denominator alone.
EJKERNEL_INLINE float finish_row(float row_max, float sum, float unit, float sink, float& lse) {
  const float own = row_max * unit, other = sink * kLog2E, top = fmaxf(own, other);
  if (other == -INFINITY) return finish_row(row_max, sum, unit, lse);
  const float rescale = fast_exp2(own - top), total = sum * rescale + fast_exp2(other - top);
  lse = (top + log2f(total)) * kLn2;
  return rescale / total;
}

template <typename T>
EJKERNEL_INLINE uint32_t pack_pair(float low, float high);
template <>
EJKERNEL_INLINE uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
EJKERNEL_INLINE uint32_t pack_pair<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <int COUNT>
EJKERNEL_INLINE void transform_logits(float (&s)[COUNT], const Logits& logits) {
  if (logits.kind == LogitKind::kPlain) return;
  if (logits.kind == LogitKind::kScaled) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] *= logits.factor;
  } else {  // the error is as small as that of rounding operands to bfloat16
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] = fast_tanh(s[i] * logits.factor);
  }
}

// The running maxima of the thread's two rows, and the sums of this thread's weights relative to them.
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};

  // Turn logits into weights; `rescale_factor` rescales earlier results to the new maximum.
  template <int COUNT>
  EJKERNEL_INLINE void update(float (&s)[COUNT], float unit, float (&rescale_factor)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float new_max = s[2 * row];
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) new_max = fmaxf(new_max, fmaxf(s[i + 2 * row], s[i + 2 * row + 1]));
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 2));
      new_max = fmaxf(new_max, row_max[row]);
      const float shift = new_max == -INFINITY ? 0.f : new_max * unit;  // -inf - -inf is NaN
      rescale_factor[row] = fast_exp2(row_max[row] * unit - shift);
      row_max[row] = new_max;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
        for (int j = i + 2 * row; j < i + 2 * row + 2; ++j) {
          s[j] = fast_exp2(s[j] * unit - shift);
          sum += s[j];
        }
      }
      row_sum[row] = row_sum[row] * rescale_factor[row] + sum;
    }
  }

  // The row sum over the quad. All lanes of the quad call this.
  EJKERNEL_INLINE float quad_sum(int row) const {
    float sum = row_sum[row];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};
#endif

}  // namespace ejkernel::flash_attention
