// softmax of the rows of x [rows, width] over the places that `where` marks, in float inside.
#pragma once

#include <cmath>

#include "divide.cuh"
#include "rows.cuh"

namespace ejkernel::softmax {

constexpr int kMaxAxes = 8;

// `where`, read as it is stored: the row of `where` for a row of x, by the axes of x before its columns, outermost first.
struct Mask {
  const uint8_t* data;  // null when all places take part
  bool per_element;     // a byte per place, else one per row
  int axes;
  int64_t size[kMaxAxes];
  int64_t stride[kMaxAxes];  // in rows of `where`; 0 where an axis is repeated

  __device__ int64_t row(int64_t row) const {
    int64_t found = 0, index;
#pragma unroll 1  // a quarter of the code, of which there is a lot in every kernel
    for (int axis = axes - 1; axis > 0; --axis) {
      row = divide(row, size[axis], index);
      found += index * stride[axis];
    }
    return found + row * stride[0];
  }
};

// One bit for each of N places from a column on: whether it takes part. `mask_row` is `Mask::row` of the row.
template <int N>
__device__ inline unsigned taking_part(const Mask& mask, int64_t mask_row, int column, int width) {
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
__device__ inline unsigned row_taking_part(const Mask& mask, const Place& place, int width) {
  static_assert(N * ITEMS <= 32);
  if (!place.active) return 0;
  const int64_t mask_row = mask.data ? mask.row(place.row) : 0;
  unsigned bits = 0;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int column = place.columns.of(item);
    if (place.columns.has(item)) bits |= taking_part<N>(mask, mask_row, column, width) << (item * N);
  }
  return bits;
}

// Weights are powers of e, or for numbers that end in two bytes of 2, of logits that are as much larger: fast, and wrong by
// 2^-21 or so near -16 and more below, which bfloat16 and float16 do not see.
template <typename T>
constexpr float kUnit = sizeof(T) == 4 ? 1.f : 1.4426950408889634f;

template <typename T>
__device__ inline float weight(float value) {
  if constexpr (sizeof(T) == 4) return expf(value);
  return fast_exp2(value);
}

// PLAIN: all places take part, and the largest element has the largest logit.
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
  static constexpr int registers(int items) { return items > 2 ? 80 : 64; }
  static constexpr int direct_registers(int items, int lanes) { return lanes || items > kMaxItems ? 64 : items > 2 ? 104 : 80; }
  static constexpr int plain_registers(int items) { return items == 1 ? 48 : direct_registers(items, 32); }
  static constexpr Ways kWays = Ways::kEither;
  static constexpr int kNarrowItems = 2, kMostDirect = 8, kMostShared = kMostDirect, kSharedThreads = 0;
  static constexpr bool kSharesParts = true, kWhole = false, kPlainRows = sizeof(T) == 2;
  static constexpr int kSharedRegisters = 64;
  // A thread of more packs has no bits for places.
  int most_direct() const { return is_plain() ? kMostDirect : kMaxItems; }
  bool shares_direct() const { return is_plain(); }
  auto plain() const
    requires(N > 1 && !PLAIN)
  {
    return __builtin_bit_cast(Forward<T, N, true>, *this);
  }
  bool is_plain() const { return !mask.data && scale > 0.f; }
  template <int ITEMS>
  struct Kept {};
  template <int ITEMS>
  struct Aside {
    unsigned taken;
    // From `measure` to `finish`, where kHolds: weights relative to the warp's largest logit, and that.
    float weights[ITEMS > kMaxItems ? 1 : ITEMS * N], largest;
  };
  // Else weights are found a second time: with those of two rows, or of many columns, a processor would have half as many threads.
  template <int ITEMS, bool CLUSTER>
  static constexpr bool kHolds = ITEMS <= kMaxItems && !CLUSTER;

  __device__ const T* stream(int) const { return x; }

  template <int ITEMS>
  __device__ void begin(Kept<ITEMS>&, int64_t, const Columns&) const {}

  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t, const Columns&, Use use) const {
    use(NoParameters{});
  }

  template <int ITEMS>
  __device__ Aside<ITEMS> aside(const Place& place) const {
    Aside<ITEMS> aside;
    aside.taken = 0;
    if constexpr (ITEMS <= kMaxItems) aside.taken = is_ordered<ITEMS>() ? 0 : row_taking_part<N, ITEMS>(mask, place, width);
    return aside;
  }

  __device__ float logit(float value, bool taken) const { return taken ? value * (scale * kUnit<T>) : -INFINITY; }

  template <int ITEMS>
  __device__ bool is_ordered() const {
    return PLAIN || ITEMS > kMaxItems || (!mask.data && scale > 0.f);
  }

  // What is taken from every logit: the largest, or 0 in a row without one, so that -inf - (-inf) does not arise.
  static __device__ float shift_of(float largest) { return largest == -INFINITY ? 0.f : largest; }
  static __device__ float inverse_of(float total) { return total == 0.f ? 0.f : 1.f / total; }

  // The weight of an element, from whose logit `from` is taken.
  template <bool ORDERED>
  __device__ float weight_of(float value, float factor, float from, bool taken) const {
    if (ORDERED) return weight<T>(fmaf(value, factor, -from));
    return taken ? weight<T>(value * factor - from) : 0.f;
  }

  // Of each of so many rows, the largest logit of the block's columns, and the sum of weights relative to it.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], Aside<ITEMS> (&asides)[ROWS], const Parameters&, const Columns& columns,
                          Reducer& reducer, float (&found)[ROWS][kFound]) const {
    if constexpr (kHolds<ITEMS, SPAN == Span::kCluster>) {
      is_ordered<ITEMS>() ? weigh<true, SPAN>(sources, asides, columns, reducer, found)
                          : weigh<false, SPAN>(sources, asides, columns, reducer, found);
    } else {
      is_ordered<ITEMS>() ? sum_weights<true, ITEMS>(sources[0], asides[0].taken, columns, reducer, found[0])
                          : sum_weights<false, ITEMS>(sources[0], asides[0].taken, columns, reducer, found[0]);
    }
  }

  // The same without weights that are held.
  template <bool ORDERED, int ITEMS, class Source>
  __device__ void sum_weights(const Source& slots, unsigned taken, const Columns& columns, Reducer& reducer,
                              float (&found)[kFound]) const {
    const float factor = scale * kUnit<T>;
    float largest[1] = {-INFINITY}, total[1] = {};
    if constexpr (ORDERED) {
      Peak<T, N> peak;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        if (columns.has(item)) peak.take(slots.pack(0, item));
      }
      largest[0] = peak.value() * factor;
    } else {
#pragma unroll 1
      for (int item = 0; item < ITEMS; ++item) {
        float values[N];
        slots.read(0, item, values);
#pragma unroll
        for (int i = 0; i < N; ++i) largest[0] = fmaxf(largest[0], logit(values[i], taken >> (item * N + i) & 1u));
      }
    }
    Reducer::warp<Largest>(largest, 32);
    const float shift = shift_of(largest[0]);
#pragma unroll(ORDERED ? ITEMS : 1)
    for (int item = 0; item < ITEMS; ++item) {
      const float from = columns.has(item) ? shift : INFINITY;
      float values[N];
      slots.read(0, item, values);
#pragma unroll
      for (int i = 0; i < N; ++i) total[0] += weight_of<ORDERED>(values[i], factor, from, ORDERED || (taken >> (item * N + i) & 1u));
    }
    Reducer::warp<Add>(total, 32);
    join_warps(largest, total, reducer);
    found[0] = largest[0], found[1] = total[0];
  }

  // Without a mask and with a positive scale, the largest element has the largest logit: in registers one multiply-add then makes a
  // logit and takes the largest from it. Of rows in shared memory that was slower.
  template <bool ORDERED, Span SPAN, int ITEMS, int ROWS, class Source>
  __device__ void weigh(const Source (&sources)[ROWS], Aside<ITEMS> (&asides)[ROWS], const Columns& columns, Reducer& reducer,
                        float (&found)[ROWS][kFound]) const {
    constexpr bool kRaw = ORDERED && Source::kInRegisters;
    const float factor = scale * kUnit<T>;
    float largest[ROWS], total[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      largest[row] = -INFINITY;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        float values[N], here = -INFINITY;
        sources[row].read(0, item, values);
        const float absent = columns.has(item) ? 0.f : -INFINITY;  // added to the zeros that are there instead
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int at = item * N + i;
          asides[row].weights[at] = kRaw      ? values[i]
                                    : ORDERED ? fmaf(values[i], factor, absent)
                                              : logit(values[i], asides[row].taken >> at & 1u);
          here = fmaxf(here, asides[row].weights[at]);
        }
        largest[row] = fmaxf(largest[row], kRaw ? here + absent : here);
      }
      if constexpr (kRaw) largest[row] *= factor;
    }
    const int neighbours = reducer.template neighbours<SPAN>();
    Reducer::warp<Largest>(largest, neighbours);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      asides[row].largest = largest[row];
      const float shift = shift_of(largest[row]);
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        const float from = kRaw && !columns.has(item) ? INFINITY : shift;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float& value = asides[row].weights[item * N + i];
          value = weight<T>(kRaw ? fmaf(value, factor, -from) : value - from);
          total[row] += value;
        }
      }
    }
    Reducer::warp<Add>(total, neighbours);
    if (reducer.template is_wide<SPAN>()) join_warps(largest, total, reducer);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) found[row][0] = largest[row], found[row][1] = total[row];
  }

  // From the numbers of a warp's columns to those of the block's.
  template <int ROWS>
  static __device__ void join_warps(float (&largest)[ROWS], float (&total)[ROWS], Reducer& reducer) {
    float both[2 * ROWS], absent[2 * ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      both[row] = largest[row], both[ROWS + row] = total[row];
      absent[row] = -INFINITY, absent[ROWS + row] = 0.f;
    }
    const int warps = reducer.gather(both, absent);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) largest[row] = both[row];
    Reducer::warp<Largest>(largest, warps);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) total[row] = both[ROWS + row] * weight<T>(both[row] - shift_of(largest[row]));
    Reducer::warp<Add>(total, warps);
  }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const Aside<ITEMS>& aside, const Parameters&, const Place& place,
                         const Found& found) const {
    if constexpr (kHolds<ITEMS, Found::kCluster>) {
      is_ordered<ITEMS>() ? scale_weights<true>(aside, place, found) : scale_weights<false>(aside, place, found);
    } else {
      is_ordered<ITEMS>() ? weigh_again<true, ITEMS>(source, aside.taken, place, found)
                          : weigh_again<false, ITEMS>(source, aside.taken, place, found);
    }
  }

  template <class Found>
  static __device__ float largest_of(const Found& found) {
    if constexpr (Found::kCluster) return found.template all<Largest>(found.of_block(0));
    else return found.total(0);
  }

  // Relative to `shift`, which is taken from the largest of all.
  template <class Found>
  static __device__ float sum_of(const Found& found, float shift) {
    if constexpr (Found::kCluster) return found.template all<Add>(found.of_block(1) * weight<T>(found.of_block(0) - shift));
    else return found.total(1);
  }

  template <bool ORDERED, int ITEMS, class Source, class Found>
  __device__ void weigh_again(const Source& slots, unsigned taken, const Place& place, const Found& found) const {
    const float factor = scale * kUnit<T>, shift = shift_of(largest_of(found)), inverse = inverse_of(sum_of(found, shift));
    if (!place.active) return;
    T* to = out + place.start;
#pragma unroll(ORDERED ? ITEMS : 1)
    for (int item = 0; item < ITEMS; ++item, to += place.columns.step) {
      if (!place.columns.has(item)) continue;
      float values[N];
      slots.template read<1>(0, item, values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = weight_of<ORDERED>(values[i], factor, shift, ORDERED || (taken >> (item * N + i) & 1u)) * inverse;
      }
      store_out(to, rounded<T, N>(values));
    }
  }

  template <bool ORDERED, int ITEMS, class Found>
  __device__ void scale_weights(const Aside<ITEMS>& aside, const Place& place, const Found& found) const {
    const float shift = shift_of(found.values[0]);
    // From the warp's largest logit to the row's.
    const float factor = weight<T>(aside.largest - shift) * inverse_of(found.values[1]);
    if (!place.active) return;
    T* to = out + place.start;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item, to += place.columns.step) {
      if (!place.columns.has(item)) continue;
      float result[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = item * N + i;
        result[i] = ORDERED || (aside.taken >> at & 1u) ? aside.weights[at] * factor : 0.f;
      }
      store_out(to, rounded<T, N>(result));
    }
  }

  template <int ITEMS>
  __device__ void flush(const Kept<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void walk(int64_t row, Reducer& reducer) const {
    const T* from = x + row * width;
    const int64_t mask_row = mask.data ? mask.row(row) : 0;
    float largest = -INFINITY, total = 0.f;  // of this thread, the total relative to its largest
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      float values[N];
      widen(load<T, N>(from + column), values);
      const unsigned taken = taking_part<N>(mask, mask_row, column, width);
      float logits[N], here = largest;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        logits[i] = logit(values[i], taken >> i & 1u);
        here = fmaxf(here, logits[i]);
      }
      total *= weight<T>(largest - shift_of(here));
      largest = here;
#pragma unroll
      for (int i = 0; i < N; ++i) total += weight<T>(logits[i] - shift_of(largest));
    }
    const float shift = shift_of(reducer.template all<Largest>(largest));
    const float inverse = inverse_of(reducer.template all<Add>(total * weight<T>(largest - shift)));
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      float values[N];
      widen(load<T, N>(from + column), values);
      const unsigned taken = taking_part<N>(mask, mask_row, column, width);
      Pack<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool part = taken >> i & 1u;
        result.data[i] = from_float<T>(part ? weight<T>(logit(values[i], true) - shift) * inverse : 0.f);
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
  static constexpr int registers(int) { return 64; }
  static constexpr int kSharedRegisters = 64;
  static constexpr int direct_registers(int items, int lanes) { return lanes ? 64 : items > 2 ? 104 : 80; }
  static constexpr Ways kWays = Ways::kEither;
  static constexpr int kNarrowItems = 2, kMostDirect = kMaxItems, kMostShared = 0;
  static constexpr bool kWhole = false, kPlainRows = false;
  int most_direct() const { return kMostDirect; }
  template <int ITEMS>
  struct Kept {};
  template <int ITEMS>
  struct Aside {
    unsigned taken;
  };

  __device__ const T* stream(int which) const { return which == 0 ? out : grad; }

  template <int ITEMS>
  __device__ void begin(Kept<ITEMS>&, int64_t, const Columns&) const {}

  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t, const Columns&, Use use) const {
    use(NoParameters{});
  }

  template <int ITEMS>
  __device__ Aside<ITEMS> aside(const Place& place) const {
    return {mask.data ? row_taking_part<N, ITEMS>(mask, place, width) : 0};
  }

  template <bool MASKED>
  static __device__ float dot(const float (&values)[N], const float (&grads)[N], unsigned taken) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += !MASKED || (taken >> i & 1u) ? values[i] * grads[i] : 0.f;
    return sum;
  }

  template <bool MASKED>
  __device__ void write(const float (&values)[N], const float (&grads)[N], unsigned taken, int64_t at, float sum) const {
    float result[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = values[i] * (grads[i] - sum) * scale;
      result[i] = !MASKED || (taken >> i & 1u) ? value : 0.f;
    }
    store<T, N>(d_x + at, rounded<T, N>(result));
  }

  // What is not there is zero.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], const Aside<ITEMS> (&asides)[ROWS], const Parameters&, const Columns&,
                          Reducer& reducer, float (&found)[ROWS][kFound]) const {
    float sums[ROWS] = {}, values[N], grads[N];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        sources[row].read(0, item, values);
        sources[row].read(1, item, grads);
        sums[row] += mask.data ? dot<true>(values, grads, asides[row].taken >> (item * N)) : dot<false>(values, grads, 0);
      }
    }
    reducer.template all<Add, SPAN>(sums);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) found[row][0] = sums[row];
  }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const Aside<ITEMS>& aside, const Parameters&, const Place& place,
                         const Found& found) const {
    const float sum = found.total(0);
    if (!place.active) return;
    float values[N], grads[N];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      if (!place.columns.has(item)) continue;
      source.template read<1>(0, item, values);
      source.template read<1>(1, item, grads);
      const int64_t at = place.at(item);
      mask.data ? write<true>(values, grads, aside.taken >> (item * N), at, sum) : write<false>(values, grads, 0, at, sum);
    }
  }

  template <int ITEMS>
  __device__ void flush(const Kept<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void walk(int64_t row, Reducer& reducer) const {
    const int64_t start = row * width, mask_row = mask.data ? mask.row(row) : 0;
    float sum = 0.f, values[N], grads[N];
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(out + start + column), values);
      widen(load<T, N>(grad + start + column), grads);
      sum += dot<true>(values, grads, taking_part<N>(mask, mask_row, column, width));
    }
    sum = reducer.template all<Add>(sum);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(out + start + column), values);
      widen(load<T, N>(grad + start + column), grads);
      write<true>(values, grads, taking_part<N>(mask, mask_row, column, width), start + column, sum);
    }
  }
};

}  // namespace ejkernel::softmax
