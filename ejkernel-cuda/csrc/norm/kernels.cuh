// Normalisation of rows: rms_norm, layer_norm where CENTRED, and add_rms_norm where ADDED, which normalises x + residual as it
// is stored. x is [batch, rows_per_batch, width]; statistics and sums are float.
#pragma once

#include "divide.cuh"
#include "rows.cuh"

namespace ejkernel::norm {

// One row of a parameter, stored as T or in float.
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
  int64_t stride;    // bytes from one batch member to the next; 0 when all share it
  bool narrow;

  __device__ ParameterRow<T> member(int64_t index) const { return {static_cast<const char*>(data) + index * stride, narrow}; }

  __device__ ParameterRow<T> row(int64_t row, int64_t rows_per_batch) const {
    int64_t within;
    return member(stride ? divide(row, rows_per_batch, within) : 0);
  }
};

// A thread's columns of one; 0 where there is no such column.
template <typename S, typename T, int N, int ITEMS>
__device__ inline void read_columns_as(float (&to)[ITEMS][N], const ParameterRow<T>& from, const Columns& columns, float more) {
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const Pack<S, N> pack =
        columns.has(item) ? load<S, N>(static_cast<const S*>(from.data) + columns.of(item)) : zeros<S, N>();
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

// out = (x - mean) * rstd * (scale + scale_offset) + offset, x being sum = x + residual where ADDED.
// PLAIN: parameters are stored in T, of which a thread keeps those of many columns from row to row as they are, if it has two bytes.
template <typename T_, int N_, bool CENTRED, bool ADDED, bool PLAIN = false>
struct Forward {
  using T = T_;
  static constexpr int N = N_;
  const T* x;
  const T* residual;  // null unless ADDED
  Parameter<T> scale, offset;
  T* out;
  T* sum;       // null unless ADDED
  float* mean;  // where CENTRED, of no use where there is no rstd
  float* rstd;  // null when not asked for
  int64_t rows_per_batch;
  int width;
  float inverse_width, epsilon, scale_offset;

  static constexpr int kStreams = ADDED ? 2 : 1, kFound = CENTRED ? 2 : 1;
  static constexpr bool kFlushes = false;
  static constexpr int registers(int items) { return items * N > 16 ? 128 : items > (CENTRED ? 1 : 2) ? 80 : 64; }
  static constexpr bool kKeepsStored = PLAIN && sizeof(T) == 2;
  static constexpr int kSharedRegisters = kKeepsStored ? (CENTRED ? 80 : 64) : registers(kMaxItems);
  // With 64, two blocks of 512 threads fit on a processor.
  static constexpr int direct_registers(int items, int lanes) {
    return CENTRED && items == 2 && lanes ? 56 : items == 2 || (ADDED && items > 2) ? 80 : 64;
  }
  static constexpr int plain_registers(int items) { return items == 1 ? 48 : direct_registers(items, 32); }
  static constexpr Ways kWays = ADDED ? Ways::kEither : Ways::kDirect;
  static constexpr int kNarrowItems = CENTRED ? 2 : 1, kMostDirect = kMaxItems, kMostShared = CENTRED || ADDED ? 0 : 8;
  static constexpr int kSharedThreads = 256;  // known when compiled: places of packs would take registers that are not there
  static constexpr bool kSharesParts = false, kWhole = CENTRED, kPlainRows = CENTRED || (sizeof(T) == 2 && !ADDED);
  int most_direct() const { return kWhole && width == 8 * kMaxThreads * N ? 8 : kMostDirect; }
  bool shares_direct() const { return true; }
  template <int ITEMS>
  struct Floats {
    float scale[ITEMS][N], offset[ADDED ? 1 : ITEMS][N];  // where ADDED, there is no offset

    __device__ void ask(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns, float on_top) {
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
  // The same as they are stored, in T. As words: a loop would hand on elements one by one.
  template <int ITEMS>
  struct Stored {
    uint4 scale[ITEMS], offset[ADDED ? 1 : ITEMS];
    float more;  // on top of scale

    __device__ void ask(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns, float on_top) {
      more = factors.data ? on_top : 1.f;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        scale[item] = words_of(factors, item, columns);
        if constexpr (!ADDED) offset[item] = words_of(shifts, item, columns);
      }
    }

    static __device__ uint4 words_of(const ParameterRow<T>& row, int item, const Columns& columns) {
      return read_words<uint4>(static_cast<const T*>(row.data) + columns.of(item), row.data && columns.has(item));
    }

    // Anew for every row: the compiler would hold floats, which take twice the registers.
    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) const {
      uint4 factors = scale[item], shifts = offset[ADDED ? 0 : item];
      hold(factors), hold(shifts);
      widen(__builtin_bit_cast(Pack<T, N>, factors), factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += more;
      if constexpr (!ADDED) widen(__builtin_bit_cast(Pack<T, N>, shifts), shift);
    }
  };
  template <int ITEMS>
  using Kept = std::conditional_t<kKeepsStored, Stored<ITEMS>, Floats<ITEMS>>;
  // The same left in memory, stored as S, for a thread that has a row in as many registers as leave room for it: kAhead items are
  // asked for before the one that is worked on, the first of them before anything waits for the row or, of many, when it is measured.
  template <typename S, int ITEMS>
  struct Near {
    static constexpr int kPart = 16 / sizeof(S), kParts = N / kPart;  // columns of a load, loads of an item
    static constexpr bool kLate = ITEMS > kMaxItems;
    static constexpr int kAhead = kLate ? (CENTRED || kParts > 1 ? 1 : 2) : CENTRED ? 0 : 1, kPlaces = std::max(kAhead, 1);
    ParameterRow<T> scale, offset;
    const Columns& columns;
    float more;  // on top of scale
    Pack<S, kPart> scales[kPlaces][kParts], offsets[kPlaces][kParts];

    __device__ Near(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns, float more)
        : scale(factors), offset(shifts), columns(columns), more(more) {}

    __device__ void ask() {
      if (!kLate) ask_first();
    }
    __device__ void ask_late() {
      if (kLate) ask_first();
    }

    __device__ void ask_first() {
#pragma unroll
      for (int item = 0; item < kAhead; ++item) ask(item);
    }

    __device__ void ask(int item) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        scales[item % kPlaces][part] = pack_of(scale, item, part);
        if constexpr (!ADDED) offsets[item % kPlaces][part] = pack_of(offset, item, part);
      }
    }

    __device__ Pack<S, kPart> pack_of(const ParameterRow<T>& row, int item, int part) const {
      const S* from = static_cast<const S*>(row.data) + columns.of(item) + part * kPart;
      return load_early<S, kPart>(from, row.data && columns.has(item));
    }

    static __device__ void widen_parts(const Pack<S, kPart> (&packs)[kParts], float (&to)[N]) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float values[kPart];
        widen(packs[part], values);
#pragma unroll
        for (int i = 0; i < kPart; ++i) to[part * kPart + i] = values[i];
      }
    }

    __device__ void read(int item, const Columns&, float (&factor)[N], float (&shift)[N]) {
      if (!kAhead) ask(item);
      const Near now = *this;
      const int next = item + kAhead;
      if (kAhead && (next < ITEMS || ITEMS == 2)) ask(next % ITEMS);  // of two items a thread has several rows
      widen_parts(now.scales[item % kPlaces], factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += more;
      if constexpr (!ADDED) widen_parts(now.offsets[item % kPlaces], shift);
    }
  };
  // The same in registers, asked for before anything waits for the row.
  template <int ITEMS>
  struct Ahead : Stored<ITEMS> {
    const ParameterRow<T>&factors, &shifts;
    const Columns& columns;
    float on_top;

    __device__ Ahead(const ParameterRow<T>& factors, const ParameterRow<T>& shifts, const Columns& columns, float on_top)
        : factors(factors), shifts(shifts), columns(columns), on_top(on_top) {}

    __device__ void ask() { Stored<ITEMS>::ask(factors, shifts, columns, on_top); }

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
  // From `measure` to `finish`, where kApart: a row's columns about the mean of the warp's, and that.
  template <int ITEMS>
  struct Aside {
    static constexpr bool kHolds = CENTRED && ITEMS <= kMaxItems;
    float apart[kHolds ? ITEMS : 1][N], from;
  };
  template <class Source, int ITEMS>
  static constexpr bool kApart = Aside<ITEMS>::kHolds && Source::kInRegisters;

  __device__ const T* stream(int which) const { return which == 0 ? x : residual; }

  // The same for a plain call, and whether it is one.
  auto plain() const
    requires(N > 1 && !PLAIN)
  {
    return __builtin_bit_cast(Forward<T, N, CENTRED, ADDED, true>, *this);
  }
  bool is_plain() const {
    return std::is_same_v<T, float> || ((!scale.data || scale.narrow) && (!offset.data || offset.narrow));
  }

  template <int ITEMS>
  __device__ void begin(Kept<ITEMS>& kept, int64_t group, const Columns& columns) const {
    kept.ask(scale.member(group), offset.member(group), columns, scale_offset);
  }

  // What a thread of a few rows needs of the parameters, which are stored alike, given to `use`.
  template <int ITEMS, class Use>
  __device__ void with_parameters(int64_t group, const Columns& columns, Use use) const {
    const ParameterRow<T> factors = scale.member(group), shifts = offset.member(group);
    const float more = factors.data ? scale_offset : 1.f;
    if (PLAIN || std::is_same_v<T, float> || factors.narrow) {
      if constexpr (ITEMS > 2) {
        use(Near<T, ITEMS>(factors, shifts, columns, more));
      } else {
        use(Ahead<ITEMS>(factors, shifts, columns, scale_offset));
      }
    } else {
      use(Near<float, ITEMS>(factors, shifts, columns, more));
    }
  }

  template <int ITEMS>
  __device__ Aside<ITEMS> aside(const Place&) const {
    return {};
  }

  // What is normalised, of T's precision.
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

  // Of each of so many rows, the mean of the block's columns and the sum of squares about it; unless CENTRED, the sum of squares.
  template <int ITEMS, Span SPAN, int ROWS, class Source, class Parameters>
  __device__ void measure(const Source (&sources)[ROWS], Aside<ITEMS> (&asides)[ROWS], Parameters& parameters,
                          const Columns& columns, Reducer& reducer, float (&found)[ROWS][kFound]) const {
    float squares[ROWS] = {}, centres[ROWS] = {};
    if constexpr (CENTRED) {
      // About the warp's own mean first, so that the warps meet once.
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
          float x[N];
          read(sources[row], item, x);
          float sum = 0.f;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sum += x[i];
            if constexpr (kApart<Source, ITEMS>) asides[row].apart[item][i] = x[i];
          }
          centres[row] += sum;
        }
      }
      if constexpr (SPAN == Span::kWarp && kApart<Source, ITEMS>) {
        if (columns.all) return join_lanes(centres, asides, reducer.threads, found);
      }
      Reducer::warp<Add>(centres, reducer.template neighbours<SPAN>());
      const bool wide = reducer.template is_wide<SPAN>();
      const float share = wide ? fast_inverse(fmaxf(columns.of_warp<N, ITEMS>(threadIdx.x / 32), 1.f)) : inverse_width;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) asides[row].from = centres[row] *= share;
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        if (CENTRED && !kApart<Source, ITEMS> && ITEMS > 1 && !columns.has(item)) continue;
        const float from = columns.has(item) ? centres[row] : 0.f;  // of which there is zero
        float x[N];
        if constexpr (!kApart<Source, ITEMS>) read<CENTRED && ITEMS != 1>(sources[row], item, x);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (kApart<Source, ITEMS>) x[i] = asides[row].apart[item][i];
          if constexpr (CENTRED) x[i] -= from;
          if constexpr (kApart<Source, ITEMS>) asides[row].apart[item][i] = x[i];
          sum += x[i] * x[i];
        }
        squares[row] += sum;
      }
    }
    if constexpr (requires { parameters.ask_late(); }) parameters.ask_late();  // on their way while threads meet
    if constexpr (CENTRED) {
      Reducer::warp<Add>(squares, reducer.template neighbours<SPAN>());
      if (reducer.template is_wide<SPAN>()) join_warps<ITEMS, SPAN>(centres, squares, columns, reducer);
    } else {
      reducer.template all<Add, SPAN>(squares);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if constexpr (CENTRED) found[row][0] = centres[row];
      found[row][CENTRED] = squares[row];
    }
  }

  // From sums of each of so many lanes' columns, which are in `asides`, to the row's mean and the sum of squares about it: each lane
  // about its own mean first, so that lanes tell each other both together (Chan et al., 1983). Each has as many columns.
  template <int ITEMS, int ROWS>
  __device__ void join_lanes(float (&sums)[ROWS], Aside<ITEMS> (&asides)[ROWS], int lanes, float (&found)[ROWS][kFound]) const {
    constexpr float kShare = 1.f / (ITEMS * N);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float mean = sums[row] * kShare;
      float squares = 0.f;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float apart = asides[row].apart[item][i] - mean;
          squares += apart * apart;
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
        const float more = __shfl_xor_sync(0xffffffffu, found[row][1], step), apart = found[row][0] - other;
        found[row][0] += other;
        found[row][1] += more + apart * share * apart;
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float mean = found[row][0] *= inverse_width;
      asides[row].from = sizeof(T) == 2 ? 0.f : mean;
      if constexpr (sizeof(T) == 2) continue;  // as `normalised` has them
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) asides[row].apart[item][i] -= mean;
      }
    }
  }

  // From means of a warp's columns and the sums of squares about them to those of the block's.
  template <int ITEMS, Span SPAN, int ROWS>
  __device__ void join_warps(float (&centres)[ROWS], float (&squares)[ROWS], const Columns& columns, Reducer& reducer) const {
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
      const float apart = both[row] - centres[row];
      squares[row] = both[ROWS + row] + apart * apart * count;
    }
    Reducer::warp<Add>(squares, warps);
  }

  // The row's mean, 0 unless CENTRED, and the sum of squares about it.
  template <class Found>
  __device__ void moments(const Found& found, const Columns& columns, float& centre, float& squares) const {
    if constexpr (CENTRED && Found::kCluster) {
      const float mean = found.of_block(0), count = float(columns.count(found.block(), width));
      centre = found.template all<Add>(mean * count) * inverse_width;
      const float apart = mean - centre;
      squares = found.template all<Add>(found.of_block(1) + apart * apart * count);
    } else {
      centre = CENTRED ? found.total(0) : 0.f, squares = found.total(CENTRED);
    }
  }

  // Of elements of two bytes by one instruction, which is wrong by 2^-24 of centre * inverse, far less than they are themselves.
  static __device__ float normalised(float value, float centre, float inverse) {
    if (!CENTRED) return value * inverse;
    return sizeof(T) == 2 ? fmaf(value, inverse, -centre * inverse) : (value - centre) * inverse;
  }

  template <int ITEMS, class Source, class Parameters, class Found>
  __device__ void finish(const Source& source, const Aside<ITEMS>& aside, Parameters& parameters, const Place& place,
                         const Found& found) const {
    float centre, squares;
    moments(found, place.columns, centre, squares);
    const float inverse = rsqrtf(squares * inverse_width + epsilon);
    const float shift = kApart<Source, ITEMS> ? (aside.from - centre) * inverse : 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const bool there = place.has(item);
      const int64_t at = place.at(item);
      float x[N], factor[N], more[N];
      parameters.read(item, place.columns, factor, more);
      if (!kApart<Source, ITEMS> && ITEMS > 1 && !there) continue;  // a branch, so that nothing is held for it that is found again
      if constexpr (!kApart<Source, ITEMS>) read<(ITEMS == 1 ? 0 : ITEMS > kMaxItems ? 2 : 1)>(source, item, x);
      if constexpr (ADDED) store_out(sum + at, rounded<T, N>(x), there);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x[i] = kApart<Source, ITEMS> ? fmaf(aside.apart[item][i], inverse, shift) : normalised(x[i], centre, inverse);
        x[i] *= factor[i];
        if constexpr (!ADDED) x[i] += more[i];
      }
      store_out(out + at, rounded<T, N>(x), there);
    }
    if (rstd && place.active && place.columns.first == 0) save(place.row, centre, inverse);
  }

  template <int ITEMS>
  __device__ void flush(const Kept<ITEMS>&, int64_t, const Columns&, float*) const {}

  __device__ void write(const Pack<T, N>& pack, int64_t row, int column, const ParameterRow<T>& factors,
                        const ParameterRow<T>& shifts, float centre, float inverse) const {
    float values[N], factor[N], shift[N];
    widen(pack, values);
    factors.template read<N>(column, scale_offset, 1.f, factor);
    if constexpr (!ADDED) shifts.template read<N>(column, 0.f, 0.f, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = (CENTRED ? values[i] - centre : values[i]) * inverse * factor[i];
      if constexpr (!ADDED) values[i] += shift[i];
    }
    store<T, N>(out + row * width + column, rounded<T, N>(values));
  }

  __device__ void save(int64_t row, float centre, float inverse) const {
    if (CENTRED) mean[row] = centre;
    rstd[row] = inverse;
  }

  __device__ void walk(int64_t row, Reducer& reducer) const {
    const T* from = ADDED ? sum + row * width : x + row * width;
    float centre = 0.f, squares = 0.f;
    if constexpr (CENTRED) {
      float total = 0.f;
      for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        const Pack<T, N> pack = load<T, N>(from + column);
#pragma unroll
        for (int i = 0; i < N; ++i) total += to_float(pack.data[i]);
      }
      centre = reducer.template all<Add>(total) * inverse_width;
    }
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      if constexpr (ADDED) {
        // Every thread reads back what it has written itself.
        float values[N], residuals[N];
        widen(load<T, N>(x + row * width + column), values);
        widen(load<T, N>(residual + row * width + column), residuals);
        add(values, residuals);
        store<T, N>(sum + row * width + column, rounded<T, N>(values));
      }
      const Pack<T, N> pack = load<T, N>(from + column);
#pragma unroll
      for (int i = 0; i < N; ++i) squares += (to_float(pack.data[i]) - centre) * (to_float(pack.data[i]) - centre);
    }
    const float inverse = rsqrtf(reducer.template all<Add>(squares) * inverse_width + epsilon);
    const ParameterRow<T> factors = scale.row(row, rows_per_batch), shifts = offset.row(row, rows_per_batch);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      write(load<T, N>(from + column), row, column, factors, shifts, centre, inverse);
    }
    if (rstd && threadIdx.x == 0) save(row, centre, inverse);
  }
};

// d_x, and for each worker one partial sum of the parameters' gradients; the rows of a group lie under one row of the
// parameters. Where ADDED, x is the sum that forward returned, and d_x the gradient of both of its terms.
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
  float* d_scale;  // [groups, parts, width], null when not asked for
  float* d_offset;
  int64_t rows_per_batch;
  int width;
  float inverse_width, scale_offset;

  static constexpr int kStreams = ADDED ? 3 : 2, kFound = CENTRED ? 2 : 1;
  static constexpr bool kFlushes = true;
  static constexpr Ways kWays = Ways::kStreamed;
  static constexpr int kMostShared = 0;
  static constexpr bool kWhole = false, kPlainRows = false;
  static constexpr int registers(int items) { return items * N > 16 ? 128 : items > 2 ? 104 : items * N > 8 ? 80 : 64; }
  static constexpr int kSharedRegisters = registers(kMaxItems);
  template <int ITEMS>
  struct Kept {
    float factor[ITEMS][N];                                           // scale + scale_offset
    float scale[ITEMS * N] = {}, offset[ADDED ? 1 : ITEMS * N] = {};  // sums of gradients
  };
  template <int ITEMS>
  struct Aside {
    // Whether a thread's normalised x stays in registers from `measure` to `finish`.
    static constexpr bool kHolds = ITEMS == 1;
    float mean, rstd;
    float normalised[kHolds ? N : 1];
  };

  __device__ const T* stream(int which) const { return which == 0 ? x : which == 1 ? grad : grad_sum; }

  template <int ITEMS>
  __device__ void begin(Kept<ITEMS>& kept, int64_t group, const Columns& columns) const {
    read_columns(kept.factor, scale.member(group), columns, scale_offset, 1.f);
  }

  template <int ITEMS>
  __device__ Aside<ITEMS> aside(const Place& place) const {
    Aside<ITEMS> aside;
    aside.mean = CENTRED && place.active ? mean[place.row] : 0.f, aside.rstd = place.active ? rstd[place.row] : 0.f;
    return aside;
  }

  // As `Forward::normalised`.
  __device__ static float normalise(float value, float centre, float inverse) {
    if (CENTRED && sizeof(T) == 2) return fmaf(value, inverse, -centre * inverse);
    return (CENTRED ? value - centre : value) * inverse;
  }

  // Where ADDED, `result` holds the gradient of the sum that did not pass through the norm.
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
  __device__ void measure(const Slots<T, N, ITEMS> (&rows)[1], Aside<ITEMS> (&asides)[1], Kept<ITEMS>& kept,
                          const Columns&, Reducer& reducer, float (&founds)[1][kFound]) const {
    const Slots<T, N, ITEMS>& slots = rows[0];
    Aside<ITEMS>& aside = asides[0];
    float(&found)[kFound] = founds[0];
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
        const float normalised = normalise(values[i], aside.mean, aside.rstd), of_scale = grads[i] * normalised;
        if constexpr (Aside<ITEMS>::kHolds) aside.normalised[i] = normalised;
        kept.scale[at] += of_scale;
        if constexpr (!ADDED) kept.offset[at] += grads[i];
        found[0] += of_scale * kept.factor[item][i];
        if constexpr (CENTRED) found[1] += grads[i] * kept.factor[item][i];
      }
    }
    reducer.template all<Add, SPAN>(found);
  }

  template <int ITEMS, class Found>
  __device__ void finish(const Slots<T, N, ITEMS>& slots, const Aside<ITEMS>& aside, const Kept<ITEMS>& kept, const Place& place,
                         const Found& found) const {
    const float dot = found.total(0) * inverse_width, sum = CENTRED ? found.total(CENTRED) * inverse_width : 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const bool there = place.has(item);
      if (ITEMS > 1 && !there) continue;
      const int64_t at = place.at(item);
      float normalised[N], grads[N], result[N];
      slots.read(1, item, grads);
      if constexpr (ADDED) slots.read(2, item, result);
      if constexpr (!Aside<ITEMS>::kHolds) slots.read(0, item, normalised);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (Aside<ITEMS>::kHolds) normalised[i] = aside.normalised[i];
        else normalised[i] = normalise(normalised[i], aside.mean, aside.rstd);
      }
      write(result, normalised, grads, at, kept.factor[item], aside.rstd, dot, sum, there);
    }
  }

  template <int ITEMS>
  __device__ void flush(const Kept<ITEMS>& kept, int64_t worker, const Columns& columns, float* sums) const {
    put<ITEMS>(d_scale, kept.scale, worker, columns, sums);
    if constexpr (!ADDED) put<ITEMS>(d_offset, kept.offset, worker, columns, sums);
  }

  // `sums`, as large as one row of every stream, takes [blockDim.y, ITEMS * blockDim.x * N] when blockDim.y > 1.
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

  // d_x alone; `column_sums` makes the partial sums.
  __device__ void walk(int64_t row, Reducer& reducer) const {
    const ParameterRow<T> factors = scale.row(row, rows_per_batch);
    const float inverse = rstd[row], centre = CENTRED ? mean[row] : 0.f;
    float sums[CENTRED ? 2 : 1] = {}, factor[N], values[N], grads[N];
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(x + row * width + column), values);
      widen(load<T, N>(grad + row * width + column), grads);
      factors.template read<N>(column, scale_offset, 1.f, factor);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float weighted = grads[i] * factor[i];
        sums[0] += weighted * normalise(values[i], centre, inverse);
        if constexpr (CENTRED) sums[1] += weighted;
      }
    }
    reducer.template all<Add>(sums);
    for (int column = threadIdx.x * N; column < width; column += blockDim.x * N) {
      widen(load<T, N>(x + row * width + column), values);
      widen(load<T, N>(grad + row * width + column), grads);
      factors.template read<N>(column, scale_offset, 1.f, factor);
      float result[N];
      if constexpr (ADDED) widen(load<T, N>(grad_sum + row * width + column), result);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = normalise(values[i], centre, inverse);
      write(result, values, grads, row * width + column, factor, inverse, sums[0] * inverse_width,
            CENTRED ? sums[CENTRED] * inverse_width : 0.f);
    }
  }
};

// The same partial sums as `Backward` writes, a column per thread; for rows too wide for registers.
template <typename T, bool CENTRED>
__global__ void column_sums(const T* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                            const T* __restrict__ grad, float* __restrict__ d_scale, float* __restrict__ d_offset, Walk walk,
                            int width) {
  const int64_t tiles = (int64_t(width) + blockDim.x - 1) / blockDim.x;
  const int64_t worker = blockIdx.x / tiles;
  const int64_t column = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int64_t first = worker / walk.parts * walk.rows_per_group;
  float sum_scale = 0.f, sum_offset = 0.f;
  for (int64_t row = first + worker % walk.parts; row < first + walk.rows_per_group; row += walk.parts) {
    const float g = to_float(grad[row * width + column]), value = to_float(x[row * width + column]);
    sum_scale += g * (CENTRED ? value - mean[row] : value) * rstd[row];
    sum_offset += g;
  }
  if (d_scale) d_scale[worker * width + column] = sum_scale;
  if (d_offset) d_offset[worker * width + column] = sum_offset;
}

}  // namespace ejkernel::norm
