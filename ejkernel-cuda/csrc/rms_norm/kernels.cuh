// Root-mean-square normalisation. Rows of x are [batch, rows_per_batch, width]; statistics and sums are float.
//
// Two families: `*_rows` keep a row in registers (ITEMS packs of N elements per thread) and read the next row before they finish the
// current one; `*_wide` walk over rows of any width and read them twice.
#pragma once

#include <cstdint>

#include "pack.cuh"
#include "reduce.cuh"

namespace ejkernel::rms_norm {

constexpr int kMaxThreads = 512;

// A parameter [0 or 1 or batch, width] in float: row `stride * batch`.
struct Parameter {
  const float* data;  // null when absent
  int64_t stride;     // 0 when all batch members share it
};

struct Shape {
  int64_t rows;
  int64_t rows_per_batch;
  int width;
};

// out = x * rstd * (scale + scale_offset) + offset for one pack of columns.
template <typename T, int N>
__device__ inline Pack<T, N> normalise(const Pack<T, N>& x, float rstd, const float* scale, const float* offset, float scale_offset) {
  Pack<T, N> out;
  const Pack<float, N> factor = scale ? load<float, N>(scale) : Pack<float, N>{};
  const Pack<float, N> shift = offset ? load<float, N>(offset) : Pack<float, N>{};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float value = to_float(x.data[i]) * rstd;
    if (scale) value *= factor.data[i] + scale_offset;
    out.data[i] = from_float<T>(offset ? value + shift.data[i] : value);
  }
  return out;
}

template <typename T, int N, int ITEMS>
__device__ inline void load_row(Pack<T, N> (&row)[ITEMS], const T* from, int width, bool active) {
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = (item * blockDim.x + threadIdx.x) * N;
    if (active && column < width) {
      row[item] = load<T, N>(from + column);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) row[item].data[i] = from_float<T>(0.f);
    }
  }
}

template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(kMaxThreads)
    forward_rows(const T* __restrict__ x, Parameter scale, Parameter offset, T* __restrict__ out, float* __restrict__ rstd, Shape shape,
                 float epsilon, float scale_offset) {
  __shared__ float scratch[2 * kMaxWarps];
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  Pack<T, N> current[ITEMS], next[ITEMS];
  load_row<T, N, ITEMS>(current, x + row * shape.width, shape.width, row < shape.rows);
  int turn = 0;
  // The condition is the block's first row, so that every thread takes part in every sum.
  for (; row - threadIdx.y < shape.rows; row += step, turn ^= 1) {
    load_row<T, N, ITEMS>(next, x + (row + step) * shape.width, shape.width, row + step < shape.rows);
    float squares = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float value = to_float(current[item].data[i]);
        squares += value * value;
      }
    }
    const float inverse = rsqrtf(row_sum(squares, blockDim.x, scratch, turn) / shape.width + epsilon);
    if (row < shape.rows) {
      const int64_t batch = row / shape.rows_per_batch;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        const int column = (item * blockDim.x + threadIdx.x) * N;
        if (column < shape.width) {
          const float* factor = scale.data ? scale.data + batch * scale.stride + column : nullptr;
          const float* shift = offset.data ? offset.data + batch * offset.stride + column : nullptr;
          store<T, N>(out + row * shape.width + column, normalise<T, N>(current[item], inverse, factor, shift, scale_offset));
        }
      }
      if (rstd && threadIdx.x == 0) rstd[row] = inverse;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) current[item] = next[item];
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    forward_wide(const T* __restrict__ x, Parameter scale, Parameter offset, T* __restrict__ out, float* __restrict__ rstd, Shape shape,
                 float epsilon, float scale_offset) {
  __shared__ float scratch[2 * kMaxWarps];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x, turn ^= 1) {
    const T* from = x + row * shape.width;
    float squares = 0.f;
    for (int column = threadIdx.x * N; column < shape.width; column += blockDim.x * N) {
      const Pack<T, N> pack = load<T, N>(from + column);
#pragma unroll
      for (int i = 0; i < N; ++i) squares += to_float(pack.data[i]) * to_float(pack.data[i]);
    }
    const float inverse = rsqrtf(row_sum(squares, blockDim.x, scratch, turn) / shape.width + epsilon);
    const int64_t batch = row / shape.rows_per_batch;
    for (int column = threadIdx.x * N; column < shape.width; column += blockDim.x * N) {
      const float* factor = scale.data ? scale.data + batch * scale.stride + column : nullptr;
      const float* shift = offset.data ? offset.data + batch * offset.stride + column : nullptr;
      const Pack<T, N> pack = load<T, N>(from + column);
      store<T, N>(out + row * shape.width + column, normalise<T, N>(pack, inverse, factor, shift, scale_offset));
    }
    if (rstd && threadIdx.x == 0) rstd[row] = inverse;
  }
}

// d_x, and for each block one partial sum of the parameters' gradients. Block = group * parts + part; the `rows_per_group` rows of a
// group lie under one row of the parameters and are dealt out to its parts in turn.
template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(kMaxThreads)
    backward_rows(const T* __restrict__ x, Parameter scale, const float* __restrict__ rstd, const T* __restrict__ grad,
                  T* __restrict__ d_x, float* __restrict__ d_scale, float* __restrict__ d_offset, int64_t rows_per_group, int64_t parts,
                  int width, float scale_offset) {
  __shared__ float scratch[2 * kMaxWarps];
  extern __shared__ float sums[];  // [blockDim.y, ITEMS * blockDim.x * N] when blockDim.y > 1
  const int64_t group = blockIdx.x / parts;
  const int64_t first = group * rows_per_group;
  const float* factors = scale.data ? scale.data + group * scale.stride : nullptr;
  const int64_t step = parts * blockDim.y;
  int64_t row = int64_t(blockIdx.x % parts) * blockDim.y + threadIdx.y;  // within the group
  float sum_scale[ITEMS * N] = {}, sum_offset[ITEMS * N] = {};
  Pack<T, N> x_now[ITEMS], x_next[ITEMS], g_now[ITEMS], g_next[ITEMS];
  load_row<T, N, ITEMS>(x_now, x + (first + row) * width, width, row < rows_per_group);
  load_row<T, N, ITEMS>(g_now, grad + (first + row) * width, width, row < rows_per_group);
  float inverse = row < rows_per_group ? rstd[first + row] : 0.f;
  int turn = 0;
  for (; row - threadIdx.y < rows_per_group; row += step, turn ^= 1) {
    const bool more = row + step < rows_per_group;
    load_row<T, N, ITEMS>(x_next, x + (first + row + step) * width, width, more);
    load_row<T, N, ITEMS>(g_next, grad + (first + row + step) * width, width, more);
    const float inverse_next = more ? rstd[first + row + step] : 0.f;
    float dot = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int column = (item * blockDim.x + threadIdx.x) * N;
      const Pack<float, N> factor = factors && column < width ? load<float, N>(factors + column) : Pack<float, N>{};
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = to_float(g_now[item].data[i]);
        const float normalised = to_float(x_now[item].data[i]) * inverse;
        sum_scale[item * N + i] += g * normalised;
        sum_offset[item * N + i] += g;
        dot += (factors ? g * (factor.data[i] + scale_offset) : g) * normalised;
      }
    }
    const float mean = row_sum(dot, blockDim.x, scratch, turn) / width;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int column = (item * blockDim.x + threadIdx.x) * N;
      if (row < rows_per_group && column < width) {
        const Pack<float, N> factor = factors ? load<float, N>(factors + column) : Pack<float, N>{};
        Pack<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = to_float(g_now[item].data[i]);
          const float weighted = factors ? g * (factor.data[i] + scale_offset) : g;
          result.data[i] = from_float<T>(inverse * (weighted - to_float(x_now[item].data[i]) * inverse * mean));
        }
        store<T, N>(d_x + (first + row) * width + column, result);
      }
    }
    inverse = inverse_next;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      x_now[item] = x_next[item];
      g_now[item] = g_next[item];
    }
  }

  const int slots = ITEMS * blockDim.x * N;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float* to = which == 0 ? d_scale : d_offset;
    if (!to) continue;
    float(&sum)[ITEMS * N] = which == 0 ? sum_scale : sum_offset;
    if (blockDim.y > 1) {
      __syncthreads();
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[threadIdx.y * slots + (item * blockDim.x + threadIdx.x) * N + i] = sum[item * N + i];
      }
      __syncthreads();
      for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < width; column += blockDim.x * blockDim.y) {
        float total = 0.f;
        for (int other = 0; other < blockDim.y; ++other) total += sums[other * slots + column];
        to[int64_t(blockIdx.x) * width + column] = total;
      }
    } else {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int column = (item * blockDim.x + threadIdx.x) * N + i;
          if (column < width) to[int64_t(blockIdx.x) * width + column] = sum[item * N + i];
        }
      }
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    backward_wide(const T* __restrict__ x, Parameter scale, const float* __restrict__ rstd, const T* __restrict__ grad,
                  T* __restrict__ d_x, Shape shape, float scale_offset) {
  __shared__ float scratch[2 * kMaxWarps];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x, turn ^= 1) {
    const float* factors = scale.data ? scale.data + row / shape.rows_per_batch * scale.stride : nullptr;
    const float inverse = rstd[row];
    float mean = 0.f;
    for (int pass = 0; pass < 2; ++pass) {
      float dot = 0.f;
      for (int column = threadIdx.x * N; column < shape.width; column += blockDim.x * N) {
        const Pack<T, N> values = load<T, N>(x + row * shape.width + column);
        const Pack<T, N> grads = load<T, N>(grad + row * shape.width + column);
        const Pack<float, N> factor = factors ? load<float, N>(factors + column) : Pack<float, N>{};
        Pack<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = to_float(grads.data[i]);
          const float weighted = factors ? g * (factor.data[i] + scale_offset) : g;
          const float normalised = to_float(values.data[i]) * inverse;
          dot += weighted * normalised;
          result.data[i] = from_float<T>(inverse * (weighted - normalised * mean));
        }
        if (pass == 1) store<T, N>(d_x + row * shape.width + column, result);
      }
      if (pass == 0) mean = row_sum(dot, blockDim.x, scratch, turn) / shape.width;
    }
  }
}

// The same partial sums as `backward_rows` writes, a column per thread; for rows too wide for registers.
template <typename T>
__global__ void backward_columns(const T* __restrict__ x, const float* __restrict__ rstd, const T* __restrict__ grad,
                                 float* __restrict__ d_scale, float* __restrict__ d_offset, int64_t rows_per_group, int64_t parts,
                                 int width) {
  const int64_t tiles = (int64_t(width) + blockDim.x - 1) / blockDim.x;
  const int64_t part = blockIdx.x / tiles;  // group * parts + part within the group
  const int64_t column = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int64_t first = part / parts * rows_per_group;
  float sum_scale = 0.f, sum_offset = 0.f;
  for (int64_t row = part % parts; row < rows_per_group; row += parts) {
    const int64_t at = (first + row) * width + column;
    const float g = to_float(grad[at]);
    sum_scale += g * to_float(x[at]) * rstd[first + row];
    sum_offset += g;
  }
  if (d_scale) d_scale[part * width + column] = sum_scale;
  if (d_offset) d_offset[part * width + column] = sum_offset;
}

}  // namespace ejkernel::rms_norm
