// Kernels over rows [rows, width], whatever is done with a row.
//
// An Op says what is done. Its members: T, N (elements of an access), `width`; kStreams arrays that are read, `stream` each;
// Aside<ITEMS> and `aside`, what else a thread needs of a row; Kept<ITEMS>, what it keeps from row to row, and `begin`, which
// fills it; `near`, the same for a thread that has few rows; `registers`, as many as all that takes; `row`, all of the work on a row; kFlushes, whether something is left to do
// after the last one, and that, `flush`; and `walk`, the work on a row of any width, which reads it more than once.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

namespace ejkernel {

constexpr int kSmallBlock = 256;  // threads of a block of several rows
constexpr int kMaxItems = 4;      // packs of a row per thread
constexpr int kMaxStages = 8;
constexpr int64_t kMaxRows = int64_t{1} << 30;  // and as many again that are only asked for

// The rows of `groups` groups, each dealt out to `parts` workers in turn; a worker is a block or a cluster of blocks.
struct Walk {
  int64_t rows_per_group;
  int64_t parts;
};

// Columns of a thread: item i begins at first + i * step, and is there if that is below end.
struct Columns {
  int first;
  int step;
  int end;
  int share;  // columns of a block of a cluster
  __device__ int of(int item) const { return first + item * step; }
  __device__ bool has(int item) const { return of(item) < end; }

  // How many block `rank` has.
  __device__ int count(int rank, int width) const {
    const int64_t left = width - int64_t(rank) * share;
    return int(left < 0 ? 0 : left < share ? left : share);
  }
};

struct Place {
  int row;
  int64_t start;  // its first element
  Columns columns;
  bool active;  // whether there is such a row
};

// A thread's packs of one row of every array, in shared memory; zeros where there is no such column or row. Those of a warp lie
// together.
template <typename T, int N, int ITEMS>
struct Slots {
  T* data;
  __device__ T* at(int stream, int item) const { return data + (stream * ITEMS + item) * 32 * N; }
  __device__ void read(int stream, int item, float (&to)[N]) const { widen(load<T, N>(at(stream, item)), to); }
};

// The same in registers.
template <typename T, int N, int ITEMS, int STREAMS>
struct Held {
  Pack<T, N> packs[STREAMS][ITEMS];
  __device__ void read(int stream, int item, float (&to)[N]) const { widen(packs[stream][item], to); }
};

// Columns of block `rank` of a cluster that shares a row in equal parts.
template <int N>
__device__ inline Columns columns_of_block(int width, int cluster, int rank) {
  const int share = ((width + N - 1) / N + cluster - 1) / cluster * N;
  const int64_t begin = int64_t(rank) * share;
  return {int(begin < width ? begin : width) + int(threadIdx.x) * N, int(blockDim.x) * N,
          int(begin + share < width ? begin + share : width), share};
}

// ITEMS packs of a row per thread. Every thread copies its own packs of the rows to come into shared memory, `stages` rows in
// all, so that memory stays busy while a row is reduced, and no thread waits for what another one copies.
template <class Op, int ITEMS, bool CLUSTER>
__global__ void __maxnreg__(Op::registers(ITEMS)) streamed_rows(Op op, Walk walk, int stages) {
  using T = typename Op::T;
  constexpr int N = Op::N;
  EJKERNEL_SHARED(float, scratch, kScratch);
  EJKERNEL_SHARED(Mailbox, mailboxes, kMailboxes);
  EJKERNEL_SHARED_REST(T, ring);
  const int size = CLUSTER ? int(cluster_size()) : 1, rank = CLUSTER ? int(cluster_rank()) : 0;
  Reducer<CLUSTER> reducer{scratch, mailboxes, int(blockDim.x), size, 0};
  const int64_t worker = blockIdx.x / size;
  const int64_t group = worker / walk.parts;
  // Rows are counted in 32 bits, for the registers.
  const int begin = int(group * walk.rows_per_group), end = begin + int(walk.rows_per_group);
  const int step = int(walk.parts * blockDim.y);
  int row = begin + int(worker % walk.parts * blockDim.y + threadIdx.y);
  const Columns columns = columns_of_block<N>(op.width, size, rank);
  const auto start_of = [&](int row) { return int64_t(uint64_t(uint32_t(row)) * uint32_t(op.width)); };
  const auto place_of = [&](int row) { return Place{row, start_of(row), columns, row < end}; };

  constexpr int kPacks = Op::kStreams * ITEMS;
  const int threads = int(blockDim.x * blockDim.y), linear = int(threadIdx.y * blockDim.x + threadIdx.x);
  T* const first_slot = ring + (linear / 32 * 32 * kPacks + linear % 32) * N;
  const auto slots_of = [&](int stage) { return Slots<T, N, ITEMS>{first_slot + stage * threads * kPacks * N}; };
  const auto fetch = [&](int row, int stage) {
    const bool active = row < end;
    const Slots<T, N, ITEMS> slots = slots_of(stage);
    const int64_t start = start_of(row);
#pragma unroll
    for (int stream = 0; stream < Op::kStreams; ++stream) {
      const T* from = op.stream(stream) + start;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        copy_ahead<T, N>(slots.at(stream, item), from + columns.of(item), active && columns.has(item));
      }
    }
    commit_copies();
  };

  int stage = 0;
  for (; stage < stages - 1; ++stage) fetch(row + stage * step, stage);
  typename Op::template Kept<ITEMS> kept;
  op.template begin<ITEMS>(kept, group, columns);
  auto aside = op.template aside<ITEMS>(place_of(row));
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) {
      for (int box = 0; box < kMailboxes; ++box) open_mailbox(mailboxes + box);
    }
    cluster_sync();  // every block has started, so that its shared memory can be written
  }
  // The condition is the block's first row, so that every thread takes part in every reduction.
  for (; row - int(threadIdx.y) < end; row += step) {
    fetch(row + (stages - 1) * step, stage);
    wait_for_copies(stages - 1);
    stage = stage + 1 == stages ? 0 : stage + 1;  // the oldest
    op.template row<ITEMS>(slots_of(stage), aside, kept, place_of(row), reducer);
    aside = op.template aside<ITEMS>(place_of(row + step));
  }
  wait_for_copies(0);
  op.template flush<ITEMS>(kept, worker, columns, reinterpret_cast<float*>(ring));
}

// Rows of a thread whose packs it asks for together.
template <class Op, int ITEMS>
constexpr int kAtOnce = ITEMS * Op::kStreams < 4 ? 4 / (ITEMS * Op::kStreams) : 1;

// ITEMS packs of a row per thread, read into registers. A block ends with the few rows that it was given: that many of them run
// on a processor, and start and end at different times, keeps memory busy.
template <class Op, int ITEMS>
__global__ void __maxnreg__(Op::registers(ITEMS) + (ITEMS > 2 ? 32 : 16)) direct_rows(Op op, Walk walk) {
  using T = typename Op::T;
  constexpr int N = Op::N, ROWS = kAtOnce<Op, ITEMS>;
  static_assert(!Op::kFlushes);
  EJKERNEL_SHARED(float, scratch, kScratch);
  Reducer<false> reducer{scratch, nullptr, int(blockDim.x), 1, 0};
  const int64_t group = blockIdx.x / walk.parts;
  const int begin = int(group * walk.rows_per_group), end = begin + int(walk.rows_per_group);
  const int first = begin + int(blockIdx.x % walk.parts) * int(blockDim.y) * ROWS + int(threadIdx.y);
  const Columns columns = columns_of_block<N>(op.width, 1, 0);
  Held<T, N, ITEMS, Op::kStreams> held[ROWS];
  Place places[ROWS];
#pragma unroll
  for (int at = 0; at < ROWS; ++at) {
    const int row = first + at * int(blockDim.y);
    places[at] = {row, int64_t(uint64_t(uint32_t(row)) * uint32_t(op.width)), columns, row < end};
#pragma unroll
    for (int stream = 0; stream < Op::kStreams; ++stream) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        const bool there = places[at].active && columns.has(item);
        held[at].packs[stream][item] =
            there ? load<T, N>(op.stream(stream) + places[at].start + columns.of(item)) : zeros<T, N>();
      }
    }
  }
  const auto near = op.near(group);
#pragma unroll
  for (int at = 0; at < ROWS; ++at) {
    op.template row<ITEMS>(held[at], op.template aside<ITEMS>(places[at]), near, places[at], reducer);
  }
}

template <class Op>
__global__ void __launch_bounds__(kMaxThreads) walked_rows(Op op, int64_t rows) {
  EJKERNEL_SHARED(float, scratch, kScratch);
  Reducer<false> reducer{scratch, nullptr, int(blockDim.x), 1, 0};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) op.walk(row, reducer);
}

}  // namespace ejkernel
