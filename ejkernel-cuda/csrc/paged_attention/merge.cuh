// Tiles whose keys several workers had, put together from their parts in a fixed order (Dao et al., Flash-Decoding, 2023).
#pragma once

#include <algorithm>
#include <bit>

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

constexpr int kMergeWarps = 4, kMergeThreads = 32 * kMergeWarps;  // of a block of the merge
constexpr int kSplitsAtOnce = 2 * kMergeThreads;                  // workers that a block looks through at once
// Parts that a lane asks for together, of which LANES read a row's slice.
template <int LANES>
constexpr int kPartsAtOnce = LANES < 32 ? 9 : 3;

// How the merge is launched. Where a tile is several workers', a block has a few channels of some rows, each of whose parts is some
// lanes' of many; else it has many rows whole.
struct MergeShape {
  int tiles;         // that may be split
  int rows, slices;  // of a block, a power of 2; of a row of parts
  int blocks;        // of a tile
  int room;          // elements of a row of parts
  int part_bits;     // a worker leaves 2^part_bits parts
  bool by_lengths;   // whether blocks find their tiles from requests alone

  MergeShape(const Problem& problem, int room, int workers, int lanes, int parts_of_block)
      : room(room), part_bits(std::countr_zero(unsigned(parts_of_block))) {
    const int requests = problem.requests_in_all;
    by_lengths = problem.tiles() <= workers && 0 < requests && requests <= 32;  // a lane for each
    const int of_tile = problem.together * problem.rows_of_head();
    tiles = int(problem.tiles() < workers ? problem.tiles() : workers), slices = (room + 4 * lanes - 1) / (4 * lanes);
    // A warp for each row, or as many as read its parts at once: of an even share of workers, and of those where it begins and ends.
    const int parts = (workers / std::max(tiles, 1) + 2) * parts_of_block, of_warp = 32 / lanes * kPartsAtOnce<8>;
    rows = kMergeWarps;
    while (rows > 1 && (rows >= 2 * of_tile || (lanes < 32 && kMergeWarps / rows * of_warp < parts))) rows /= 2;
    blocks = (of_tile + rows - 1) / rows * slices;
  }
};

// Lanes that share a row's parts: few, where a tile has parts enough for a warp to take several at once.
inline int lanes_of_part(const Problem& problem, int workers) { return problem.tiles() * 4 <= workers ? 8 : 32; }

// Tokens that no request owns, which no worker looks at: 0. All warps of the launch take turns at tokens.
template <typename T>
__device__ inline void clear_tokens(const Problem& problem, const Results& results) {
  const Requests& all = problem.requests;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, elements = problem.heads * problem.value.size;
#pragma unroll 1
  for (int64_t at = int64_t(blockIdx.x) * warps + threadIdx.x / 32; at < problem.batch * all.tokens; at += gridDim.x * warps) {
    int64_t token;
    const int64_t batch = divide(at, all.tokens, token);
    const int32_t* starts = all.starts + (all.one_starts ? 0 : batch * (all.requests + 1));
    if (starts[0] <= token && token < starts[all.requests]) continue;
    T* out = static_cast<T*>(results.out) + at * elements;
#pragma unroll 1
    for (int i = lane; i < elements; i += 32) out[i] = from_float<T>(0.f);
    if (!results.lse) continue;
#pragma unroll 1
    for (int head = lane; head < problem.heads; head += 32) results.lse[at * problem.heads + head] = -INFINITY;
  }
}

// Of some parts of a row: values relative to `largest`, and the sum of weights; in units of log 2.
struct Partial {
  float largest = -INFINITY, total = 0.f;
  Pack<float, 4> sums = {};

  __device__ Partial of_lane(int lane) const {
    Partial other;
    other.largest = __shfl_sync(kWarp, largest, lane), other.total = __shfl_sync(kWarp, total, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) other.sums.data[i] = __shfl_sync(kWarp, sums.data[i], lane);
    return other;
  }
};

template <int N>
__device__ inline Partial sum_of(const Partial (&all)[N]) {
  Partial sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.largest = fmaxf(sum.largest, all[i].largest);
  const float shift = shift_of(sum.largest);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float weight = fast_exp2(all[i].largest - shift);
    sum.total += weight * all[i].total;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.sums.data[j] += weight * all[i].sums.data[j];
  }
  return sum;
}

// What a block of the merge has in shared memory.
struct MergeNotes {
  Partial of_warps[kMergeWarps][32];
  int splits[kMergeWarps];  // that each warp sees
  Split found;
  int first;  // worker of what is found, -1 where nothing is
};

// The `wanted`-th tile that is split, with the worker where it begins. All threads of the block.
__device__ inline void search_split(const Results& results, int workers, int wanted, MergeNotes& notes) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) notes.first = -1;
#pragma unroll 1
  for (int base = 0; base < workers && wanted >= 0; base += kSplitsAtOnce) {
    Split splits[2];
    unsigned some[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int worker = base + int(threadIdx.x) * 2 + i;
      splits[i] = worker < workers ? results.splits[worker] : Split{};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) some[i] = __ballot_sync(kWarp, splits[i].workers > 0);
    if (lane == 0) notes.splits[warp] = __popc(some[0]) + __popc(some[1]);
    __syncthreads();
    const unsigned lower = (1u << lane) - 1;
    int before = __popc(some[0] & lower) + __popc(some[1] & lower), all = 0;
#pragma unroll
    for (int other = 0; other < kMergeWarps; ++other) {
      before += other < warp ? notes.splits[other] : 0;
      all += notes.splits[other];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (splits[i].workers > 0 && before == wanted) notes.found = splits[i], notes.first = base + int(threadIdx.x) * 2 + i;
      before += splits[i].workers > 0;
    }
    wanted -= all;
    __syncthreads();
  }
}

// The workers of the `wanted`-th tile of all, and the first of them, where a warp has a lane for each request; as they were
// where there is no such tile.
__device__ inline void find_split(const Problem& problem, Divisor workers, int wanted, Split& found, int& first) {
  const int lane = threadIdx.x % 32, requests = problem.requests_in_all;
  const Request mine(problem, min(lane, requests - 1));
  const int tiles = lane < requests ? mine.tiles(problem) : 0, steps = tiles * mine.steps;
  const Shares shares(sum_of_warp(steps), workers, problem.turns_bits);
  const int tiles_up_to = sum_up_to(tiles), steps_before = sum_up_to(steps) - steps;
  const unsigned ends_later = __ballot_sync(kWarp, tiles_up_to > wanted);
  if (!ends_later) return;
  const int at = __ffs(int(ends_later)) - 1, number = wanted - known_of_lane(tiles_up_to - tiles, at);
  const Request request = Request::of_lane(problem, mine, at);
  const int begin = known_of_lane(steps_before, at) + number * request.steps;
  first = shares.owner(begin);
  const TileOf tile(problem, request, number);
  found = {int(tile.row(problem, request, 0)), shares.owner(begin + request.steps - 1) - first + 1};
}

// A row's parts as a lane of the merge reads them: every `step`-th from number `mine` on, AT_ONCE at a time. Where those lie is
// worked out before they are there.
template <int AT_ONCE>
struct PartsOfRow {
  int row = 0, count = 0;           // among all tokens' query heads; parts, 0 where this lane has none to read
  bool there = false;               // whether this is a row of the tile
  const float2* weights = nullptr;  // of parts of this row
  const char* values = nullptr;     // the same of this lane's channels
  uint32_t part_bytes = 0;          // of a row of parts
  uint32_t at[AT_ONCE] = {};        // of the parts that are read next, counted in rows of parts
  float value_scale = 1.f, sink = -INFINITY;

  PartsOfRow() = default;
  __device__ PartsOfRow(const Problem& problem, const Results& results, const MergeShape& shape, const Split& found, int first,
                        int beside, int in_head, int channel, int mine, int step) {
    const int group = problem.group;
    row = found.row + beside * group + in_head;
    there = beside < problem.together && found.row - int(problem.groups.divide(found.row)) * group + in_head < group;
    count = there && channel < shape.room ? found.workers << shape.part_bits : 0;
    // The worker with whom the tile begins has it as the last one of its share, all others as the first.
    const int rows = problem.rows_of_part();
    const int64_t first_part = int64_t(first) * (2 * rows << shape.part_bits) + beside * problem.rows_of_head() + in_head;
    weights = results.part_weight + first_part;
    values = held(reinterpret_cast<const char*>(results.part + first_part * shape.room + channel));
    part_bytes = uint32_t(shape.room) * sizeof(float);
    look_up(problem, shape, mine, step);
    const int token = problem.all_heads.divide(row), head = row - token * problem.heads, batch = problem.all_tokens.divide(token);
    if (there && problem.value_scale) {
      const int key_head = problem.groups.divide(head);
      value_scale = problem.value_scale[batch * problem.value_scale_batch + key_head * problem.value_scale_head];
    }
    if (there && problem.sinks) sink = problem.sinks[batch * problem.sinks_batch + head] * kLog2E;
  }

  // Where the AT_ONCE parts from number `base` on lie.
  __device__ void look_up(const Problem& problem, const MergeShape& shape, int base, int step) {
    const int bits = shape.part_bits, rows = problem.rows_of_part();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int number = base + i * step;
      const uint32_t of_first = number >> bits == 0 ? 1 << bits : 0;  // parts that lie before its
      at[i] = ((number >> bits << (bits + 1)) + (number & ((1 << bits) - 1)) + of_first) * rows;
    }
  }

  // The parts that were looked up last, of which number `base` is the first.
  __device__ void add_to(Partial& sum, int base, int step) const {
    uint2 known[AT_ONCE];
    uint4 found[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool asked = base + i * step < count;
      known[i] = read_words<uint2>(weights + at[i], asked);
      found[i] = read_words<uint4>(values + uint64_t(at[i]) * part_bytes, asked);
    }
    Partial all[AT_ONCE + 1];
    all[AT_ONCE] = sum;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      all[i] = {__builtin_bit_cast(float, known[i].x), __builtin_bit_cast(float, known[i].y),
                __builtin_bit_cast(Pack<float, 4>, found[i])};
      if (base + i * step >= count) all[i].largest = -INFINITY;
    }
    sum = sum_of(all);
  }
};

// Rows of split tiles from their parts, of which LANES lanes read a row's slice; `shape.tiles` times `shape.blocks` blocks.
//
// This kernel may begin before `attend` ends: until it has waited it reads arguments of the call alone, works out from them
// what it can, and writes tokens that `attend` leaves out. All that ran before `attend`, and so all that may have had the
// results' memory, was done when that allowed this kernel to begin; and whatever comes next waits for this kernel, which does not
// end before `attend` does. So every thread waits.
template <int LANES>
__global__ void __launch_bounds__(kMergeThreads, LANES < 32 ? 5 : 10)  // registers that workers leave to blocks of few tiles
    merge(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers, MergeShape shape) {
  constexpr int kAtOnce = kPartsAtOnce<LANES>, kBeside = 32 / LANES;  // parts of a lane, and of a warp
  EJKERNEL_SHARED(MergeNotes, all_notes, 1);
  MergeNotes& notes = all_notes[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = kMergeWarps / shape.rows, mine = warp & (warps - 1), step = warps * kBeside;  // of a row
  int block, slice, in_head;
  const int tile = divide(int(blockIdx.x), shape.blocks, block);
  const int first_row = divide(block, shape.slices, slice) * shape.rows;
  const int beside = divide(first_row + warp / warps, problem.rows_of_head(), in_head);
  const int channel = (slice * LANES + lane % LANES) * 4, first_number = mine * kBeside + lane / LANES;
  problem.is_bf16 ? clear_tokens<__nv_bfloat16>(problem, results) : clear_tokens<__half>(problem, results);
  Split found{};
  int first = 0;
  PartsOfRow<kAtOnce> parts;
  const auto look_up = [&] {
    parts = PartsOfRow<kAtOnce>(problem, results, shape, found, first, beside, in_head, channel, first_number, step);
  };
  if (shape.by_lengths) {
    find_split(problem, workers, tile, found, first);
    look_up();
  }
  wait_for_last_kernel();
  start_next_kernel();
  if (!shape.by_lengths) {
    search_split(results, int(workers.value), tile, notes);
    if (notes.first >= 0) found = notes.found, first = notes.first;
  }
  if (found.workers < 2) return;
  if (!shape.by_lengths) look_up();
  Partial sum;
  int base = first_number;
#pragma unroll 1
  while (true) {
    parts.add_to(sum, base, step);
    base += step * kAtOnce;
    if (base >= parts.count) break;
    parts.look_up(problem, shape, base, step);
  }
  if (warps > 1) {
    notes.of_warps[warp][lane] = sum;
    __syncthreads();
    if (mine > 0) return;
    Partial all[kMergeWarps];
#pragma unroll
    for (int i = 0; i < kMergeWarps; ++i) {
      if (i < warps) all[i] = notes.of_warps[warp + i][lane];
    }
    sum = sum_of(all);
  }
#pragma unroll
  for (int apart = LANES; apart < 32; apart *= 2) sum = sum_of({sum, sum.of_lane(lane ^ apart)});
  if (lane >= LANES || !parts.there) return;
  if (problem.sinks) sum = sum_of({sum, Partial{parts.sink, 1.f, {}}});
  const float factor = sum.total == 0.f ? 0.f : parts.value_scale * fast_inverse(sum.total);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.sums.data[i] *= factor;
  const int size = problem.value.size;
  write_results(results.out, problem.is_bf16, int64_t(parts.row) * size, channel, size, sum.sums);
  if (channel == 0 && results.lse)
    results.lse[parts.row] = sum.total == 0.f ? -INFINITY : (shift_of(sum.largest) + log2f(sum.total)) * kLn2;
}

}  // namespace ejkernel::paged_attention
