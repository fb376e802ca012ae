// Writing results; logits are in log2 units.
#pragma once

#include <cmath>

#include "pack.cuh"

namespace ejkernel::paged_attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What is subtracted from logits: the maximum, or 0 if there is none, so that -inf - (-inf) does not arise.
__device__ inline float shift_of(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

// Write channels of a row of results that begins at `at`, up to `size`.
template <int N>
__device__ inline void write_results(void* out, bool is_bf16, int64_t at, int channel, int size, const Pack<float, N>& values) {
  const auto put = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const Pack<T, N> found = rounded<T, N>(values.data);
    to += at + channel;
    if (size % N == 0) {
      if (channel < size) store(to, found);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (channel + i < size) to[i] = found.data[i];
      }
    }
  };
  is_bf16 ? put(static_cast<__nv_bfloat16*>(out)) : put(static_cast<__half*>(out));
}

}  // namespace ejkernel::paged_attention
