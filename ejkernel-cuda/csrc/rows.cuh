// Kernels over rows [rows, width], whatever is done with a row.
//
// An Op says what is done. Its members: T, N (elements of an access), `width`; kStreams arrays that are read, `stream` each;
// Aside<ITEMS> and `aside`, what else a thread needs of a row; Kept<ITEMS>, what it keeps from row to row, and `begin`, which
// fills it; `with_parameters`, the same for a thread that has a few rows, which begins to read it with `ask`; `registers`,
// `kSharedRegisters` and `direct_registers`, as many as all that takes; kWays, and of rows in registers kNarrowItems, packs per
// thread where a warp has them whole, kMostDirect, at most elsewhere, and `most_direct`, at most in this call; kMostShared, packs
// per thread of a row that a cluster has in registers, 0 for no such kernels, `shares_direct`, whether they can take this call,
// kSharesParts, whether such rows may leave threads without packs, and kSharedThreads, of each block, 0 for any number; kWhole,
// whether other rows that leave no thread without packs have kernels of their own; kPlainRows, whether narrow ones have such kernels
// where a call `is_plain`, and `plain`, the Op that means the same then and knows so when it is compiled, with
// `plain_registers`; `measure`, which finds kFound numbers of a block's columns of each of a thread's rows, and `finish`, which
// writes those columns of a row when the numbers of all blocks are there; kFlushes, whether something is left to do after the last
// row, and that, `flush`; and `walk`, the work on a row of any width, which reads it more than once.
#pragma once

#include <algorithm>

#include "pack.cuh"
#include "reduce.cuh"

namespace ejkernel {

constexpr int kSmallBlock = 256;   // threads of a block of several rows
constexpr int kDirectBlock = 128;  // the same of one that goes straight to registers and ends
constexpr int kMaxItems = 4;       // packs of a row per thread
constexpr int kLeastShared = 64;   // threads of a block of a cluster
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
  int share;  // columns of a block of a cluster, where it has all of them
  int here;   // of this block
  bool all = false;  // whether the kernel is compiled for rows that leave no thread without any of its items
  __device__ int of(int item) const { return first + item * step; }
  __device__ bool has(int item) const { return all || of(item) < end; }

  // How many warp `warp` of the block has.
  template <int N, int ITEMS>
  __device__ float of_warp(int warp) const {
    if (all || step * ITEMS == here) return 32 * N * ITEMS;
    const int begin = first - int(threadIdx.x) * N + warp * 32 * N;
    int count = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) count += min(max(end - begin - item * step, 0), 32 * N);
    return float(count);
  }

  // How many block `rank` has.
  __device__ int count(int rank, int width) const {
    const int64_t left = width - int64_t(rank) * share;
    return int(left < 0 ? 0 : left < share ? left : share);
  }
};

// How rows that a block has whole reach its threads: through shared memory, straight to registers, or as a config says. Where packs
// are single elements, through shared memory.
enum class Ways { kStreamed, kDirect, kEither };

// What `with_parameters` gives where there are none.
struct NoParameters {
  __device__ void ask() const {}
};

struct Place {
  int row;
  int64_t start;  // the thread's first element
  Columns columns;
  bool active;  // whether there is such a row
  __device__ int64_t at(int item) const { return start + item * columns.step; }
  __device__ bool has(int item) const { return active && columns.has(item); }
};

// A thread's packs of one row of every array, in shared memory; zeros where there is no such column or row. Those of a warp lie
// together.
template <typename T, int N, int ITEMS>
struct Slots {
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
struct Held {
  static constexpr bool kInRegisters = true;
  Pack<T, N> packs[STREAMS][ITEMS];

  template <class Op>
  __device__ void ask_all(const Op& op, const Place& place) {
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) packs[stream][item] = load<T, N>(op.stream(stream) + place.at(item));
    }
  }

  // The same where some may not be there.
  template <class Op>
  __device__ void ask(const Op& op, const Place& place) {
#pragma unroll
    for (int stream = 0; stream < STREAMS; ++stream) {
#pragma unroll
      for (int item = 0; item < ITEMS; ++item) {
        packs[stream][item] = load_early<T, N>(op.stream(stream) + place.at(item), place.has(item));
      }
    }
  }

  __device__ const Pack<T, N>& pack(int stream, int item) const { return packs[stream][item]; }
  // Widened a second and a third time: packs take half the registers of floats that the compiler would hold from the first on.
  template <int TIME = 0>
  __device__ void read(int stream, int item, float (&to)[N]) const {
    if constexpr (TIME == 0) {
      widen(pack(stream, item), to);
    } else {
      widen_again<TIME>(pack(stream, item), to);
    }
  }
};

// Columns of the `thread`-th of so many threads that have a row.
template <int N>
__device__ inline Columns columns_of_threads(int width, int thread, int threads) {
  return {thread * N, threads * N, width, width, width};
}

// Columns of block `rank` of a cluster that shares a row in equal parts.
template <int N>
__device__ inline Columns columns_of_block(int width, int cluster, int rank) {
  if (cluster == 1) return columns_of_threads<N>(width, int(threadIdx.x), int(blockDim.x));
  const int share = ((width + N - 1) / N + cluster - 1) / cluster * N;
  const int64_t begin = min(int64_t(rank) * share, int64_t(width)), end = min(begin + share, int64_t(width));
  return {int(begin) + int(threadIdx.x) * N, int(blockDim.x) * N, int(end), share, int(end - begin)};
}

// A thread's own packs of the rows in shared memory, ITEMS of each array. It copies them itself, so that no thread waits for what
// another one copies.
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

  __device__ Slots<T, N, ITEMS> slots(int stage) const { return {first + stage * threads * kPacks * N}; }

  __device__ void fetch(const Place& place, int stage) const {
    const Slots<T, N, ITEMS> to = slots(stage);
#pragma unroll
    for (int stream = 0; stream < Op::kStreams; ++stream) {
      const T* from = op.stream(stream) + place.start;
#pragma unroll
      for (int item = 0; item < ITEMS; ++item, from += place.columns.step) {
        copy_ahead<T, N>(to.at(stream, item), from, place.has(item));
      }
    }
    commit_copies();
  }
};

// Of a row that a worker may not have.
template <class Op>
__device__ inline Place place_of(const Op& op, int row, int end, const Columns& columns) {
  return {row, int64_t(uint64_t(uint32_t(row)) * uint32_t(op.width)) + columns.first, columns, row < end};
}

// ITEMS packs of a row per thread. Rows are copied into shared memory ahead of the one in work, `stages` in all, so that memory
// stays busy while a row is reduced.
template <class Op, int ITEMS>
__global__ void __maxnreg__(Op::registers(ITEMS)) streamed_rows(Op op, Walk walk, int stages) {
  // Whether the aside of the next row is on its way while this one is finished: where registers hold both.
  constexpr bool kEarly = Op::kFlushes && ITEMS < kMaxItems;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_SHARED_REST(typename Op::T, memory);
  Reducer reducer{scratch, int(blockDim.x)};
  // Workers and rows are counted in 32 bits: a division of 64 takes as long as a row.
  const unsigned parts = unsigned(walk.parts), group = blockIdx.x / parts;
  const int begin = int(group * walk.rows_per_group), end = begin + int(walk.rows_per_group);
  const int step = int(parts * blockDim.y);
  int first = begin + int((blockIdx.x - group * parts) * blockDim.y);  // of the block's rows
  const Columns columns = columns_of_block<Op::N>(op.width, 1, 0);
  const Ring<Op, ITEMS> ring(op, memory);

  const auto place_after = [&](int steps) { return place_of(op, first + steps * step + int(threadIdx.y), end, columns); };

  int stage = 0;
  for (; stage < stages - 1; ++stage) ring.fetch(place_after(stage), stage);
  typename Op::template Kept<ITEMS> kept;
  op.template begin<ITEMS>(kept, group, columns);
  typename Op::template Aside<ITEMS> aside[1] = {op.template aside<ITEMS>(place_after(0))};
  for (; first < end; first += step) {
    ring.fetch(place_after(stages - 1), stage);
    wait_for_copies(stages - 1);
    stage = stage + 1 == stages ? 0 : stage + 1;  // the oldest
    const Slots<typename Op::T, Op::N, ITEMS> slots[1] = {ring.slots(stage)};
    float found[1][Op::kFound];
    op.template measure<ITEMS, Span::kBlock>(slots, aside, kept, columns, reducer, found);
    auto next_aside = aside[0];
    if constexpr (kEarly) next_aside = op.template aside<ITEMS>(place_after(1));
    op.template finish<ITEMS>(slots[0], aside[0], kept, place_after(0), Alone<Op::kFound>(found[0]));
    if constexpr (!kEarly) next_aside = op.template aside<ITEMS>(place_after(1));
    aside[0] = next_aside;
  }
  wait_for_copies(0);
  op.template flush<ITEMS>(kept, blockIdx.x, columns, reinterpret_cast<float*>(memory));
}

// The same for rows that the blocks of a cluster share. A row is finished after the next one has been measured, so that what the
// blocks tell each other is on its way meanwhile; of `stages`, 2 at least, one is for the row that is to be finished. WHOLE: all
// threads of all blocks have all of their packs.
template <class Op, int ITEMS, bool WHOLE>
__global__ void __maxnreg__(Op::kSharedRegisters) shared_rows(Op op, Walk walk, int stages) {
  if (!kHasClusters) return;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_SHARED(float, places, Exchange<Op::kFound>::kPlaces);
  EJKERNEL_SHARED(Mailbox, mailboxes, kMailboxes);
  EJKERNEL_SHARED_REST(typename Op::T, memory);
  const int size = int(cluster_size());
  Reducer reducer{scratch, int(blockDim.x)};
  Exchange<Op::kFound> exchange{places, mailboxes, size};
  const unsigned parts = unsigned(walk.parts), worker = blockIdx.x / unsigned(size), group = worker / parts;
  const int begin = int(group * walk.rows_per_group), end = begin + int(walk.rows_per_group), step = int(parts);
  int row = begin + int(worker - group * parts);
  Columns columns = columns_of_block<Op::N>(op.width, size, int(cluster_rank()));
  columns.all = WHOLE;
  const Ring<Op, ITEMS> ring(op, memory);
  const auto place_after = [&](int steps) { return place_of(op, row + steps * step, end, columns); };

  int newest = 0;
  for (; newest < stages - 2; ++newest) ring.fetch(place_after(newest), newest);
  typename Op::template Kept<ITEMS> kept;
  op.template begin<ITEMS>(kept, group, columns);
  typename Op::template Aside<ITEMS> aside[1] = {op.template aside<ITEMS>(place_after(0))};
  if (threadIdx.x == 0) {
    for (int box = 0; box < kMailboxes; ++box) open_mailbox(mailboxes + box);
  }
  cluster_arrive();
  cluster_wait();  // every block has started, so that its shared memory can be written
  int stage = 0, last = -1;  // where the row is that is measured, and the one before
  auto aside_of_last = aside[0];
  for (; row < end || last >= 0; row += step) {
    ring.fetch(place_after(stages - 2), newest);
    newest = newest + 1 == stages ? 0 : newest + 1;
    wait_for_copies(stages - 2);
    if (row < end) {
      const Slots<typename Op::T, Op::N, ITEMS> slots[1] = {ring.slots(stage)};
      float found[1][Op::kFound];
      op.template measure<ITEMS, Span::kCluster>(slots, aside, kept, columns, reducer, found);
      exchange.send(found[0]);
    }
    const auto next_aside = op.template aside<ITEMS>(place_after(1));
    if (last >= 0) op.template finish<ITEMS>(ring.slots(last), aside_of_last, kept, place_after(-1), exchange.receive());
    last = row < end ? stage : -1;
    stage = stage + 1 == stages ? 0 : stage + 1;
    aside_of_last = aside[0];
    aside[0] = next_aside;
  }
  wait_for_copies(0);
  op.template flush<ITEMS>(kept, worker, columns, reinterpret_cast<float*>(memory));
}

// Rows of a thread whose packs it asks for together, where a warp has whole rows: more of them, and the first blocks of a launch
// would begin to write later.
template <int ITEMS>
constexpr int kAtOnce = ITEMS == 1 ? 2 : 1;

// Rows of a block of `direct_rows` beside each other, and in all.
template <int LANES>
constexpr int kBeside = LANES ? kDirectBlock / std::max(LANES, 1) : 1;
template <int ITEMS, int LANES>
constexpr int kRowsOfBlock = LANES ? kBeside<LANES> * kAtOnce<ITEMS> : 1;

// What is done with rows that threads have asked for.
template <int ITEMS, Span SPAN, class Op, int ROWS, class Source, class Parameters>
__device__ inline void work_on(const Op& op, const Source (&held)[ROWS], const Place (&places)[ROWS], Parameters& parameters,
                               const Columns& columns, Reducer& reducer) {
  typename Op::template Aside<ITEMS> asides[ROWS];
  float found[ROWS][Op::kFound];
#pragma unroll
  for (int at = 0; at < ROWS; ++at) asides[at] = op.template aside<ITEMS>(places[at]);
  op.template measure<ITEMS, SPAN>(held, asides, parameters, columns, reducer, found);
#pragma unroll
  for (int at = 0; at < ROWS; ++at) {
    op.template finish<ITEMS>(held[at], asides[at], parameters, places[at], Alone<Op::kFound>(found[at]));
  }
}

// The rows of a plain call that LANES threads have whole, of which none is without any of its ITEMS packs; at least as many rows as a
// block takes. What comes before the first load, when memory has nothing to do, is little: the last block begins so much earlier
// that it has all of its rows, and writes some as another block does.
template <class Op, int ITEMS, int LANES>
__global__ void __maxnreg__(Op::plain_registers(ITEMS)) plain_rows(Op op, int rows) {
  constexpr int kApart = kBeside<LANES>, kAll = kRowsOfBlock<ITEMS, LANES>, ROWS = kAll / kApart;
  constexpr int kWidth = ITEMS * LANES * Op::N;
  EJKERNEL_SHARED(float, scratch, 1);
  Reducer reducer{scratch, LANES};
  const int first = min(int(blockIdx.x) * kAll, rows - kAll) + int(threadIdx.x / LANES);
  Columns columns = columns_of_threads<Op::N>(kWidth, int(threadIdx.x % LANES), LANES);
  columns.all = true;
  const int64_t start = int64_t(uint64_t(uint32_t(first)) * kWidth) + columns.first;
  op.template with_parameters<ITEMS>(0, columns, [&](auto&& parameters) {
    Held<typename Op::T, Op::N, ITEMS, Op::kStreams> held[ROWS];
    Place places[ROWS];
#pragma unroll
    for (int at = 0; at < ROWS; ++at) {
      places[at] = {first + at * kApart, start + at * kApart * kWidth, columns, true};
      held[at].ask_all(op, places[at]);
    }
    parameters.ask();
    work_on<ITEMS, Span::kWarp>(op, held, places, parameters, columns, reducer);
  });
}

// ITEMS packs of a row per thread, read into registers; LANES threads have a row, or where that is 0 the block: of WHOLE threads then
// all have all of their packs, unless that is 0. A block ends with the few rows that it was given: that many of them run on a
// processor, and start and end at different times, keeps memory busy.
template <class Op, int ITEMS, int LANES, int WHOLE = 0>
__global__ void __maxnreg__(Op::direct_registers(ITEMS, LANES)) direct_rows(Op op, Walk walk) {
  static_assert(LANES == 0 || WHOLE == 0);
  constexpr int kApart = kBeside<LANES>, ROWS = kRowsOfBlock<ITEMS, LANES> / kApart, kValues = ROWS * Op::kFound;
  constexpr Span SPAN = LANES ? Span::kWarp : Span::kWarps;
  static_assert(Op::kWays != Ways::kStreamed);
  EJKERNEL_SHARED(float, scratch, LANES ? 1 : kScratch<kValues>);
  const int threads = LANES ? LANES : WHOLE ? WHOLE : int(blockDim.x);  // of a row
  Reducer reducer{scratch, threads, kValues};
  // The axis of a grid that goes beyond 2^16 has parts or, where the launch turned them, groups.
  const bool turned = gridDim.x != unsigned(walk.parts);
  const int64_t group = turned ? blockIdx.x : blockIdx.y;
  const int begin = int(group * walk.rows_per_group), end = begin + int(walk.rows_per_group);
  const int part = int(turned ? blockIdx.y : blockIdx.x), beside = LANES ? int(threadIdx.x) / threads : 0;
  const int first = begin + part * (kApart * ROWS) + beside;
  Columns columns = columns_of_threads<Op::N>(op.width, int(threadIdx.x) - beside * threads, threads);
  columns.all = WHOLE > 0;
  op.template with_parameters<ITEMS>(group, columns, [&](auto&& parameters) {
    Held<typename Op::T, Op::N, ITEMS, Op::kStreams> held[ROWS];
    Place places[ROWS];
    const int64_t start = place_of(op, first, end, columns).start;
#pragma unroll
    for (int at = 0; at < ROWS; ++at) {
      const int row = first + at * kApart;
      places[at] = {row, start + at * kApart * int64_t(op.width), columns, (WHOLE > 0 && LANES == 0) || row < end};
      held[at].ask(op, places[at]);
    }
    parameters.ask();  // with no branch before: the compiler waits for rows in front of what comes after one
    work_on<ITEMS, SPAN>(op, held, places, parameters, columns, reducer);
  });
}

// The same for rows that a cluster of blocks shares: a block has a part of one row in registers and ends with it. Its THREADS, or as
// many as are launched where that is 0, all have all of their packs unless the Op shares parts: then blocks that lack some take
// another path, as loads that may not happen cost a quarter of the time.
template <class Op, int ITEMS, int THREADS>
__global__ void __maxnreg__(Op::direct_registers(ITEMS, 0)) direct_shared_rows(Op op, Walk walk) {
  if (!kHasClusters) return;
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  EJKERNEL_SHARED(float, places, Exchange<Op::kFound>::kPlaces);
  EJKERNEL_SHARED(Mailbox, mailboxes, kMailboxes);
  if (threadIdx.x == 0) open_mailbox(mailboxes);  // the only one: of one row
  cluster_arrive();
  const int threads = THREADS ? THREADS : int(blockDim.x), rank = int(cluster_rank()), share = threads * ITEMS * Op::N;
  Reducer reducer{scratch, threads};
  Exchange<Op::kFound> exchange{places, mailboxes, int(cluster_size())};
  const int64_t group = blockIdx.y;
  const int row = int(group * walk.rows_per_group + cluster_index());
  const auto work = [&](auto all) {
    Columns columns = columns_of_threads<Op::N>(op.width, int(threadIdx.x), threads);
    columns.first += rank * share, columns.share = share;
    columns.here = columns.count(rank, op.width), columns.all = all;
    const Place place = place_of(op, row, row + 1, columns);
    op.template with_parameters<ITEMS>(group, columns, [&](auto&& parameters) {
      Held<typename Op::T, Op::N, ITEMS, Op::kStreams> held[1];
      held[0].ask(op, place);
      parameters.ask();
      typename Op::template Aside<ITEMS> asides[1] = {op.template aside<ITEMS>(place)};
      float found[1][Op::kFound];
      op.template measure<ITEMS, Span::kCluster>(held, asides, parameters, columns, reducer, found);
      cluster_wait();  // every block has started, so that its shared memory can be written
      exchange.send(found[0]);
      op.template finish<ITEMS>(held[0], asides[0], parameters, place, exchange.receive());
    });
  };
  if (!Op::kSharesParts || (rank + 1) * share <= op.width) work(std::true_type{});
  else if constexpr (Op::kSharesParts) work(std::false_type{});
}

template <class Op>
__global__ void __launch_bounds__(kMaxThreads) walked_rows(Op op, int64_t rows) {
  EJKERNEL_SHARED(float, scratch, kScratch<>);
  Reducer reducer{scratch, int(blockDim.x)};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) op.walk(row, reducer);
}

}  // namespace ejkernel
