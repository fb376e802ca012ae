// Normalisation of rows: rms_norm, layer_norm (CENTRED), and add_rms_norm (ADDED), which normalises x + residual as stored. x
// is [batch, rows_per_batch, width]; statistics and sums are float.
//
// Statistics are those of `relative` elements: in a unit in which squares neither overflow nor vanish and, if CENTRED, from the
// row's first element, because the mean of a row far from zero is rounded by more than the row may spread.
#pragma once

#include "divide.cuh"
#include "rows.cuh"

namespace ejkernel::norm {

// A row of a parameter, stored as T or float.
template <typename T>
struct ParameterRow {
  const void* data;  // null when absent
  bool narrow;       // stored as T

  // N columns plus `more`, or `absent`.
  template <int N>
  __device__ void read(int column, float more, float absent, float (&to)[N]) const {
    if (data == nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = absent;
      return;
    }
    if (narrow) {
      widen(load<T, N>(static_cast<const T*>(data) + column), to);
    } else {
      widen(load<float, N>(static_cast<const float*>(data) + column), to);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] += more;
  }
};

// A parameter [0 or 1 or batch, width].
template <typename T>
struct Parameter {
  const void* data;  // null when absent
  int64_t stride;    // bytes between batch members; 0 if they share it
  bool narrow;

  __device__ ParameterRow<T> member(int64_t index) const { return {static_cast<const char*>(data) + index * stride, narrow}; }

  __device__ ParameterRow<T> row(int64_t row, int64_t rows_per_batch) const {
    int64_t within;
    return member(stride ? divide(row, rows_per_batch, within) : 0);
  }
};

// A thread's columns of a parameter row; 0 outside of it.
template <typename S, typename T, int N, int ITEMS>
__device__ inline void read_columns_as(float (&to)[ITEMS][N], const ParameterRow<T>& from, const Columns& columns, float more) {
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const Pack<S, N> pack = columns.has(item) ? load<S, N>(static_cast<const S*>(from.data) + columns.of(item)) : zeros<S, N>();
    widen(pack, to[item]);
#pragma unroll
    for (int i = 0; i < N; ++i) to[item][i] += more;
  }
}

template <typename T, int N, int ITEMS>
__device__ inline void read_columns(float (&to)[ITEMS][N], const ParameterRow<T>& from, const Columns& columns, float more,
                                    float absent) {
  if (from.data == nullptr) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[item][i] = absent;
    }
  } else if (from.narrow) {
    read_columns_as<T>(to, from, columns, more);
  } else {
    read_columns_as<float>(to, from, columns, more);
  }
}

// out = (x - mean) * rstd * (scale + scale_offset) + offset, with x = sum = x + residual if ADDED. PLAIN: parameters are stored
// in T; two-byte ones stay as stored across a thread's rows.
template <typename T_, int N_, bool CENTRED, bool ADDED, bool PLAIN = false>
struct Forward {
  using T = T_;
  static constexpr int N = N_;
  const T* x;
  const T* residual;  // null unless ADDED
  Parameter<T> scale, offset;
  T* out;
  T* sum;       // null unless ADDED
  float* mean;  // if CENTRED; unused without rstd
  float* rstd;  // null if not requested
  int64_t rows_per_batch;
  int width;
  float inverse_width, unit, epsilon, scale_offset;  // `square_unit`; epsilon in its square

  static constexpr int kStreams = ADDED ? 2 : 1, kFound = CENTRED ? 2 : 1;
  static constexpr bool kFlushes = false;
  static constexpr int maxnreg(int items) { return items * N > 16 ? 128 : items > (CENTRED ? 1 : 2) ? 80 : 64; }
  static constexpr bool kKeepsStored = PLAIN && sizeof(T) == 2;
  static constexpr int kClusterMaxnreg = kKeepsStored ? (CENTRED ? 80 : 64) : maxnreg(kMaxItems);
  // With 64, two blocks of 512 threads fit on a multiprocessor.
  static constexpr int register_rows_maxnreg(int items, int lanes) {
    return CENTRED && items == 2 && lanes ? 56 : items == 2 || (ADDED && items > 2) ? 80 : 64;
  }
  static constexpr int plain_rows_maxnreg(int items) { return items == 1 ? 48 : register_rows_maxnreg(items, 32); }
  static constexpr RowPath kPath = ADDED ? RowPath::kEither : RowPath::kRegisters;
  static constexpr int kNarrowItems = CENTRED ? 2 : 1, kMaxRegisterItems = kMaxItems,
                       kMaxClusterItems = CENTRED || ADDED ? 0 : 8;
  static constexpr int kClusterThreads =
      256;  // known at compile time: offsets of packs would take registers that are not available
  static constexpr bool kRaggedClusters = false, kFullRows = CENTRED, kPlainRows = CENTRED || (sizeof(T) == 2 && !ADDED);
  int max_register_items() const { return kFullRows && width == 8 * kMaxThreads * N ? 8 : kMaxRegisterItems; }
  bool supports_cluster_registers() const { return true; }
  template <int ITEMS>
  struct FloatParameters {
    float scale[ITEMS][N], offset[ADDED ? 1 : ITEMS][N];  // ADDED has no offset

    __device__ void prefetch(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns,
                             float on_top) {
      read_columns(scale, factors, columns, on_top, 1.f);
      if constexpr (!ADDED) read_columns(offset, shifts, columns, 0.f, 0.f);
    }

    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) const {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        factor[i] = scale[item][i];
        if constexpr (!ADDED) shift[i] = offset[item][i];
      }
    }
  };
  // Parameters as stored, in T. As words: a loop would pass single elements on.
  template <int ITEMS>
  struct StoredParameters {
    uint4 scale[ITEMS], offset[ADDED ? 1 : ITEMS];
    float more;  // added to scale

    __device__ void prefetch(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns,
                             float on_top) {
      more = factors.data ? on_top : 1.f;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        scale[item] = words_of(factors, item, columns);
        if constexpr (!ADDED) offset[item] = words_of(shifts, item, columns);
      }
    }

    static __device__ uint4 words_of(const ParameterRow<T>& row, int item, const Columns& columns) {
      return load_predicated<uint4>(static_cast<const T*>(row.data) + columns.of(item), row.data && columns.has(item));
    }

    // Again for every row: the compiler would keep floats, which take twice the registers.
    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) const {
      uint4 factors = scale[item], shifts = offset[ADDED ? 0 : item];
      make_opaque(factors), make_opaque(shifts);
      widen(__builtin_bit_cast(Pack<T, N>, factors), factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += more;
      if constexpr (!ADDED) widen(__builtin_bit_cast(Pack<T, N>, shifts), shift);
    }
  };
  template <int ITEMS>
  using ThreadState = std::conditional_t<kKeepsStored, StoredParameters<ITEMS>, FloatParameters<ITEMS>>;
  // Parameters left in memory, stored as S, for a thread whose registers are full with its row: kPrefetchDistance items are
  // loaded ahead of the one in use, the first ones before anything waits for the row or, with many items, after its statistics.
  template <typename S, int ITEMS>
  struct StreamedParameters {
    static constexpr int kChunk = 16 / sizeof(S), kChunks = N / kChunk;  // columns of a load, loads of an item
    static constexpr bool kLate = ITEMS > kMaxItems;
    static constexpr int kPrefetchDistance = kLate     ? (CENTRED || kChunks > 1 ? 1 : 2)
                                             : CENTRED ? 0
                                                       : 1,
                         kBuffers = std::max(kPrefetchDistance, 1);
    ParameterRow<T> scale, offset;
    const Columns& columns;
    float more;  // added to scale
    Pack<S, kChunk> scales[kBuffers][kChunks], offsets[kBuffers][kChunks];

    __device__ StreamedParameters(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns,
                                  float more)
        : scale(factors), offset(shifts), columns(columns), more(more) {}

    __device__ void prefetch() {
      if (!kLate) prefetch_first();
    }
    __device__ void prefetch_late() {
      if (kLate) prefetch_first();
    }

    __device__ void prefetch_first() {
#pragma unroll
      for (int item = 0; item < kPrefetchDistance; ++item) prefetch(item);
    }

    __device__ void prefetch(int item) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        scales[item % kBuffers][chunk] = pack_of(scale, item, chunk);
        if constexpr (!ADDED) offsets[item % kBuffers][chunk] = pack_of(offset, item, chunk);
      }
    }

    __device__ Pack<S, kChunk> pack_of(const ParameterRow<T>& row, int item, int chunk) const {
      const S* from = static_cast<const S*>(row.data) + columns.of(item) + chunk * kChunk;
      return load_pack_predicated<S, kChunk>(from, row.data && columns.has(item));
    }

    static __device__ void widen_chunks(const Pack<S, kChunk> (&packs)[kChunks], float (&to)[N]) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float values[kChunk];
        widen(packs[chunk], values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) to[chunk * kChunk + i] = values[i];
      }
    }

    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) {
      if (!kPrefetchDistance) prefetch(item);
      const StreamedParameters now = *this;
      const int next = item + kPrefetchDistance;
      if (kPrefetchDistance && (next < ITEMS || ITEMS == 2))
        prefetch(next % ITEMS);  // with two items a thread has several rows
      widen_chunks(now.scales[item % kBuffers], factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += more;
      if constexpr (!ADDED) widen_chunks(now.offsets[item % kBuffers], shift);
    }
  };
  // Parameters in registers, loaded before anything waits for the row.
  template <int ITEMS>
  struct PrefetchedParameters : StoredParameters<ITEMS> {
    const ParameterRow<T>&factors, &shifts;
    const Columns& columns;
    float on_top;

    __device__ PrefetchedParameters(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns,
                                    float on_top)
        : factors(factors), shifts(shifts), columns(columns), on_top(on_top) {}

    __device__ void prefetch() { StoredParameters<ITEMS>::prefetch(factors, shifts, columns, on_top); }

    static __device__ void widen_words(uint4 words, float (&to)[N]) {
      const auto pack = __builtin_bit_cast(Pack<T, N>, words);
      ITEMS == 1 ? widen(pack, to) : widen_again(pack, to);
    }

    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) const {
      widen_words(this->scale[item], factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += this->more;
      if constexpr (!ADDED) widen_words(this->offset[item], shift);
    }
  };
  // From `measure` to `finish`, if kKeepsCentred: a row's relative columns minus the warp's mean, and that mean.
  template <int ITEMS>
  struct RowState {
    static constexpr bool kHolds = CENTRED && ITEMS <= kMaxItems;
    float pivot;  // `pivot_of` the row; 0 unless CENTRED
    float centred[kHolds ? ITEMS : 1][N], from;
  };
  template <class Source, int ITEMS>
  static constexpr bool kKeepsCentred = RowState<ITEMS>::kHolds && Source::kInRegisters;

  __device__ const T* stream(int which) const { return which == 0 ? x : residual; }

  // The same Op for a plain call, and whether the call is plain.
  auto plain() const
    requires(N > 1 && !PLAIN)
  {
    return __builtin_bit_cast(Forward<T, N, CENTRED, ADDED, true>, *this);
  }
  bool is_plain() const {
    return std::is_same_v<T, float> || ((!scale.data || scale.narrow) && (!offset.data || offset.narrow));
  }

  template <int ITEMS>
  __device__ void begin(ThreadState<ITEMS>& state, int64_t group, const Columns& columns) const {
    state.prefetch(scale.member(group), offset.member(group), columns, scale_offset);
  }

  // Call `use` with the parameters of a thread of few rows; all parameters have one dtype.
  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t group, const Columns& columns, Use use) const {
    const ParameterRow<T> factors = scale.member(group), shifts = offset.member(group);
    const float more = factors.data ? scale_offset : 1.f;
    if (PLAIN || std::is_same_v<T, float> || factors.narrow) {
      if constexpr (ITEMS > 2) {
        use(StreamedParameters<T, ITEMS>(factors, shifts, columns, more));
      } else {
        use(PrefetchedParameters<ITEMS>(factors, shifts, columns, scale_offset));
      }
    } else {
      use(StreamedParameters<float, ITEMS>(factors, shifts, columns, more));
    }
  }

  template <int ITEMS>
  __device__ RowState<ITEMS> row_state(const RowCoord& coord) const {
    RowState<ITEMS> row_state;
    row_state.pivot = CENTRED && coord.active ? pivot_of(coord.row) : 0.f;
    return row_state;
  }

  // The row's first element; in float32 only of a row whose first elements are close together, for beside a mean near zero the
  // saved mean would keep the rounding of the pivot.
  __device__ float pivot_of(int64_t row) const {
    const T* from = x + row * width;
    const float first = to_float(*from);
    if constexpr (sizeof(T) == 4) {
      float spread = 0.f;
      for (int column = 1; column < min(width, 4); ++column) spread = fmaxf(spread, fabsf(to_float(from[column]) - first));
      return spread * 8.f <= fabsf(first) ? first : 0.f;
    }
    return first;
  }

  // An element of a row, or 0 outside of it, in units of `unit` from the pivot.
  __device__ float relative(float value, float pivot, bool there = true) const {
    if constexpr (CENTRED) return fmaf(value, unit, there ? -pivot * unit : 0.f);
    return std::is_same_v<T, __half> ? value : value * unit;  // whose unit is 1
  }

  // The addends' sum, rounded to T.
  __device__ static void add(float (&x)[N], const float (&residual)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += residual[i];
    widen(rounded<T, N>(x), x);
  }

  template <int TIME = 0, class Source>
  __device__ static void read(const Source& source, int item, float (&x)[N]) {
    source.template read<TIME>(0, item, x);
    if constexpr (ADDED) {
      float residual[N];
      source.template read<TIME>(1, item, residual);
      add(x, residual);
    }
  }

  // For each row: the mean of the block's columns and the sum of squared deviations; unless CENTRED, the sum of squares.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], RowState<ITEMS> (&row_states)[ROWS], Parameters& parameters,
                          const Columns& columns, Reducer& reducer, float (&found)[ROWS][kFound]) const {
    float squares[ROWS] = {}, centres[ROWS] = {};
    if constexpr (CENTRED) {
      // Deviations from the warp's own mean first, so that the warps synchronise once.
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
          const bool there = columns.has(item);
          float x[N];
          read(sources[row], item, x);
          float sum = 0.f;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            x[i] = relative(x[i], row_states[row].pivot, there);
            sum += x[i];
            if constexpr (kKeepsCentred<Source, ITEMS>) row_states[row].centred[item][i] = x[i];
          }
          centres[row] += sum;
        }
      }
      if constexpr (SPAN == Span::kWarp && kKeepsCentred<Source, ITEMS>) {
        if (columns.all) return combine_lanes(centres, row_states, reducer.threads, found);
      }
      Reducer::warp<Add>(centres, reducer.template row_lanes<SPAN>());
      const bool wide = reducer.template is_wide<SPAN>();
      const float share = wide ? fast_reciprocal(fmaxf(columns.of_warp<N, ITEMS>(threadIdx.x / 32), 1.f)) : inverse_width;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) row_states[row].from = centres[row] *= share;
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        if (CENTRED && !kKeepsCentred<Source, ITEMS> && ITEMS > 1 && !columns.has(item)) continue;
        const bool there = columns.has(item);
        const float from = there ? centres[row] : 0.f;  // columns outside of the row are zero
        float x[N];
        if constexpr (!kKeepsCentred<Source, ITEMS>) read<CENTRED && ITEMS != 1>(sources[row], item, x);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          x[i] = kKeepsCentred<Source, ITEMS> ? row_states[row].centred[item][i] : relative(x[i], row_states[row].pivot, there);
          if constexpr (CENTRED) x[i] -= from;
          if constexpr (kKeepsCentred<Source, ITEMS>) row_states[row].centred[item][i] = x[i];
          sum += x[i] * x[i];
        }
        squares[row] += sum;
      }
    }
    if constexpr (requires { parameters.prefetch_late(); }) parameters.prefetch_late();  // in flight while threads synchronise
    if constexpr (CENTRED) {
      Reducer::warp<Add>(squares, reducer.template row_lanes<SPAN>());
      if (reducer.template is_wide<SPAN>()) combine_warps<ITEMS, SPAN>(centres, squares, columns, reducer);
    } else {
      reducer.template all<Add, SPAN>(squares);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if constexpr (CENTRED) found[row][0] = centres[row];
      found[row][CENTRED] = squares[row];
    }
  }

  // Combine the lanes' sums, whose columns are in `row_states`, into the row's mean and sum of squared deviations. Each lane
  // centres on its own mean first, so that lanes exchange both together (Chan et al., 1983). Each has the same number of
  // columns.
  template <int ITEMS, int ROWS>
  __device__ void combine_lanes(float (&sums)[ROWS], RowState<ITEMS> (&row_states)[ROWS], int lanes,
                                float (&found)[ROWS][kFound]) const {
    constexpr float kShare = 1.f / (ITEMS * N);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float mean = sums[row] * kShare;
      float squares = 0.f;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float centred = row_states[row].centred[item][i] - mean;
          squares += centred * centred;
        }
      }
      found[row][0] = sums[row], found[row][1] = squares;
    }
    float share = kShare / 2.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2, share /= 2.f) {
      if (step >= lanes) break;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        const float other = __shfl_xor_sync(0xffffffffu, found[row][0], step);
        const float more = __shfl_xor_sync(0xffffffffu, found[row][1], step), centred = found[row][0] - other;
        found[row][0] += other;
        found[row][1] += more + centred * share * centred;
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float mean = found[row][0] *= inverse_width;
      row_states[row].from = sizeof(T) == 2 ? 0.f : mean;
      if constexpr (sizeof(T) == 2) continue;  // as in `normalised`
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) row_states[row].centred[item][i] -= mean;
      }
    }
  }

  // Combine the warps' means and sums of squared deviations into those of the block.
  template <int ITEMS, Span SPAN, int ROWS>
  __device__ void combine_warps(float (&centres)[ROWS], float (&squares)[ROWS], const Columns& columns,
                                Reducer& reducer) const {
    float both[2 * ROWS], absent[2 * ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) both[row] = centres[row], both[ROWS + row] = squares[row];
    const int warps = reducer.gather(both, absent), warp = threadIdx.x % warps;
    const float count = warp < reducer.threads / 32 ? columns.of_warp<N, ITEMS>(warp) : 0.f;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) centres[row] = both[row] * count;
    Reducer::warp<Add>(centres, warps);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      centres[row] *= SPAN == Span::kCluster ? 1.f / max(columns.here, 1) : inverse_width;
      const float centred = both[row] - centres[row];
      squares[row] = both[ROWS + row] + centred * centred * count;
    }
    Reducer::warp<Add>(squares, warps);
  }

  // The mean of relative elements, 0 unless CENTRED, and the sum of squared deviations.
  template <class Found>
  __device__ void moments(const Found& found, const Columns& columns, float& centre, float& squares) const {
    if constexpr (CENTRED && Found::kCluster) {
      const float mean = found.of_block(0), count = float(columns.count(found.block(), width));
      centre = found.template all<Add>(mean * count) * inverse_width;
      const float centred = mean - centre;
      squares = found.template all<Add>(found.of_block(1) + centred * centred * count);
    } else {
      centre = CENTRED ? found.total(0) : 0.f, squares = found.total(CENTRED);
    }
  }

  // Of a relative element, or, unless CENTRED, of the element itself with the reciprocal of its own deviation. For two-byte
  // elements one FMA, with an error of 2^-24 of centre * inverse, far below their own precision.
  static __device__ float normalised(float value, float centre, float inverse) {
    if (!CENTRED) return value * inverse;
    return sizeof(T) == 2 ? fmaf(value, inverse, -centre * inverse) : (value - centre) * inverse;
  }

  // The reciprocal of the deviation of relative elements.
  __device__ float inverse_deviation(float squares) const { return rsqrtf(squares * inverse_width + epsilon); }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const RowState<ITEMS>& row_state, Parameters& parameters, const RowCoord& coord,
                         const Found& found) const {
    float centre, squares;
    moments(found, coord.columns, centre, squares);
    const float inverse = inverse_deviation(squares) * (CENTRED ? 1.f : unit);
    const float shift = kKeepsCentred<Source, ITEMS> ? (row_state.from - centre) * inverse : 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const bool there = coord.has(item);
      const int64_t at = coord.at(item);
      float x[N], factor[N], more[N];
      parameters.read(item, coord.columns, factor, more);
      if (!kKeepsCentred<Source, ITEMS> && ITEMS > 1 && !there)
        continue;  // a branch, so that no register holds what is recomputed
      if constexpr (!kKeepsCentred<Source, ITEMS>) read<(ITEMS == 1 ? 0 : ITEMS > kMaxItems ? 2 : 1)>(source, item, x);
      if constexpr (ADDED) store_out(sum + at, rounded<T, N>(x), there);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (CENTRED && !kKeepsCentred<Source, ITEMS>) x[i] = relative(x[i], row_state.pivot);
        x[i] =
            kKeepsCentred<Source, ITEMS> ? fmaf(row_state.centred[item][i], inverse, shift) : normalised(x[i], centre, inverse);
        x[i] *= factor[i];
        if constexpr (!ADDED) x[i] += more[i];
      }
      store_out(out + at, rounded<T, N>(x), there);
    }
    if (rstd && coord.active && coord.columns.first == 0) save(coord.row, row_state.pivot, centre, inverse);
  }

  template <int ITEMS>
  __device__ void flush(const ThreadState<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void write(const Pack<T, N>& pack, int64_t row, int column, const ParameterRow<T>& factors,
                        const ParameterRow<T>& shifts, float pivot, float centre, float inverse) const {
    float values[N], factor[N], shift[N];
    widen(pack, values);
    factors.template read<N>(column, scale_offset, 1.f, factor);
    if constexpr (!ADDED) shifts.template read<N>(column, 0.f, 0.f, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = (CENTRED ? relative(values[i], pivot) - centre : values[i]) * inverse * factor[i];
      if constexpr (!ADDED) values[i] += shift[i];
    }
    store<T, N>(out + row * width + column, rounded<T, N>(values));
  }

  __device__ void save(int64_t row, float pivot, float centre, float inverse) const {
    if (CENTRED) mean[row] = pivot + centre / unit;
    rstd[row] = CENTRED ? inverse * unit : inverse;
  }

  __device__ void multipass(int64_t row, Reducer& reducer) const {
    const T* from = ADDED ? sum + row * width : x + row * width;
    float centre = 0.f, squares = 0.f;
    const float pivot = CENTRED ? pivot_of(row) : 0.f;
    if constexpr (CENTRED) {
      float total = 0.f;
      for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        const Pack<T, N> pack = load<T, N>(from + column);
#pragma unroll
        for (int i = 0; i < N; ++i) total += relative(to_float(pack.data[i]), pivot);
      }
      centre = reducer.template all<Add>(total) * inverse_width;
    }
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      if constexpr (ADDED) {
        // Every thread reads back only what it wrote itself.
        float values[N], residuals[N];
        widen(load<T, N>(x + row * width + column), values);
        widen(load<T, N>(residual + row * width + column), residuals);
        add(values, residuals);
        store<T, N>(sum + row * width + column, rounded<T, N>(values));
      }
      const Pack<T, N> pack = load<T, N>(from + column);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float centred = relative(to_float(pack.data[i]), pivot) - centre;
        squares += centred * centred;
      }
    }
    const float inverse = inverse_deviation(reducer.template all<Add>(squares)) * (CENTRED ? 1.f : unit);
    const ParameterRow<T> factors = scale.row(row, rows_per_batch), shifts = offset.row(row, rows_per_batch);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      write(load<T, N>(from + column), row, column, factors, shifts, pivot, centre, inverse);
    }
    if (rstd && threadIdx.x == 0) save(row, pivot, centre, inverse);
  }
};

// d_x, and one partial sum of the parameters' gradients per worker; the rows of a group share one row of the parameters. If
// ADDED, x is the sum that forward returned, and d_x the gradient of both addends.
template <typename T_, int N_, bool CENTRED, bool ADDED>
struct Backward {
  using T = T_;
  static constexpr int N = N_;
  const T* x;
  Parameter<T> scale;
  const float* mean;  // null unless CENTRED
  const float* rstd;
  const T* grad;
  const T* grad_sum;  // null unless ADDED
  T* d_x;
  float* d_scale;  // [groups, partials, width], null if not requested
  float* d_offset;
  int64_t rows_per_batch;
  int width;
  float inverse_width, scale_offset;

  // Whether the mean of normalised rows, which the saved mean's rounding leaves, is taken out. Elements of two bytes are further
  // apart than a mean in float32 can be off.
  static constexpr bool kCentresAgain = CENTRED && sizeof(T) == 4;
  static constexpr int kStreams = ADDED ? 3 : 2, kFound = CENTRED ? kCentresAgain ? 3 : 2 : 1;
  static constexpr bool kFlushes = true;
  static constexpr RowPath kPath = RowPath::kPipelined;
  static constexpr int kMaxClusterItems = 0;
  static constexpr bool kFullRows = false, kPlainRows = false;
  static constexpr int maxnreg(int items) { return items * N > 16 ? 128 : items > 2 ? 104 : items * N > 8 ? 80 : 64; }
  static constexpr int kClusterMaxnreg = maxnreg(kMaxItems);
  template <int ITEMS>
  struct ThreadState {
    float factor[ITEMS][N];                                           // scale + scale_offset
    float scale[ITEMS * N] = {}, offset[ADDED ? 1 : ITEMS * N] = {};  // sums of gradients
  };
  template <int ITEMS>
  struct RowState {
    // Whether a thread's normalised x stays in registers from `measure` to `finish`.
    static constexpr bool kHolds = ITEMS == 1;
    float mean, rstd;
    float normalised[kHolds ? N : 1];
  };

  __device__ const T* stream(int which) const { return which == 0 ? x : which == 1 ? grad : grad_sum; }

  template <int ITEMS>
  __device__ void begin(ThreadState<ITEMS>& state, int64_t group, const Columns& columns) const {
    read_columns(state.factor, scale.member(group), columns, scale_offset, 1.f);
  }

  template <int ITEMS>
  __device__ RowState<ITEMS> row_state(const RowCoord& coord) const {
    RowState<ITEMS> row_state;
    row_state.mean = CENTRED && coord.active ? mean[coord.row] : 0.f, row_state.rstd = coord.active ? rstd[coord.row] : 0.f;
    return row_state;
  }

  __device__ static float normalise(float value, float centre, float inverse) {
    return (CENTRED ? value - centre : value) * inverse;
  }

  // If ADDED, `result` holds the gradient of the sum that bypasses the norm.
  __device__ void write(float (&result)[N], const float (&normalised)[N], const float (&grads)[N], int64_t at,
                        const float (&factor)[N], float inverse, float dot, float sum, bool there = true) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float through = CENTRED ? fmaf(normalised[i], -dot * inverse, -sum * inverse) : normalised[i] * (-dot * inverse);
      const float value = fmaf(grads[i] * factor[i], inverse, through);
      result[i] = ADDED ? result[i] + value : value;
    }
    store_out(d_x + at, rounded<T, N>(result), there);
  }

  template <int ITEMS, Span SPAN>
  __device__ void measure(const SharedRow<T, N, ITEMS> (&rows)[1], RowState<ITEMS> (&row_states)[1], ThreadState<ITEMS>& state,
                          const Columns& columns, Reducer& reducer, float (&founds)[1][kFound]) const {
    const SharedRow<T, N, ITEMS>& slots = rows[0];
    RowState<ITEMS>& row_state = row_states[0];
    float (&found)[kFound] = founds[0];
#pragma unroll
    for (int k = 0; k < kFound; ++k) found[k] = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      float values[N], grads[N];
      slots.read(0, item, values);
      slots.read(1, item, grads);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int at = item * N + i;
        const float normalised = normalise(values[i], row_state.mean, row_state.rstd), of_scale = grads[i] * normalised;
        if constexpr (RowState<ITEMS>::kHolds) row_state.normalised[i] = normalised;
        state.scale[at] += of_scale;
        if constexpr (!ADDED) state.offset[at] += grads[i];
        found[0] += of_scale * state.factor[item][i];
        if constexpr (CENTRED) found[1] += grads[i] * state.factor[item][i];
        if constexpr (kCentresAgain) found[2] += columns.has(item) ? normalised : 0.f;
      }
    }
    reducer.template all<Add, SPAN>(found);
  }

  template <int ITEMS, class Found>
  __device__ void finish(const SharedRow<T, N, ITEMS>& slots, const RowState<ITEMS>& row_state, ThreadState<ITEMS>& state,
                         const RowCoord& coord, const Found& found) const {
    float dot = found.total(0) * inverse_width, rest = 0.f;
    const float sum = CENTRED ? found.total(CENTRED) * inverse_width : 0.f;
    if constexpr (kCentresAgain) {
      rest = found.total(2) * inverse_width;
      dot -= rest * sum;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const bool there = coord.has(item);
      if (ITEMS > 1 && !there) continue;
      const int64_t at = coord.at(item);
      float normalised[N], grads[N], result[N];
      slots.read(1, item, grads);
      if constexpr (ADDED) slots.read(2, item, result);
      if constexpr (!RowState<ITEMS>::kHolds) slots.read(0, item, normalised);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (RowState<ITEMS>::kHolds)
          normalised[i] = row_state.normalised[i];
        else
          normalised[i] = normalise(normalised[i], row_state.mean, row_state.rstd);
        if constexpr (kCentresAgain) {
          normalised[i] -= rest;
          state.scale[item * N + i] -= grads[i] * rest;
        }
      }
      write(result, normalised, grads, at, state.factor[item], row_state.rstd, dot, sum, there);
    }
  }

  template <int ITEMS>
  __device__ void flush(const ThreadState<ITEMS>& state, int64_t worker, const Columns& columns, float* sums) const {
    put<ITEMS>(d_scale, state.scale, worker, columns, sums);
    if constexpr (!ADDED) put<ITEMS>(d_offset, state.offset, worker, columns, sums);
  }

  // `sums`, as large as one row of every stream, is [blockDim.y, ITEMS * blockDim.x * N] if blockDim.y > 1.
  template <int ITEMS>
  __device__ void put(float* to, const float (&sum)[ITEMS * N], int64_t worker, const Columns& columns, float* sums) const {
    if (!to) return;
    const int slots = ITEMS * blockDim.x * N;
    if (blockDim.y > 1) {
      __syncthreads();
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[threadIdx.y * slots + columns.of(item) + i] = sum[item * N + i];
      }
      __syncthreads();
      for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < width; column += blockDim.x * blockDim.y) {
        float total = 0.f;
        for (int other = 0; other < int(blockDim.y); ++other) total += sums[other * slots + column];
        to[worker * width + column] = total;
      }
    } else {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        if (!columns.has(item)) continue;
        Pack<float, N> pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.data[i] = sum[item * N + i];
        store<float, N>(to + worker * width + columns.of(item), pack);
      }
    }
  }

  // d_x only; `column_sums` computes the partial sums.
  __device__ void multipass(int64_t row, Reducer& reducer) const {
    const ParameterRow<T> factors = scale.row(row, rows_per_batch);
    const float inverse = rstd[row], centre = CENTRED ? mean[row] : 0.f;
    float sums[kFound] = {}, factor[N], values[N], grads[N];
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(x + row * width + column), values);
      widen(load<T, N>(grad + row * width + column), grads);
      factors.template read<N>(column, scale_offset, 1.f, factor);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float weighted = grads[i] * factor[i], normalised = normalise(values[i], centre, inverse);
        sums[0] += weighted * normalised;
        if constexpr (CENTRED) sums[1] += weighted;
        if constexpr (kCentresAgain) sums[2] += normalised;
      }
    }
    reducer.template all<Add>(sums);
    const float rest = kCentresAgain ? sums[kFound - 1] * inverse_width : 0.f;
    const float sum = CENTRED ? sums[CENTRED] * inverse_width : 0.f, dot = sums[0] * inverse_width - rest * sum;
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(x + row * width + column), values);
      widen(load<T, N>(grad + row * width + column), grads);
      factors.template read<N>(column, scale_offset, 1.f, factor);
      float result[N];
      if constexpr (ADDED) widen(load<T, N>(grad_sum + row * width + column), result);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = normalise(values[i], centre, inverse) - rest;
      write(result, values, grads, row * width + column, factor, inverse, dot, sum);
    }
  }
};

// The partial sums of `Backward`, one column per thread, for rows too wide for registers; centred by the saved mean alone.
template <typename T, bool CENTRED>
__global__ void column_sums(const T* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                            const T* __restrict__ grad, float* __restrict__ d_scale, float* __restrict__ d_offset, Rows split,
                            int width) {
  const int64_t tiles = (int64_t(width) + blockDim.x - 1) / blockDim.x;
  const int64_t worker = blockIdx.x / tiles;
  const int64_t column = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int64_t first = worker / split.workers * split.rows_per_group;
  float sum_scale = 0.f, sum_offset = 0.f;
  for (int64_t row = first + worker % split.workers; row < first + split.rows_per_group; row += split.workers) {
    const float g = to_float(grad[row * width + column]), value = to_float(x[row * width + column]);
    sum_scale += g * (CENTRED ? value - mean[row] : value) * rstd[row];
    sum_offset += g;
  }
  if (d_scale) d_scale[worker * width + column] = sum_scale;
  if (d_offset) d_offset[worker * width + column] = sum_offset;
}

}  // namespace ejkernel::norm
