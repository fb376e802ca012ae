// softmax of the rows of x [rows, width] where `where` is true, in float inside.
#pragma once

#include <cmath>

#include "divide.cuh"
#include "rows.cuh"

namespace ejkernel::softmax {

constexpr int kMaxAxes = 8;

// `where`, read without broadcasting it in memory: the row of `where` of a row of x, by the axes of x before its columns,
// outermost first.
struct Mask {
  const uint8_t* data;  // null without a mask
  bool per_element;     // a byte per element, else one per row
  int axes;
  int64_t size[kMaxAxes];
  int64_t stride[kMaxAxes];  // in rows of `where`; 0 for a broadcast axis

  __device__ int64_t row(int64_t row) const {
    int64_t found = 0, index;
#pragma unroll 1  // a quarter of the code, which every kernel contains
    for (int axis = axes - 1; axis > 0; --axis) {
      row = divide(row, size[axis], index);
      found += index * stride[axis];
    }
    return found + row * stride[0];
  }
};

// One bit for each of N elements from a column on: whether the mask keeps it. `mask_row` is `Mask::row` of the row.
template <int N>
__device__ inline unsigned load_mask_bits(const Mask& mask, int64_t mask_row, int column, int width) {
  constexpr unsigned kAll = (1u << N) - 1;
  if (!mask.data) return kAll;
  if (!mask.per_element) return mask.data[mask_row] ? kAll : 0u;
  const Pack<uint8_t, N> pack = load<uint8_t, N>(mask.data + mask_row * width + column);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits |= pack.data[i] ? 1u << i : 0u;
  return bits;
}

// The same for all of a thread's columns.
template <int N, int ITEMS>
__device__ inline unsigned load_row_mask_bits(const Mask& mask, const RowCoord& coord, int width) {
  static_assert(N * ITEMS <= 32);
  if (!coord.active) return 0;
  const int64_t mask_row = mask.data ? mask.row(coord.row) : 0;
  unsigned bits = 0;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = coord.columns.of(item);
    if (coord.columns.has(item)) bits |= load_mask_bits<N>(mask, mask_row, column, width) << (item * N);
  }
  return bits;
}

// Weights are exp(logit) or, for two-byte results, exp2 of logits scaled by log2(e): fast, with an error of 2^-21 near -16 and
// more below, which bfloat16 and float16 do not resolve.
template <typename T>
constexpr float kLogitScale = sizeof(T) == 4 ? 1.f : 1.4426950408889634f;

template <typename T>
__device__ inline float weight(float value) {
  if constexpr (sizeof(T) == 4) return expf(value);
  return fast_exp2(value);
}

// PLAIN: no mask, and the largest element has the largest logit.
template <typename T_, int N_, bool PLAIN = false>
struct Forward {
  using T = T_;
  static constexpr int N = N_;
  const T* x;
  Mask mask;
  T* out;
  int width;
  float scale;

  static constexpr int kStreams = 1, kFound = 2;
  static constexpr bool kFlushes = false;
  static constexpr int maxnreg(int items) { return items > 2 ? 80 : 64; }
  static constexpr int register_rows_maxnreg(int items, int lanes) {
    return lanes || items > kMaxItems ? 64 : items > 2 ? 104 : 80;
  }
  static constexpr int plain_rows_maxnreg(int items) { return items == 1 ? 48 : register_rows_maxnreg(items, 32); }
  static constexpr RowPath kPath = RowPath::kEither;
  static constexpr int kNarrowItems = 2, kMaxRegisterItems = 8, kMaxClusterItems = kMaxRegisterItems, kClusterThreads = 0;
  static constexpr bool kRaggedClusters = true, kFullRows = false, kPlainRows = sizeof(T) == 2;
  static constexpr int kClusterMaxnreg = 64;
  // A thread of more packs has no mask bits.
  int max_register_items() const { return is_plain() ? kMaxRegisterItems : kMaxItems; }
  bool supports_cluster_registers() const { return is_plain(); }
  auto plain() const
    requires(N > 1 && !PLAIN)
  {
    return __builtin_bit_cast(Forward<T, N, true>, *this);
  }
  bool is_plain() const { return !mask.data && scale > 0.f; }
  template <int ITEMS>
  struct ThreadState {};
  template <int ITEMS>
  struct RowState {
    unsigned mask_bits;
    // From `measure` to `finish`, if kHolds: weights relative to the warp's largest logit, and that logit.
    float weights[ITEMS > kMaxItems ? 1 : ITEMS * N], largest;
  };
  // Else weights are recomputed: registers for the weights of two rows, or of many columns, would halve the threads of a
  // multiprocessor.
  template <int ITEMS, bool CLUSTER>
  static constexpr bool kHolds = ITEMS <= kMaxItems && !CLUSTER;

  __device__ const T* stream(int) const { return x; }

  template <int ITEMS>
  __device__ void begin(ThreadState<ITEMS>&, int64_t, const Columns&) const {}

  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t, const Columns&, Use use) const {
    use(NoParameters{});
  }

  template <int ITEMS>
  __device__ RowState<ITEMS> row_state(const RowCoord& coord) const {
    RowState<ITEMS> row_state;
    row_state.mask_bits = 0;
    if constexpr (ITEMS <= kMaxItems)
      row_state.mask_bits = is_ordered<ITEMS>() ? 0 : load_row_mask_bits<N, ITEMS>(mask, coord, width);
    return row_state;
  }

  // -inf is hidden whatever the sign of the scale.
  static __device__ bool visible(float value, bool mask_bits) { return mask_bits && value != -INFINITY; }
  __device__ float logit(float value, bool mask_bits) const {
    return visible(value, mask_bits) ? value * (scale * kLogitScale<T>) : -INFINITY;
  }

  template <int ITEMS>
  __device__ bool is_ordered() const {
    return PLAIN || ITEMS > kMaxItems || (!mask.data && scale > 0.f);
  }

  // What is subtracted from logits: the maximum, or 0 in a row without one, so that -inf - (-inf) does not arise.
  static __device__ float shift_of(float largest) { return largest == -INFINITY ? 0.f : largest; }
  static __device__ float inverse_of(float total) { return total == 0.f ? 0.f : 1.f / total; }

  // The weight of an element relative to `from`.
  template <bool ORDERED>
  __device__ float weight_of(float value, float factor, float from, bool mask_bits) const {
    if (ORDERED) return weight<T>(fmaf(value, factor, -from));
    return visible(value, mask_bits) ? weight<T>(value * factor - from) : 0.f;
  }

  // For each row: the largest logit of the block's columns, and the sum of weights relative to it.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], RowState<ITEMS> (&row_states)[ROWS], const Parameters&,
                          const Columns& columns, Reducer& reducer, float (&found)[ROWS][kFound]) const {
    if constexpr (kHolds<ITEMS, SPAN == Span::kCluster>) {
      is_ordered<ITEMS>() ? compute_weights<true, SPAN>(sources, row_states, columns, reducer, found)
                          : compute_weights<false, SPAN>(sources, row_states, columns, reducer, found);
    } else {
      is_ordered<ITEMS>() ? sum_weights<true, ITEMS>(sources[0], row_states[0].mask_bits, columns, reducer, found[0])
                          : sum_weights<false, ITEMS>(sources[0], row_states[0].mask_bits, columns, reducer, found[0]);
    }
  }

  // The same without holding weights.
  template <bool ORDERED, int ITEMS, class Source>
  __device__ void sum_weights(const Source& slots, unsigned mask_bits, const Columns& columns, Reducer& reducer,
                              float (&found)[kFound]) const {
    const float factor = scale * kLogitScale<T>;
    float largest[1] = {-INFINITY}, total[1] = {};
    if constexpr (ORDERED) {
      PackMax<T, N> pack_max;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        if (columns.has(item)) pack_max.update(slots.pack(0, item));
      }
      largest[0] = pack_max.value() * factor;
    } else {
#pragma unroll 1
      for (int item = 0; item < ITEMS; ++item) {
        float values[N];
        slots.read(0, item, values);
#pragma unroll
        for (int i = 0; i < N; ++i) largest[0] = fmaxf(largest[0], logit(values[i], mask_bits >> (item * N + i) & 1u));
      }
    }
    Reducer::warp<Max>(largest, 32);
    const float shift = shift_of(largest[0]);
#pragma unroll(ORDERED ? ITEMS : 1)
    for (int item = 0; item < ITEMS; ++item) {
      const float from = columns.has(item) ? shift : INFINITY;
      float values[N];
      slots.read(0, item, values);
#pragma unroll
      for (int i = 0; i < N; ++i)
        total[0] += weight_of<ORDERED>(values[i], factor, from, ORDERED || (mask_bits >> (item * N + i) & 1u));
    }
    Reducer::warp<Add>(total, 32);
    combine_warps(largest, total, reducer);
    found[0] = largest[0], found[1] = total[0];
  }

  // Without a mask and with a positive scale, the largest element has the largest logit: in registers, one FMA then computes a
  // logit minus the maximum. For rows in shared memory that was slower.
  template <bool ORDERED, Span SPAN, int ITEMS, int ROWS, class Source>
  __device__ void compute_weights(const Source (&sources)[ROWS], RowState<ITEMS> (&row_states)[ROWS], const Columns& columns,
                                  Reducer& reducer, float (&found)[ROWS][kFound]) const {
    constexpr bool kRaw = ORDERED && Source::kInRegisters;
    const float factor = scale * kLogitScale<T>;
    float largest[ROWS], total[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      largest[row] = -INFINITY;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        float values[N], here = -INFINITY;
        sources[row].read(0, item, values);
        const float absent = columns.has(item) ? 0.f : -INFINITY;  // added to the zeros outside of the row
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int at = item * N + i;
          row_states[row].weights[at] = kRaw      ? values[i]
                                        : ORDERED ? fmaf(values[i], factor, absent)
                                                  : logit(values[i], row_states[row].mask_bits >> at & 1u);
          here = fmaxf(here, row_states[row].weights[at]);
        }
        largest[row] = fmaxf(largest[row], kRaw ? here + absent : here);
      }
      if constexpr (kRaw) largest[row] *= factor;
    }
    const int row_lanes = reducer.template row_lanes<SPAN>();
    Reducer::warp<Max>(largest, row_lanes);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      row_states[row].largest = largest[row];
      const float shift = shift_of(largest[row]);
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        const float from = kRaw && !columns.has(item) ? INFINITY : shift;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float& value = row_states[row].weights[item * N + i];
          value = weight<T>(kRaw ? fmaf(value, factor, -from) : value - from);
          total[row] += value;
        }
      }
    }
    Reducer::warp<Add>(total, row_lanes);
    if (reducer.template is_wide<SPAN>()) combine_warps(largest, total, reducer);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) found[row][0] = largest[row], found[row][1] = total[row];
  }

  // Combine the warps' statistics into those of the block.
  template <int ROWS>
  static __device__ void combine_warps(float (&largest)[ROWS], float (&total)[ROWS], Reducer& reducer) {
    float both[2 * ROWS], absent[2 * ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      both[row] = largest[row], both[ROWS + row] = total[row];
      absent[row] = -INFINITY, absent[ROWS + row] = 0.f;
    }
    const int warps = reducer.gather(both, absent);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) largest[row] = both[row];
    Reducer::warp<Max>(largest, warps);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) total[row] = both[ROWS + row] * weight<T>(both[row] - shift_of(largest[row]));
    Reducer::warp<Add>(total, warps);
  }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const RowState<ITEMS>& row_state, const Parameters&, const RowCoord& coord,
                         const Found& found) const {
    if constexpr (kHolds<ITEMS, Found::kCluster>) {
      is_ordered<ITEMS>() ? scale_weights<true>(row_state, coord, found) : scale_weights<false>(row_state, coord, found);
    } else {
      is_ordered<ITEMS>() ? recompute_weights<true, ITEMS>(source, row_state.mask_bits, coord, found)
                          : recompute_weights<false, ITEMS>(source, row_state.mask_bits, coord, found);
    }
  }

  template <class Found>
  static __device__ float largest_of(const Found& found) {
    if constexpr (Found::kCluster)
      return found.template all<Max>(found.of_block(0));
    else
      return found.total(0);
  }

  // Relative to `shift`, which comes from the row's maximum.
  template <class Found>
  static __device__ float sum_of(const Found& found, float shift) {
    if constexpr (Found::kCluster)
      return found.template all<Add>(found.of_block(1) * weight<T>(found.of_block(0) - shift));
    else
      return found.total(1);
  }

  template <bool ORDERED, int ITEMS, class Source, class Found>
  __device__ void recompute_weights(const Source& slots, unsigned mask_bits, const RowCoord& coord, const Found& found) const {
    const float factor = scale * kLogitScale<T>, shift = shift_of(largest_of(found)),
                inverse = inverse_of(sum_of(found, shift));
    if (!coord.active) return;
    T* to = out + coord.start;
#pragma unroll(ORDERED ? ITEMS : 1)
    for (int item = 0; item < ITEMS; ++item, to += coord.columns.step) {
      if (!coord.columns.has(item)) continue;
      float values[N];
      slots.template read<1>(0, item, values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = weight_of<ORDERED>(values[i], factor, shift, ORDERED || (mask_bits >> (item * N + i) & 1u)) * inverse;
      }
      store_out(to, rounded<T, N>(values));
    }
  }

  template <bool ORDERED, int ITEMS, class Found>
  __device__ void scale_weights(const RowState<ITEMS>& row_state, const RowCoord& coord, const Found& found) const {
    const float shift = shift_of(found.values[0]);
    // Rescale from the warp's maximum to the row's.
    const float factor = weight<T>(row_state.largest - shift) * inverse_of(found.values[1]);
    if (!coord.active) return;
    T* to = out + coord.start;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item, to += coord.columns.step) {
      if (!coord.columns.has(item)) continue;
      float result[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = item * N + i;
        result[i] = ORDERED || (row_state.mask_bits >> at & 1u) ? row_state.weights[at] * factor : 0.f;
      }
      store_out(to, rounded<T, N>(result));
    }
  }

  template <int ITEMS>
  __device__ void flush(const ThreadState<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void multipass(int64_t row, Reducer& reducer) const {
    const T* from = x + row * width;
    const int64_t mask_row = mask.data ? mask.row(row) : 0;
    float largest = -INFINITY, total = 0.f;  // of this thread; the total is relative to its maximum
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      float values[N];
      widen(load<T, N>(from + column), values);
      const unsigned mask_bits = load_mask_bits<N>(mask, mask_row, column, width);
      float logits[N], here = largest;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        logits[i] = logit(values[i], mask_bits >> i & 1u);
        here = fmaxf(here, logits[i]);
      }
      total *= weight<T>(largest - shift_of(here));
      largest = here;
#pragma unroll
      for (int i = 0; i < N; ++i) total += weight<T>(logits[i] - shift_of(largest));
    }
    const float shift = shift_of(reducer.template all<Max>(largest));
    const float inverse = inverse_of(reducer.template all<Add>(total * weight<T>(largest - shift)));
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      float values[N];
      widen(load<T, N>(from + column), values);
      const unsigned mask_bits = load_mask_bits<N>(mask, mask_row, column, width);
      Pack<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool counts = visible(values[i], mask_bits >> i & 1u);
        result.data[i] = from_float<T>(counts ? weight<T>(logit(values[i], true) - shift) * inverse : 0.f);
      }
      store<T, N>(out + row * width + column, result);
    }
  }
};

// d_x = scale * out * (grad - sum(out * grad)).
template <typename T_, int N_>
struct Backward {
  using T = T_;
  static constexpr int N = N_;
  const T* out;
  const T* grad;
  Mask mask;
  T* d_x;
  int width;
  float scale;

  static constexpr int kStreams = 2, kFound = 1;
  static constexpr bool kFlushes = false;
  static constexpr int maxnreg(int) { return 64; }
  static constexpr int kClusterMaxnreg = 64;
  static constexpr int register_rows_maxnreg(int items, int lanes) { return lanes ? 64 : items > 2 ? 104 : 80; }
  static constexpr RowPath kPath = RowPath::kEither;
  static constexpr int kNarrowItems = 2, kMaxRegisterItems = kMaxItems, kMaxClusterItems = 0;
  static constexpr bool kFullRows = false, kPlainRows = false;
  int max_register_items() const { return kMaxRegisterItems; }
  template <int ITEMS>
  struct ThreadState {};
  template <int ITEMS>
  struct RowState {
    unsigned mask_bits;
  };

  __device__ const T* stream(int which) const { return which == 0 ? out : grad; }

  template <int ITEMS>
  __device__ void begin(ThreadState<ITEMS>&, int64_t, const Columns&) const {}

  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t, const Columns&, Use use) const {
    use(NoParameters{});
  }

  template <int ITEMS>
  __device__ RowState<ITEMS> row_state(const RowCoord& coord) const {
    return {mask.data ? load_row_mask_bits<N, ITEMS>(mask, coord, width) : 0};
  }

  template <bool MASKED>
  static __device__ float dot(const float (&values)[N], const float (&grads)[N], unsigned mask_bits) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += !MASKED || (mask_bits >> i & 1u) ? values[i] * grads[i] : 0.f;
    return sum;
  }

  template <bool MASKED>
  __device__ void write(const float (&values)[N], const float (&grads)[N], unsigned mask_bits, int64_t at, float sum) const {
    float result[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = values[i] * (grads[i] - sum) * scale;
      result[i] = !MASKED || (mask_bits >> i & 1u) ? value : 0.f;
    }
    store<T, N>(d_x + at, rounded<T, N>(result));
  }

  // Elements outside of the row are zero.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], const RowState<ITEMS> (&row_states)[ROWS], const Parameters&,
                          const Columns&, Reducer& reducer, float (&found)[ROWS][kFound]) const {
    float sums[ROWS] = {}, values[N], grads[N];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        sources[row].read(0, item, values);
        sources[row].read(1, item, grads);
        sums[row] +=
            mask.data ? dot<true>(values, grads, row_states[row].mask_bits >> (item * N)) : dot<false>(values, grads, 0);
      }
    }
    reducer.template all<Add, SPAN>(sums);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) found[row][0] = sums[row];
  }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const RowState<ITEMS>& row_state, const Parameters&, const RowCoord& coord,
                         const Found& found) const {
    const float sum = found.total(0);
    if (!coord.active) return;
    float values[N], grads[N];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      if (!coord.columns.has(item)) continue;
      source.template read<1>(0, item, values);
      source.template read<1>(1, item, grads);
      const int64_t at = coord.at(item);
      mask.data ? write<true>(values, grads, row_state.mask_bits >> (item * N), at, sum)
                : write<false>(values, grads, 0, at, sum);
    }
  }

  template <int ITEMS>
  __device__ void flush(const ThreadState<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void multipass(int64_t row, Reducer& reducer) const {
    const int64_t start = row * width, mask_row = mask.data ? mask.row(row) : 0;
    float sum = 0.f, values[N], grads[N];
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(out + start + column), values);
      widen(load<T, N>(grad + start + column), grads);
      sum += dot<true>(values, grads, load_mask_bits<N>(mask, mask_row, column, width));
    }
    sum = reducer.template all<Add>(sum);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(out + start + column), values);
      widen(load<T, N>(grad + start + column), grads);
      write<true>(values, grads, load_mask_bits<N>(mask, mask_row, column, width), start + column, sum);
    }
  }
};

}  // namespace ejkernel::softmax
