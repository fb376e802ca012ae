// Kernels over rows [rows, width], with an Op as the computation.
//
// Members of an Op. T, N: elements of a vector access; `width`; kStreams: number of input arrays, `stream` returns each.
// RowState<ITEMS> and `row_state`: a thread's state of one row. ThreadState<ITEMS> and `begin`: a thread's state across rows;
// `with_parameters`: the same for a thread with few rows, which loads it with `prefetch`. `maxnreg`, `kClusterMaxnreg`,
// `register_rows_maxnreg`: registers per thread of each kernel. kPath: how rows reach the threads. For register rows:
// kNarrowItems, packs per thread if a warp holds whole rows; kMaxRegisterItems, the maximum elsewhere, and
// `max_register_items`, the maximum in this call. kMaxClusterItems: packs per thread of a row that a cluster holds in
// registers, 0 for no such kernels; `supports_cluster_registers`: whether they support this call; kRaggedClusters: whether
// their threads may lack packs; kClusterThreads: threads of each block, 0 for any number. kFullRows: whether other rows in
// which every thread has all packs have their own kernels; kPlainRows: whether narrow ones do, for calls that are `is_plain`;
// `plain`: the equivalent Op that knows this at compile time, with `plain_rows_maxnreg`. `measure`: computes kFound statistics
// over a block's columns of each of a thread's rows; `finish`: writes those columns once all blocks' statistics exist. kFlushes
// and `flush`: work after the last row. `multipass`: processes a row of any width in several passes.
#pragma once

#include <algorithm>

#include "pack.cuh"
#include "reduce.cuh"

namespace ejkernel {

constexpr int kSmallBlock = 256;        // threads of a block of several rows
constexpr int kRegisterBlock = 128;     // the same for register rows
constexpr int kMaxItems = 4;            // packs of a row per thread
constexpr int kMinClusterThreads = 64;  // minimum threads of a block of a cluster
constexpr int kMaxStages = 8;
constexpr int64_t kMaxRows = int64_t{1} << 30;  // and as many again that are only prefetched

// The rows of `groups` groups, each distributed round-robin to `workers` workers; a worker is a block or a cluster.
struct Rows {
  int64_t rows_per_group;
  int64_t workers;
};

// Columns of a thread: item i begins at first + i * step, and exists if that is below end.
struct Columns {
  int first;
  int step;
  int end;
  int share;         // columns of a full block of a cluster
  int here;          // of this block
  bool all = false;  // whether the kernel is compiled for rows in which every thread has all its items
  __device__ int of(int item) const { return first + item * step; }
  __device__ bool has(int item) const { return all || of(item) < end; }

  // Columns of warp `warp` of the block.
  template <int N, int ITEMS>
  __device__ float of_warp(int warp) const {
    if (all || step * ITEMS == here) return 32 * N * ITEMS;
    const int begin = first - int(threadIdx.x) * N + warp * 32 * N;
    int count = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) count += min(max(end - begin - item * step, 0), 32 * N);
    return float(count);
  }

  // Columns of block `rank`.
  __device__ int count(int rank, int width) const {
    const int64_t left = width - int64_t(rank) * share;
    return int(left < 0 ? 0 : left < share ? left : share);
  }
};

// How rows of one block reach its threads: pipelined through shared memory, directly into registers, or as the config says.
// Packs of single elements are always pipelined.
enum class RowPath { kPipelined, kRegisters, kEither };

// The parameters of an Op without parameters.
struct NoParameters {
  __device__ void prefetch() const {}
};

struct RowCoord {
  int row;
  int64_t start;  // the thread's first element
  Columns columns;
  bool active;  // whether the row exists
  __device__ int64_t at(int item) const { return start + item * columns.step; }
  __device__ bool has(int item) const { return active && columns.has(item); }
};

// A thread's packs of one row of every array in shared memory; zeros outside of the array. The packs of a warp are contiguous.
template <typename T, int N, int ITEMS>
struct SharedRow {
  static constexpr bool kInRegisters = false;
  T* data;
  __device__ T* at(int stream, int item) const { return data + (stream * ITEMS + item) * 32 * N; }
  __device__ Pack<T, N> pack(int stream, int item) const { return load<T, N>(at(stream, item)); }
  template <int TIME = 0>
  __device__ void read(int stream, int item, float (&to)[N]) const {
    widen(pack(stream, item), to);
  }
};

// The same in registers.
template <typename T, int N, int ITEMS, int STREAMS>
struct RegisterRow {
  static constexpr bool kInRegisters = true;
  Pack<T, N> packs[STREAMS][ITEMS];

  template <class Op>
  __device__ void prefetch_all(const Op& op, const RowCoord& coord) {
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) packs[stream][item] = load<T, N>(op.stream(stream) + coord.at(item));
    }
  }

  // The same with a bounds check.
  template <class Op>
  __device__ void prefetch(const Op& op, const RowCoord& coord) {
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        packs[stream][item] = load_pack_predicated<T, N>(op.stream(stream) + coord.at(item), coord.has(item));
      }
    }
  }

  __device__ const Pack<T, N>& pack(int stream, int item) const { return packs[stream][item]; }
  // A second and third conversion: packs take half the registers of the floats that the compiler would keep from the first.
  template <int TIME = 0>
  __device__ void read(int stream, int item, float (&to)[N]) const {
    if constexpr (TIME == 0) {
      widen(pack(stream, item), to);
    } else {
      widen_again<TIME>(pack(stream, item), to);
    }
  }
};

// Columns of the `thread`-th of `threads` threads of a row.
template <int N>
__device__ inline Columns columns_of_threads(int width, int thread, int threads) {
  return {thread * N, threads * N, width, width, width};
}

// Columns of block `rank` of a cluster that shares a row evenly.
template <int N>
__device__ inline Columns columns_of_block(int width, int cluster, int rank) {
  if (cluster == 1) return columns_of_threads<N>(width, int(threadIdx.x), int(blockDim.x));
  const int share = ((width + N - 1) / N + cluster - 1) / cluster * N;
  const int64_t begin = min(int64_t(rank) * share, int64_t(width)), end = min(begin + share, int64_t(width));
  return {int(begin) + int(threadIdx.x) * N, int(blockDim.x) * N, int(end), share, int(end - begin)};
}

// A ring buffer of rows in shared memory: a thread's own packs, ITEMS of each array. The thread loads them itself, so that no
// thread waits for another one's loads.
template <class Op, int ITEMS>
struct Ring {
  using T = typename Op::T;
  static constexpr int N = Op::N, kPacks = Op::kStreams * ITEMS;
  const Op& op;
  T* first;
  int threads;  // of the block

  __device__ Ring(const Op& op, T* memory) : op(op), threads(int(blockDim.x * blockDim.y)) {
    const int linear = int(threadIdx.y * blockDim.x + threadIdx.x);
    first = memory + (linear / 32 * 32 * kPacks + linear % 32) * N;
  }

  __device__ SharedRow<T, N, ITEMS> slots(int stage) const { return {first + stage * threads * kPacks * N}; }

  __device__ void fetch(const RowCoord& coord, int stage) const {
    const SharedRow<T, N, ITEMS> to = slots(stage);
#pragma unroll
    for (int stream = 0; stream < Op::kStreams; ++stream) {
      const T* from = op.stream(stream) + coord.start;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item, from += coord.columns.step) {
        cp_async_pack<T, N>(to.at(stream, item), from, coord.has(item));
      }
    }
    cp_async_commit_group();
  }
};

// Coordinate of a row, which may lie past the worker's end.
template <class Op>
__device__ inline RowCoord row_coord(const Op& op, int row, int end, const Columns& columns) {
  return {row, int64_t(uint64_t(uint32_t(row)) * uint32_t(op.width)) + columns.first, columns, row < end};
}

// Pipelined rows, ITEMS packs per thread: `stages` rows in shared memory, so that loads overlap the reduction of a row.
template <class Op, int ITEMS>
__global__ void __maxnreg__(Op::maxnreg(ITEMS)) pipelined_rows(Op op, Rows split, int stages) {
  // Whether the next row's state is loaded before this row is finished: if registers hold both.
  constexpr bool kEarly = Op::kFlushes && ITEMS < kMaxItems;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_DYNAMIC_SHARED(typename Op::T, memory);
  Reducer reducer{scratch, int(blockDim.x)};
  // Workers and rows are counted in 32 bits: a 64-bit division takes as long as a row.
  const unsigned workers = unsigned(split.workers), group = blockIdx.x / workers;
  const int begin = int(group * split.rows_per_group), end = begin + int(split.rows_per_group);
  const int step = int(workers * blockDim.y);
  int first = begin + int((blockIdx.x - group * workers) * blockDim.y);  // of the block's rows
  const Columns columns = columns_of_block<Op::N>(op.width, 1, 0);
  const Ring<Op, ITEMS> ring(op, memory);

  const auto coord_after = [&](int steps) { return row_coord(op, first + steps * step + int(threadIdx.y), end, columns); };

  int stage = 0;
  for (; stage < stages - 1; ++stage) ring.fetch(coord_after(stage), stage);
  typename Op::template ThreadState<ITEMS> state;
  op.template begin<ITEMS>(state, group, columns);
  typename Op::template RowState<ITEMS> row_state[1] = {op.template row_state<ITEMS>(coord_after(0))};
  for (; first < end; first += step) {
    ring.fetch(coord_after(stages - 1), stage);
    cp_async_wait_group(stages - 1);
    stage = stage + 1 == stages ? 0 : stage + 1;  // the oldest stage
    const SharedRow<typename Op::T, Op::N, ITEMS> slots[1] = {ring.slots(stage)};
    float found[1][Op::kFound];
    op.template measure<ITEMS, Span::kBlock>(slots, row_state, state, columns, reducer, found);
    auto next_row_state = row_state[0];
    if constexpr (kEarly) next_row_state = op.template row_state<ITEMS>(coord_after(1));
    op.template finish<ITEMS>(slots[0], row_state[0], state, coord_after(0), BlockResult<Op::kFound>(found[0]));
    if constexpr (!kEarly) next_row_state = op.template row_state<ITEMS>(coord_after(1));
    row_state[0] = next_row_state;
  }
  cp_async_wait_group(0);
  op.template flush<ITEMS>(state, blockIdx.x, columns, reinterpret_cast<float*>(memory));
}

// The same with a cluster per row. A row is finished after the next one has been measured, so that the exchange of statistics
// overlaps; of `stages`, 2 at least, one holds the row to be finished. FULL: every thread of every block has all of its packs.
template <class Op, int ITEMS, bool FULL>
__global__ void __maxnreg__(Op::kClusterMaxnreg) cluster_rows(Op op, Rows split, int stages) {
  if (!kHasClusters) return;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_SHARED(float, slots, Exchange<Op::kFound>::kSlots);
  EJKERNEL_SHARED(ClusterMbarrier, mbarriers, kClusterMbarriers);
  EJKERNEL_DYNAMIC_SHARED(typename Op::T, memory);
  const int size = int(cluster_size());
  Reducer reducer{scratch, int(blockDim.x)};
  Exchange<Op::kFound> exchange{slots, mbarriers, size};
  const unsigned workers = unsigned(split.workers), worker = blockIdx.x / unsigned(size), group = worker / workers;
  const int begin = int(group * split.rows_per_group), end = begin + int(split.rows_per_group), step = int(workers);
  int row = begin + int(worker - group * workers);
  Columns columns = columns_of_block<Op::N>(op.width, size, int(cluster_rank()));
  columns.all = FULL;
  const Ring<Op, ITEMS> ring(op, memory);
  const auto coord_after = [&](int steps) { return row_coord(op, row + steps * step, end, columns); };

  int newest = 0;
  for (; newest < stages - 2; ++newest) ring.fetch(coord_after(newest), newest);
  typename Op::template ThreadState<ITEMS> state;
  op.template begin<ITEMS>(state, group, columns);
  typename Op::template RowState<ITEMS> row_state[1] = {op.template row_state<ITEMS>(coord_after(0))};
  if (threadIdx.x == 0) {
    for (int index = 0; index < kClusterMbarriers; ++index) cluster_mbarrier_init(mbarriers + index);
  }
  cluster_arrive();
  cluster_wait();            // every block has started, so that its shared memory is accessible
  int stage = 0, last = -1;  // stages of the row to measure, and of the one before
  auto last_row_state = row_state[0];
  for (; row < end || last >= 0; row += step) {
    ring.fetch(coord_after(stages - 2), newest);
    newest = newest + 1 == stages ? 0 : newest + 1;
    cp_async_wait_group(stages - 2);
    if (row < end) {
      const SharedRow<typename Op::T, Op::N, ITEMS> slots[1] = {ring.slots(stage)};
      float found[1][Op::kFound];
      op.template measure<ITEMS, Span::kCluster>(slots, row_state, state, columns, reducer, found);
      exchange.send(found[0]);
    }
    const auto next_row_state = op.template row_state<ITEMS>(coord_after(1));
    if (last >= 0) op.template finish<ITEMS>(ring.slots(last), last_row_state, state, coord_after(-1), exchange.receive());
    last = row < end ? stage : -1;
    stage = stage + 1 == stages ? 0 : stage + 1;
    last_row_state = row_state[0];
    row_state[0] = next_row_state;
  }
  cp_async_wait_group(0);
  op.template flush<ITEMS>(state, worker, columns, reinterpret_cast<float*>(memory));
}

// Rows of a thread whose loads are in flight together, if a warp holds whole rows: with more, the first blocks of a launch
// would start to write later.
template <int ITEMS>
constexpr int kRowsInFlight = ITEMS == 1 ? 2 : 1;

// Rows of a block of `register_rows`: in parallel, and in all.
template <int LANES>
constexpr int kParallelRows = LANES ? kRegisterBlock / std::max(LANES, 1) : 1;
template <int ITEMS, int LANES>
constexpr int kRowsPerBlock = LANES ? kParallelRows<LANES> * kRowsInFlight<ITEMS> : 1;

// Process rows whose loads have been issued.
template <int ITEMS, Span SPAN, class Op, int ROWS, class Source, class Parameters>
__device__ inline void process_rows(const Op& op, const Source (&row_data)[ROWS], const RowCoord (&coords)[ROWS],
                                    Parameters& parameters, const Columns& columns, Reducer& reducer) {
  typename Op::template RowState<ITEMS> row_states[ROWS];
  float found[ROWS][Op::kFound];
#pragma unroll
  for (int at = 0; at < ROWS; ++at) row_states[at] = op.template row_state<ITEMS>(coords[at]);
  op.template measure<ITEMS, SPAN>(row_data, row_states, parameters, columns, reducer, found);
#pragma unroll
  for (int at = 0; at < ROWS; ++at) {
    op.template finish<ITEMS>(row_data[at], row_states[at], parameters, coords[at], BlockResult<Op::kFound>(found[at]));
  }
}

// Rows of a plain call that LANES threads hold whole, each with all of its ITEMS packs; at least as many rows as a block takes.
// Little work precedes the first load, when memory is idle: the last block starts early enough to have all of its rows, and
// rewrites some of another block's with the same values.
template <class Op, int ITEMS, int LANES>
__global__ void __maxnreg__(Op::plain_rows_maxnreg(ITEMS)) plain_rows(Op op, int rows) {
  constexpr int kRowStride = kParallelRows<LANES>, kAll = kRowsPerBlock<ITEMS, LANES>, ROWS = kAll / kRowStride;
  constexpr int kWidth = ITEMS * LANES * Op::N;
  EJKERNEL_SHARED(float, scratch, 1);
  Reducer reducer{scratch, LANES};
  const int first = min(int(blockIdx.x) * kAll, rows - kAll) + int(threadIdx.x / LANES);
  Columns columns = columns_of_threads<Op::N>(kWidth, int(threadIdx.x % LANES), LANES);
  columns.all = true;
  const int64_t start = int64_t(uint64_t(uint32_t(first)) * kWidth) + columns.first;
  op.template with_parameters<ITEMS>(0, columns, [&](auto&& parameters) {
    RegisterRow<typename Op::T, Op::N, ITEMS, Op::kStreams> row_data[ROWS];
    RowCoord coords[ROWS];
#pragma unroll
    for (int at = 0; at < ROWS; ++at) {
      coords[at] = {first + at * kRowStride, start + at * kRowStride * kWidth, columns, true};
      row_data[at].prefetch_all(op, coords[at]);
    }
    parameters.prefetch();
    process_rows<ITEMS, Span::kWarp>(op, row_data, coords, parameters, columns, reducer);
  });
}

// Register rows: ITEMS packs per thread, held by LANES threads or, if that is 0, by the block; unless FULL is 0, exactly FULL
// threads, each with all of its packs. A block exits after its few rows: many resident blocks that start and end at different
// times keep memory busy.
template <class Op, int ITEMS, int LANES, int FULL = 0>
__global__ void __maxnreg__(Op::register_rows_maxnreg(ITEMS, LANES)) register_rows(Op op, Rows split) {
  static_assert(LANES == 0 || FULL == 0);
  constexpr int kRowStride = kParallelRows<LANES>, ROWS = kRowsPerBlock<ITEMS, LANES> / kRowStride, kValues = ROWS * Op::kFound;
  constexpr Span SPAN = LANES ? Span::kWarp : Span::kWarps;
  static_assert(Op::kPath != RowPath::kPipelined);
  EJKERNEL_SHARED(float, scratch, LANES ? 1 : kScratch<kValues>);
  const int threads = LANES ? LANES : FULL ? FULL : int(blockDim.x);  // of a row
  Reducer reducer{scratch, threads, kValues};
  // The grid axis that may exceed 2^16 has workers or, if the launch swapped them, groups.
  const bool swapped = gridDim.x != unsigned(split.workers);
  const int64_t group = swapped ? blockIdx.x : blockIdx.y;
  const int begin = int(group * split.rows_per_group), end = begin + int(split.rows_per_group);
  const int worker = int(swapped ? blockIdx.y : blockIdx.x), parallel_row = LANES ? int(threadIdx.x) / threads : 0;
  const int first = begin + worker * (kRowStride * ROWS) + parallel_row;
  Columns columns = columns_of_threads<Op::N>(op.width, int(threadIdx.x) - parallel_row * threads, threads);
  columns.all = FULL > 0;
  op.template with_parameters<ITEMS>(group, columns, [&](auto&& parameters) {
    RegisterRow<typename Op::T, Op::N, ITEMS, Op::kStreams> row_data[ROWS];
    RowCoord coords[ROWS];
    const int64_t start = row_coord(op, first, end, columns).start;
#pragma unroll
    for (int at = 0; at < ROWS; ++at) {
      const int row = first + at * kRowStride;
      coords[at] = {row, start + at * kRowStride * int64_t(op.width), columns, (FULL > 0 && LANES == 0) || row < end};
      row_data[at].prefetch(op, coords[at]);
    }
    parameters.prefetch();  // without a branch before: the compiler waits for rows before what follows a branch
    process_rows<ITEMS, SPAN>(op, row_data, coords, parameters, columns, reducer);
  });
}

// Register rows with a cluster per row: a block holds a share of one row in registers and exits. All its THREADS, or as many as
// are launched if that is 0, have all of their packs, unless the Op allows ragged clusters: then blocks that lack some take
// another path, as predicated loads cost a quarter of the time.
template <class Op, int ITEMS, int THREADS>
__global__ void __maxnreg__(Op::register_rows_maxnreg(ITEMS, 0)) cluster_register_rows(Op op, Rows split) {
  if (!kHasClusters) return;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_SHARED(float, slots, Exchange<Op::kFound>::kSlots);
  EJKERNEL_SHARED(ClusterMbarrier, mbarriers, kClusterMbarriers);
  if (threadIdx.x == 0) cluster_mbarrier_init(mbarriers);  // the only one: for a single row
  cluster_arrive();
  const int threads = THREADS ? THREADS : int(blockDim.x), rank = int(cluster_rank()), share = threads * ITEMS * Op::N;
  Reducer reducer{scratch, threads};
  Exchange<Op::kFound> exchange{slots, mbarriers, int(cluster_size())};
  const int64_t group = blockIdx.y;
  const int row = int(group * split.rows_per_group + cluster_index());
  const auto work = [&](auto all) {
    Columns columns = columns_of_threads<Op::N>(op.width, int(threadIdx.x), threads);
    columns.first += rank * share, columns.share = share;
    columns.here = columns.count(rank, op.width), columns.all = all;
    const RowCoord coord = row_coord(op, row, row + 1, columns);
    op.template with_parameters<ITEMS>(group, columns, [&](auto&& parameters) {
      RegisterRow<typename Op::T, Op::N, ITEMS, Op::kStreams> row_data[1];
      row_data[0].prefetch(op, coord);
      parameters.prefetch();
      typename Op::template RowState<ITEMS> row_states[1] = {op.template row_state<ITEMS>(coord)};
      float found[1][Op::kFound];
      op.template measure<ITEMS, Span::kCluster>(row_data, row_states, parameters, columns, reducer, found);
      cluster_wait();  // every block has started, so that its shared memory is accessible
      exchange.send(found[0]);
      op.template finish<ITEMS>(row_data[0], row_states[0], parameters, coord, exchange.receive());
    });
  };
  if (!Op::kRaggedClusters || (rank + 1) * share <= op.width)
    work(std::true_type{});
  else if constexpr (Op::kRaggedClusters)
    work(std::false_type{});
}

template <class Op>
__global__ void __launch_bounds__(kMaxThreads) multipass_rows(Op op, int64_t rows) {
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  Reducer reducer{scratch, int(blockDim.x)};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) op.multipass(row, reducer);
}

}  // namespace ejkernel
