// From scores of a tile to weights, in the registers of a product: two rows of a thread, shared with the three others of its
// quad.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

constexpr float kLn2 = 0.693147180559945309f;

// What becomes of a score before weights are formed.
enum class Form : int { kPlain, kScaled, kCapped };

// Weights are 2 ** (unit * (x - maximum)), x the score as it is, times `factor`, or the hyperbolic tangent of that.
struct Logits {
  Form form;
  float factor, unit;
};

#ifdef EJKERNEL_HOPPER

// The factor of a row's sum of values, and its log-sum-exp, from the largest logit and the sum of weights relative to it.
EJKERNEL_INLINE float finish_row(float largest, float sum, float unit, float& lse) {
  const bool empty = sum == 0.f;
  lse = empty ? -INFINITY : (largest * unit + log2f(sum)) * kLn2;
  return empty ? 0.f : 1.f / sum;
}

template <typename T>
EJKERNEL_INLINE uint32_t pair(float low, float high);
template <>
EJKERNEL_INLINE uint32_t pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
EJKERNEL_INLINE uint32_t pair<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <int COUNT>
EJKERNEL_INLINE void shape_logits(float (&s)[COUNT], const Logits& logits) {
  if (logits.form == Form::kPlain) return;
  if (logits.form == Form::kScaled) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] *= logits.factor;
  } else {  // an error as small as that of bfloat16's own rounding of operands
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] = rough_tanh(s[i] * logits.factor);
  }
}

// Of the thread's two rows: the largest logit so far, and the sum of this thread's weights relative to it.
struct Sums {
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};

  // Logits become weights; `decay` is what older ones shrink by.
  template <int COUNT>
  EJKERNEL_INLINE void weigh(float (&s)[COUNT], float unit, float (&decay)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = s[2 * row];
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * row], s[i + 2 * row + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      most = fmaxf(most, largest[row]);
      const float shift = most == -INFINITY ? 0.f : most * unit;  // -inf - -inf is NaN
      decay[row] = fast_exp2(largest[row] * unit - shift);
      largest[row] = most;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
        for (int j = i + 2 * row; j < i + 2 * row + 2; ++j) {
          s[j] = fast_exp2(s[j] * unit - shift);
          sum += s[j];
        }
      }
      total[row] = total[row] * decay[row] + sum;
    }
  }

  // The sum of the row's weights. The whole quad asks.
  EJKERNEL_INLINE float all(int row) const {
    float sum = total[row];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

  // The factor of the row's sum of values, and its log-sum-exp. The whole quad asks.
  EJKERNEL_INLINE float finish(int row, float unit, float& lse) const { return finish_row(largest[row], all(row), unit, lse); }
};
#endif

}  // namespace ejkernel::flash_attention
