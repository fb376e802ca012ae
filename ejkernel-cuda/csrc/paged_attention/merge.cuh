// Tiles whose keys several workers had, put together from their parts in a fixed order (Dao et al., Flash-Decoding, 2023).
#pragma once

#include <bit>

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

constexpr int kMergeWarps = 8, kMergeThreads = 32 * kMergeWarps;  // of a block of the merge
constexpr int kSplitsAtOnce = 2 * kMergeThreads;                  // workers that a block looks through at once

// How the merge is launched. Where a tile is many workers', a block has a few channels of one row, each of whose parts is some
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
    rows = 1;
    while (lanes == 32 && rows < kMergeWarps && rows < of_tile) rows *= 2;
    blocks = (of_tile + rows - 1) / rows * slices;
  }
};

// Lanes that share a row's parts: few, where a tile has more parts than a warp takes at once.
inline int lanes_of_part(const Problem& problem, int workers) { return problem.tiles() * 8 < workers ? 8 : 32; }

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

  // Brings what is known to a new maximum.
  __device__ float raise(float most) {
    const float shift = shift_of(most), kept = fast_exp2(largest - shift);
    largest = most, total *= kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.data[i] *= kept;
    return shift;
  }

  __device__ void add(const Partial& other) {
    const float shift = raise(fmaxf(largest, other.largest)), weight = fast_exp2(other.largest - shift);
    total += weight * other.total;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.data[i] += weight * other.sums.data[i];
  }

  __device__ Partial of_lane(int lane) const {
    Partial other;
    other.largest = __shfl_sync(kWarp, largest, lane), other.total = __shfl_sync(kWarp, total, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) other.sums.data[i] = __shfl_sync(kWarp, sums.data[i], lane);
    return other;
  }
};

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

// Rows of split tiles from their parts, of which LANES lanes read a row's slice; `shape.tiles` times `shape.blocks` blocks.
//
// This kernel may begin before `attend` ends: until it has waited it reads arguments of the call alone, works out from them
// what it can, and writes tokens that `attend` leaves out. All that ran before `attend`, and so all that may have had the
// results' memory, was done when that allowed this kernel to begin; and whatever comes next waits for this kernel, which does not
// end before `attend` does. So every thread waits.
template <int LANES>
__global__ void __launch_bounds__(kMergeThreads)
    merge(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers, MergeShape shape) {
  constexpr int kAtOnce = LANES < 32 ? 5 : 4, kBeside = 32 / LANES;  // parts of a lane, and of a warp
  EJKERNEL_SHARED(MergeNotes, all_notes, 1);
  MergeNotes& notes = all_notes[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = problem.value.size, group = problem.group;
  const int warps = kMergeWarps / shape.rows, mine = warp & (warps - 1), step = warps * kBeside;  // of a row
  int block, slice, in_head;
  const int tile = divide(int(blockIdx.x), shape.blocks, block);
  const int first_row = divide(block, shape.slices, slice) * shape.rows;
  const int beside = divide(first_row + warp / warps, problem.rows_of_head(), in_head);
  const int channel = (slice * LANES + lane % LANES) * 4;
  problem.is_bf16 ? clear_tokens<__nv_bfloat16>(problem, results) : clear_tokens<__half>(problem, results);
  Split found{};
  int first = 0;
  if (shape.by_lengths) {
    find_split(problem, workers, tile, found, first);
  } else {
    wait_for_last_kernel();
    start_next_kernel();
    search_split(results, int(workers.value), tile, notes);
    if (notes.first >= 0) found = notes.found, first = notes.first;
    if (found.workers < 2) return;
  }
  const int row = found.row + beside * group + in_head;
  const bool there = beside < problem.together && found.row - int(problem.groups.divide(found.row)) * group + in_head < group;
  const int bits = shape.part_bits, rows = problem.rows_of_part();
  const int count = there && channel < shape.room ? found.workers << bits : 0;
  // The worker with whom the tile begins has it as the last one of its share, all others as the first.
  const int64_t first_part = int64_t(first) * (2 * rows << bits) + beside * problem.rows_of_head() + in_head;
  const float2* part_weight = results.part_weight + first_part;
  const float* part = results.part + first_part * shape.room + channel;
  const int token = problem.all_heads.divide(row), head = row - token * problem.heads, batch = problem.all_tokens.divide(token);
  float value_scale = 1.f, sink = -INFINITY;
  if (there && problem.value_scale) {
    const int key_head = problem.groups.divide(head);
    value_scale = problem.value_scale[batch * problem.value_scale_batch + key_head * problem.value_scale_head];
  }
  if (there && problem.sinks) sink = problem.sinks[batch * problem.sinks_batch + head] * kLog2E;
  if (shape.by_lengths) {
    wait_for_last_kernel();
    start_next_kernel();
    if (found.workers < 2) return;
  }
  Partial sum;
#pragma unroll 1
  for (int base = mine * kBeside + lane / LANES; base < count; base += step * kAtOnce) {
    float2 known[kAtOnce];
    Pack<float, 4> values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int number = base + i * step;
      const uint32_t of_first = number >> bits == 0 ? 1 << bits : 0;  // parts that lie before its
      const uint32_t at = ((number >> bits << (bits + 1)) + (number & ((1 << bits) - 1)) + of_first) * rows;
      known[i] = {-INFINITY, 0.f}, values[i] = {};
      if (number < count) known[i] = part_weight[at], values[i] = load<float, 4>(part + uint64_t(at) * uint32_t(shape.room));
    }
    float most = sum.largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, known[i].x);
    const float shift = sum.raise(most);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = fast_exp2(known[i].x - shift);
      sum.total += weight * known[i].y;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum.sums.data[j] += weight * values[i].data[j];
    }
  }
  const auto join_lanes = [&] {
#pragma unroll
    for (int apart = LANES; apart < 32; apart *= 2) sum.add(sum.of_lane(lane ^ apart));
  };
  join_lanes();
  if (warps > 1) {
    notes.of_warps[warp][lane] = sum;
    __syncthreads();
    if (mine > 0) return;
    sum = {};
#pragma unroll 1
    for (int other = lane / LANES; other < warps; other += kBeside) sum.add(notes.of_warps[warp + other][lane % LANES]);
    join_lanes();
  }
  if (mine > 0 || lane >= LANES || !there) return;
  if (problem.sinks) sum.add({sink, 1.f, {}});
  const float factor = sum.total == 0.f ? 0.f : value_scale / sum.total;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.sums.data[i] *= factor;
  write_results(results.out, problem.is_bf16, int64_t(row) * size, channel, size, sum.sums);
  if (channel == 0 && results.lse)
    results.lse[row] = sum.total == 0.f ? -INFINITY : (shift_of(sum.largest) + log2f(sum.total)) * kLn2;
}

}  // namespace ejkernel::paged_attention
