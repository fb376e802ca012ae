// Combine the partial results of tiles that several workers split, in a fixed order (Dao et al., Flash-Decoding, 2023).
#pragma once

#include <algorithm>
#include <bit>

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

constexpr int kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;  // of a block of the combine kernel
constexpr int kSplitsAtOnce = 2 * kCombineThreads;                      // workers whose records a block scans at once
// Partial results whose loads a lane keeps in flight; LANES lanes read a row's slice.
template <int LANES>
constexpr int kPartialsInFlight = LANES < 32 ? 9 : 3;

// Launch shape of the combine kernel. If several workers split each tile, a block has a slice of few rows, and groups of lanes
// read several of their partial results in parallel; else it has many whole rows.
struct CombineShape {
  int tiles;         // tiles that may be split
  int rows, slices;  // rows of a block, a power of 2; slices of a row
  int blocks;        // blocks of a tile
  int room;          // elements of a row of partial results
  int partial_bits;  // a worker writes 2^partial_bits partial results per tile
  bool by_lengths;   // whether blocks find their tiles from the requests alone

  CombineShape(const Problem& problem, int room, int workers, int lanes, int partials_per_block)
      : room(room), partial_bits(std::countr_zero(unsigned(partials_per_block))) {
    const int requests = problem.total_requests;
    by_lengths = problem.tiles() <= workers && 0 < requests && requests <= 32;  // a lane for each
    const int of_tile = problem.tile_key_heads * problem.rows_of_head();
    tiles = int(problem.tiles() < workers ? problem.tiles() : workers), slices = (room + 4 * lanes - 1) / (4 * lanes);
    // One warp per row, or as many as read its partial results at once: those of an even share of the workers, and of the two
    // where it begins and ends.
    const int partials = (workers / std::max(tiles, 1) + 2) * partials_per_block, of_warp = 32 / lanes * kPartialsInFlight<8>;
    rows = kCombineWarps;
    while (rows > 1 && (rows >= 2 * of_tile || (lanes < 32 && kCombineWarps / rows * of_warp < partials))) rows /= 2;
    blocks = (of_tile + rows - 1) / rows * slices;
  }
};

// Lanes that share a row of a partial result: few, if a tile has enough partial results for a warp to read several at once.
inline int lanes_per_partial(const Problem& problem, int workers) { return problem.tiles() * 4 <= workers ? 8 : 32; }

// Zero the outputs of tokens that no request owns, which no worker visits. All warps of the launch share them.
template <typename T>
__device__ inline void zero_unowned_tokens(const Problem& problem, const Results& results) {
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

// Combined partial results of a row: unnormalised output relative to `row_max`, and the sum of weights; in log2 units.
struct Partial {
  float row_max = -INFINITY, total = 0.f;
  Pack<float, 4> acc = {};

  __device__ Partial of_lane(int lane) const {
    Partial other;
    other.row_max = __shfl_sync(kWarp, row_max, lane), other.total = __shfl_sync(kWarp, total, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) other.acc.data[i] = __shfl_sync(kWarp, acc.data[i], lane);
    return other;
  }
};

template <int N>
__device__ inline Partial combine_partials(const Partial (&all)[N]) {
  Partial sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.row_max = fmaxf(sum.row_max, all[i].row_max);
  const float shift = shift_of(sum.row_max);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float weight = fast_exp2(all[i].row_max - shift);
    sum.total += weight * all[i].total;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.acc.data[j] += weight * all[i].acc.data[j];
  }
  return sum;
}

// Shared memory of a block of the combine kernel.
struct CombineShared {
  Partial warps[kCombineWarps][32];
  int splits[kCombineWarps];  // split tiles that each warp sees
  Split found;
  int first;  // first worker of `found`, -1 for none
};

// Find the `wanted`-th split tile and its first worker. All threads of the block call this.
__device__ inline void search_split(const Results& results, int workers, int wanted, CombineShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.first = -1;
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
    if (lane == 0) shared.splits[warp] = __popc(some[0]) + __popc(some[1]);
    __syncthreads();
    const unsigned lower = (1u << lane) - 1;
    int before = __popc(some[0] & lower) + __popc(some[1] & lower), all = 0;
#pragma unroll
    for (int other = 0; other < kCombineWarps; ++other) {
      before += other < warp ? shared.splits[other] : 0;
      all += shared.splits[other];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (splits[i].workers > 0 && before == wanted) shared.found = splits[i], shared.first = base + int(threadIdx.x) * 2 + i;
      before += splits[i].workers > 0;
    }
    wanted -= all;
    __syncthreads();
  }
}

// Find the workers of the `wanted`-th of all tiles, with one lane per request; leave the results alone if there is no such
// tile.
__device__ inline void find_split(const Problem& problem, Divisor workers, int wanted, Split& found, int& first) {
  const int lane = threadIdx.x % 32, requests = problem.total_requests;
  const Request mine(problem, min(lane, requests - 1));
  const int tiles = lane < requests ? mine.tiles(problem) : 0, steps = tiles * mine.steps;
  const StreamK stream_k(warp_sum(steps), workers, problem.interleave_bits);
  const int tiles_up_to = inclusive_scan(tiles), steps_before = inclusive_scan(steps) - steps;
  const unsigned ends_later = __ballot_sync(kWarp, tiles_up_to > wanted);
  if (!ends_later) return;
  const int at = __ffs(int(ends_later)) - 1, number = wanted - warp_broadcast(tiles_up_to - tiles, at);
  const Request request = Request::of_lane(problem, mine, at);
  const int begin = warp_broadcast(steps_before, at) + number * request.steps;
  first = stream_k.owner(begin);
  const TileCoord tile(problem, request, number);
  found = {int(tile.row(problem, request, 0)), stream_k.owner(begin + request.steps - 1) - first + 1};
}

// A row's partial results as a lane reads them: every `step`-th from `mine` on, AT_ONCE at a time. Their addresses are computed
// before the data exist.
template <int AT_ONCE>
struct RowPartials {
  int row = 0, count = 0;           // row among all tokens' query heads; partial results, 0 if this lane has none to read
  bool valid = false;               // whether the tile has this row
  const float2* weights = nullptr;  // of this row's partial results
  const char* values = nullptr;     // the same for this lane's channels
  uint32_t partial_bytes = 0;       // of a row of partial results
  uint32_t at[AT_ONCE] = {};        // of the next partial results, in rows of partial results
  float value_scale = 1.f, sink = -INFINITY;

  RowPartials() = default;
  __device__ RowPartials(const Problem& problem, const Results& results, const CombineShape& shape, const Split& found,
                         int first, int tile_head, int in_head, int channel, int mine, int step) {
    const int group = problem.group;
    row = found.row + tile_head * group + in_head;
    valid = tile_head < problem.tile_key_heads &&
            found.row - int(problem.group_divisor.divide(found.row)) * group + in_head < group;
    count = valid && channel < shape.room ? found.workers << shape.partial_bits : 0;
    // The tile is the last one of its first worker's share, and the first one of all others'.
    const int rows = problem.rows_per_partial();
    const int64_t first_partial =
        int64_t(first) * (2 * rows << shape.partial_bits) + tile_head * problem.rows_of_head() + in_head;
    weights = results.partial_stats + first_partial;
    values = opaque_pointer(reinterpret_cast<const char*>(results.partial + first_partial * shape.room + channel));
    partial_bytes = uint32_t(shape.room) * sizeof(float);
    look_up(problem, shape, mine, step);
    const int token = problem.heads_divisor.divide(row), head = row - token * problem.heads,
              batch = problem.tokens_divisor.divide(token);
    if (valid && problem.value_scale) {
      const int key_head = problem.group_divisor.divide(head);
      value_scale = problem.value_scale[batch * problem.value_scale_batch + key_head * problem.value_scale_head];
    }
    if (valid && problem.sinks) sink = problem.sinks[batch * problem.sinks_batch + head] * kLog2E;
  }

  // Locate the AT_ONCE partial results from `base` on.
  __device__ void look_up(const Problem& problem, const CombineShape& shape, int base, int step) {
    const int bits = shape.partial_bits, rows = problem.rows_per_partial();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int number = base + i * step;
      const uint32_t of_first = number >> bits == 0 ? 1 << bits : 0;  // partial results before its own
      at[i] = ((number >> bits << (bits + 1)) + (number & ((1 << bits) - 1)) + of_first) * rows;
    }
  }

  // Add the partial results that were located last, the first of which is `base`.
  __device__ void add_to(Partial& sum, int base, int step) const {
    uint2 stats[AT_ONCE];
    uint4 found[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool in_range = base + i * step < count;
      stats[i] = load_predicated<uint2>(weights + at[i], in_range);
      found[i] = load_predicated<uint4>(values + uint64_t(at[i]) * partial_bytes, in_range);
    }
    Partial all[AT_ONCE + 1];
    all[AT_ONCE] = sum;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      all[i] = {__builtin_bit_cast(float, stats[i].x), __builtin_bit_cast(float, stats[i].y),
                __builtin_bit_cast(Pack<float, 4>, found[i])};
      if (base + i * step >= count) all[i].row_max = -INFINITY;
    }
    sum = combine_partials(all);
  }
};

// Combine the rows of split tiles; LANES lanes read a row's slice; `shape.tiles` times `shape.blocks` blocks.
//
// This kernel may start before `attend` ends. Until its wait it reads only arguments of the call, precomputes what it can, and
// writes tokens that `attend` does not write. Kernels before `attend`, which may use the results' memory, had ended when
// `attend` allowed this kernel to start; the next kernel waits for this one, which does not end before `attend`. So every
// thread waits.
template <int LANES>
__global__ void __launch_bounds__(kCombineThreads, LANES < 32 ? 5 : 10)  // registers that workers leave to blocks of few tiles
    combine(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers,
            CombineShape shape) {
  constexpr int kInFlight = kPartialsInFlight<LANES>, kBeside = 32 / LANES;  // partial results in flight per lane, and per warp
  EJKERNEL_SHARED(CombineShared, storage, 1);
  CombineShared& shared = storage[0];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = kCombineWarps / shape.rows, mine = warp & (warps - 1), step = warps * kBeside;  // of a row
  int block, slice, in_head;
  const int tile = divide(int(blockIdx.x), shape.blocks, block);
  const int first_row = divide(block, shape.slices, slice) * shape.rows;
  const int tile_head = divide(first_row + warp / warps, problem.rows_of_head(), in_head);
  const int channel = (slice * LANES + lane % LANES) * 4, first_number = mine * kBeside + lane / LANES;
  problem.is_bf16 ? zero_unowned_tokens<__nv_bfloat16>(problem, results) : zero_unowned_tokens<__half>(problem, results);
  Split found{};
  int first = 0;
  RowPartials<kInFlight> partials;
  const auto look_up = [&] {
    partials = RowPartials<kInFlight>(problem, results, shape, found, first, tile_head, in_head, channel, first_number, step);
  };
  if (shape.by_lengths) {
    find_split(problem, workers, tile, found, first);
    look_up();
  }
  wait_for_prerequisites();
  launch_dependents();
  if (!shape.by_lengths) {
    search_split(results, int(workers.value), tile, shared);
    if (shared.first >= 0) found = shared.found, first = shared.first;
  }
  if (found.workers < 2) return;
  if (!shape.by_lengths) look_up();
  Partial sum;
  int base = first_number;
#pragma unroll 1
  while (true) {
    partials.add_to(sum, base, step);
    base += step * kInFlight;
    if (base >= partials.count) break;
    partials.look_up(problem, shape, base, step);
  }
  if (warps > 1) {
    shared.warps[warp][lane] = sum;
    __syncthreads();
    if (mine > 0) return;
    Partial all[kCombineWarps];
#pragma unroll
    for (int i = 0; i < kCombineWarps; ++i) {
      if (i < warps) all[i] = shared.warps[warp + i][lane];
    }
    sum = combine_partials(all);
  }
#pragma unroll
  for (int distance = LANES; distance < 32; distance *= 2) sum = combine_partials({sum, sum.of_lane(lane ^ distance)});
  if (lane >= LANES || !partials.valid) return;
  if (problem.sinks) sum = combine_partials({sum, Partial{partials.sink, 1.f, {}}});
  const float factor = sum.total == 0.f ? 0.f : partials.value_scale * fast_reciprocal(sum.total);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.acc.data[i] *= factor;
  const int size = problem.value.size;
  write_results(results.out, problem.is_bf16, int64_t(partials.row) * size, channel, size, sum.acc);
  if (channel == 0 && results.lse)
    results.lse[partials.row] = sum.total == 0.f ? -INFINITY : (shift_of(sum.row_max) + log2f(sum.total)) * kLn2;
}

}  // namespace ejkernel::paged_attention
