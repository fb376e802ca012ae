// Attention of packed queries over a paged cache: each worker walks over its share of the keys (schedule.cuh) with a running
// maximum and sum, and a merge in a fixed order puts tiles together whose keys are shared (Dao et al., Flash-Decoding, 2023).
//
// The warps of a block take turns at the keys of a tile, each with a ring of its own in shared memory, so that none waits for
// another before the tile is done. Where a tile has several key heads, warps take turns at those first, and fill their rings
// together: what lies side by side in memory is read at once, for which they wait for each other at every step. Logits are in
// units of log 2.
#pragma once

#include <cmath>

#include "paged_attention/schedule.cuh"
#include "reduce.cuh"

namespace ejkernel::paged_attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Beside the rings, in the same shared memory.
struct Notes {
  float largest[kWarps][kRows], sum[kWarps][kRows];  // of each warp's keys; sums are relative to their key head's maximum
  int seen[kWarps][kMaxStages];                      // bit k: key k of the step is visible
  float value_scale[kWarps];                         // of each warp's key head
  int sums[kWarps];
  Start start;
};

// Bytes of the rings; when a tile is done they hold its weighted values of each warp, float [kWarps, kRows, BLOCK].
template <typename S, int BLOCK>
constexpr int64_t ring_bytes(int stages) {
  const int64_t rings = int64_t(stages) * kWarps * 2 * keys_of_step(sizeof(S), BLOCK) * BLOCK * sizeof(S);
  const int64_t merge = int64_t(sizeof(float)) * kWarps * kRows * BLOCK;
  return rings > merge ? rings : merge;
}

// A tile's queries as products take them: in registers, and wide ones, for which there are too few, in shared memory.
template <int BLOCK, bool IN_REGISTERS = BLOCK <= 128>
struct Queries {
  using Fragment = Pack<uint32_t, 4>;
  static constexpr int64_t kSharedBytes = 0;
  static constexpr int kFirst = 0, kEach = 1;  // warp w makes every kEach-th from kFirst * w on
  Fragment all[BLOCK / 16];

  __device__ Queries(char*, int) {}
  __device__ void set(int step, const Fragment& value) { all[step] = value; }
  __device__ void share() const {}
  __device__ const Fragment& operator()(int step) const { return all[step]; }
};
template <int BLOCK>
struct Queries<BLOCK, false> {
  using Fragment = Pack<uint32_t, 4>;
  static constexpr int64_t kSharedBytes = BLOCK / 16 * 32 * sizeof(Fragment);
  static constexpr int kFirst = 1, kEach = kWarps;
  Fragment* all;  // [BLOCK / 16, 32]
  int lane;

  __device__ Queries(char* shared, int lane) : all(reinterpret_cast<Fragment*>(shared)), lane(lane) {}
  __device__ void set(int step, const Fragment& value) { all[step * 32 + lane] = value; }
  __device__ void share() const { __syncthreads(); }
  __device__ Fragment operator()(int step) const { return all[step * 32 + lane]; }
};

// Bytes of shared memory of a block: rings, wide queries, notes.
template <typename S, int BLOCK>
constexpr int64_t shared_bytes(int stages) {
  return ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes + int64_t(sizeof(Notes));
}

// What is taken from logits: the largest, or 0 if there is none, so that -inf - (-inf) does not arise.
__device__ inline float shift_of(float largest) { return largest == -INFINITY ? 0.f : largest; }

// A warp's way through the keys of a tile, `block` further at a time: each lane looks after one key of each step.
struct Cursor {
  const Requests& all;
  const int32_t* entry;                 // of the block table
  int lowest, last, key, offset, page;  // page: -1 where the key is not visible
  int block, pages, rest;               // keys to go on by, as whole pages and what is left

  __device__ Cursor(const Problem& problem, const Request& request, int local, int first_key, int block)
      : all(problem.requests),
        lowest(request.lowest(problem, local)),
        last(request.last(problem, local)),
        key(first_key),
        block(block) {
    entry = request.table(problem) + divide(first_key, int(all.page_size), offset);
    pages = int(unsigned(block) / unsigned(all.page_size)), rest = block - pages * int(all.page_size);
    look_up();
  }

  __device__ void look_up() { page = key >= lowest && key < last ? *entry : -1; }

  __device__ bool visible() const { return unsigned(page) < unsigned(all.pages); }

  __device__ int64_t byte_in(const Side& side) const { return visible() ? page * side.page + offset * side.token : -1; }

  // Of a packed side.
  __device__ uint32_t access_in(const Side& side) const {
    const auto accesses = [](int64_t bytes) { return uint32_t(uint64_t(bytes) / kAccess); };
    return visible() ? uint32_t(page) * accesses(side.page) + uint32_t(offset) * accesses(side.token) : kNowhere;
  }

  __device__ void advance() {
    key += block, offset += rest, entry += pages;
    if (offset >= int(all.page_size)) offset -= int(all.page_size), ++entry;
    look_up();
  }
};

template <typename T_, typename S_, int BLOCK_>
struct Attention {
  using T = T_;                         // of queries and products
  using S = S_;                         // as pages hold them
  static constexpr int BLOCK = BLOCK_;  // at least the sizes of keys and values
  using Layout = Tile<T, S, BLOCK>;
  static constexpr int kTiles = Layout::kKeys / 8, kLogits = 4 * kTiles;  // of a step's products, each [kRows, 8]
  using Logits = float[kTiles][4];

  const Problem& problem;
  const Results& results;
  Notes& notes;
  char* rings;
  int stages;
  int lane, warp, together;                      // key heads of a tile
  float largest[2], sum[2], sums[BLOCK / 8][4];  // of rows lane / 4 and 8 further; sum of this lane's keys alone
  float unit[2];                                 // of those rows' queries as the products have them

  __device__ Attention(const Problem& problem, const Results& results, Notes& notes, char* rings, int stages)
      : problem(problem),
        results(results),
        notes(notes),
        rings(rings),
        stages(stages),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        together(Layout::kShares ? problem.together : 1) {}

  // Of a tile's key heads, which one this warp looks after, and how many warps before it do.
  __device__ int my_head() const { return warp & (together - 1); }
  __device__ int my_turn() const { return warp >> together / 2; }

  __device__ char* step_at(int warp, int slot) const { return rings + (warp * stages + slot) * 2 * Layout::kBytes; }

  // This warp's part of what warps with the same keys copy: to the ring of the first of them on.
  template <int HEADS>
  __device__ void copy_part(const Cursor& cursor, const Side& side, const char* from, int slot, int beside) const {
    constexpr int kEach = sizeof(S);
    copy_rows<Layout::kKeys, kEach, BLOCK, HEADS>(step_at(warp - warp % HEADS, slot) + beside, stages * 2 * Layout::kBytes, from,
                                                  cursor.access_in(side), uint32_t(uint64_t(side.head) / kAccess),
                                                  side.size * kEach, warp % HEADS, lane);
  }

  __device__ void copy_side(const Cursor& cursor, const Side& side, const char* from, int slot, int beside) const {
    if (!side.packed) {
      copy_elements<Layout::kKeys, sizeof(S), BLOCK>(step_at(warp, slot) + beside, from + my_head() * side.head,
                                                     cursor.byte_in(side), side.size * int(sizeof(S)), lane);
      return;
    }
    if constexpr (Layout::kShares) {
      if (together == 4) return copy_part<4>(cursor, side, from, slot, beside);
      if (together == 2) return copy_part<2>(cursor, side, from, slot, beside);
    }
    copy_part<1>(cursor, side, from, slot, beside);
  }

  // Begin to copy the cursor's keys and values.
  __device__ void begin_step(Cursor& cursor, const char* keys, const char* values, int slot) {
    const unsigned seen = __ballot_sync(kWarp, cursor.visible());
    if (lane == 0) notes.seen[warp][slot] = int(seen & Layout::kAllSeen);
    copy_side(cursor, problem.key, keys, slot, 0);
    copy_side(cursor, problem.value, values, slot, Layout::kBytes);
    cursor.advance();
  }

  __device__ bool is_bf16() const { return Layout::kIsBytes ? problem.is_bf16 : std::is_same_v<T, __nv_bfloat16>; }

  __device__ void write_result(int64_t at, float value) const {
    if (is_bf16()) {
      static_cast<__nv_bfloat16*>(results.out)[at] = from_float<__nv_bfloat16>(value);
    } else {
      static_cast<__half*>(results.out)[at] = from_float<__half>(value);
    }
  }

  // Numbers of a tile's queries that lie side by side, as they are stored; 0 for rows and columns that are not there.
  template <int N>
  __device__ Pack<uint16_t, N> query_bits(const char* from, const TileOf& tile, int half, int channel) const {
    const int row = lane / 4 + half * 8, size = problem.key.size;
    Pack<uint16_t, N> bits = {};
    if (row < tile.rows && channel < size) {
      bits = load<uint16_t, N>(reinterpret_cast<const uint16_t*>(from) + row * size + channel);
    }
    return bits;
  }

  // This lane's four in the `step`-th 16 columns of a row: of an operand's first pair, then of its second. RUN divides the size
  // of heads: so many are read at once, with no branch between, so that all steps' are on their way together.
  template <int RUN>
  __device__ Pack<uint16_t, 4> query_pairs(const char* from, const TileOf& tile, int half, int step) const {
    Pack<uint16_t, 4> bits;
#pragma unroll
    for (int i = 0; i < 4; i += RUN) {
      const auto some = query_bits<RUN>(from, tile, half, Layout::query_channel(step, i / 2, lane) + i % 2);
#pragma unroll
      for (int j = 0; j < RUN; ++j) bits.data[i + j] = some.data[j];
    }
    return bits;
  }

  // Beside stored bytes, queries of bfloat16 become float16, in units of a power of 2 for each row that brings its largest
  // number to 2^14 ... 2^15: nothing overflows, and what is lost is 2^-39 of the largest. Of a row with an infinity nothing
  // else is left, nor does it matter.
  template <int RUN>
  __device__ float find_unit(const char* from, const TileOf& tile, int half) const {
    int bits_of_most = 0;  // magnitudes are in the order of their bits
#pragma unroll(RUN > 1 ? BLOCK / 16 : 1)
    for (int step = 0; step < BLOCK / 16; ++step) {
      const Pack<uint16_t, 4> bits = query_pairs<RUN>(from, tile, half, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) bits_of_most = max(bits_of_most, bits.data[i] & 0x7fff);
    }
    float most = __builtin_bit_cast(float, bits_of_most << 16);
    most = fmaxf(most, __shfl_xor_sync(kWarp, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kWarp, most, 2));
    const int exponent = max(__builtin_bit_cast(int, most) >> 23, 15);
    return __builtin_bit_cast(float, (exponent - 14) << 23);
  }

  __device__ const char* queries_of(const Request& request, const TileOf& tile) const {
    return static_cast<const char*>(problem.query) + tile.row(problem, request, my_head()) * problem.key.size * 2;
  }

  template <int RUN, bool SCALED>
  __device__ void read_queries(Queries<BLOCK>& queries, const char* from, const TileOf& tile) {
    constexpr int kEach = Queries<BLOCK>::kEach, kMine = BLOCK / 16 / kEach;
    const int first = Queries<BLOCK>::kFirst * warp;
    Pack<uint32_t, 4> mine[kMine] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unit[half] = 1.f;
      if (half == 1 && !problem.fills_tiles()) continue;
      if (SCALED) unit[half] = find_unit<RUN>(from, tile, half);
      const float inverse = __builtin_bit_cast(float, 0x7f000000u - __builtin_bit_cast(uint32_t, unit[half]));
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const Pack<uint16_t, 4> bits = query_pairs<RUN>(from, tile, half, first + i * kEach);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t low = bits.data[2 * pair], high = bits.data[2 * pair + 1];
          const auto number = [&](uint32_t found) { return __builtin_bit_cast(float, found << 16) * inverse; };
          mine[i].data[2 * pair + half] = SCALED ? pair_of<T>(number(low), number(high)) : low | high << 16;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) queries.set(first + i * kEach, mine[i]);
    queries.share();
  }

  template <int RUN>
  __device__ void read_queries(Queries<BLOCK>& queries, const char* from, const TileOf& tile) {
    if constexpr (Layout::kIsBytes) {
      if (problem.is_bf16) return read_queries<RUN, true>(queries, from, tile);
    }
    read_queries<RUN, false>(queries, from, tile);
  }

  // Products to logits; -inf for keys that are not visible.
  __device__ void scale_products(Logits& logits, float factor, unsigned seen) const {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      float& logit = logits[i / 4][i % 4];
      if constexpr (Layout::kIsBytes) logit *= unit[i % 4 / 2];
      logit *= factor;
    }
    if (problem.soft_cap > 0.f) {  // tanh(x) = 1 - 2 / (e^2x + 1), with factor = 2 log2(e) scale / cap
#pragma unroll
      for (int i = 0; i < kLogits; ++i) {
        float& logit = logits[i / 4][i % 4];
        logit = problem.soft_cap * kLog2E * (1.f - 2.f * fast_inverse(fast_exp2(logit) + 1.f));
      }
    }
    if (seen == Layout::kAllSeen) return;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (!(seen >> key & 1u)) logits[i / 4][i % 4] = -INFINITY;
    }
  }

  // The running maximum and sum with these logits, which become weights; sums so far are brought to the new maximum.
  __device__ void weigh(Logits& logits) {
    bool changed = false;
    float kept[2] = {1.f, 1.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !problem.fills_tiles()) {  // no query is there, nor is the result written
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) logits[tile][2] = logits[tile][3] = 0.f;
        continue;
      }
      float most = fmaxf(logits[0][2 * half], logits[0][2 * half + 1]);
#pragma unroll
      for (int tile = 1; tile < kTiles; ++tile) most = fmaxf(most, fmaxf(logits[tile][2 * half], logits[tile][2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(kWarp, most, 1));
      most = fmaxf(fmaxf(most, __shfl_xor_sync(kWarp, most, 2)), largest[half]);
      const float shift = shift_of(most);
      kept[half] = fast_exp2(largest[half] - shift);
      changed |= most != largest[half];
      largest[half] = most;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        float& logit = logits[i / 2][2 * half + i % 2];
        logit = fast_exp2(logit - shift);
        total += logit;
      }
      sum[half] = sum[half] * kept[half] + total;
    }
    if (!__any_sync(kWarp, changed)) return;
#pragma unroll
    for (int i = 0; i < BLOCK / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] *= kept[j / 2];
    }
  }

  // The keys and values in a slot join the sums.
  __device__ void take_step(const Queries<BLOCK>& queries, float factor, int slot) {
    const unsigned seen = unsigned(notes.seen[warp][slot]);
    if (seen == 0) return;
    Logits logits = {};
    const char* keys = step_at(warp, slot);
    Layout::multiply_keys(logits, queries, keys, lane);
    scale_products(logits, factor, seen);
    weigh(logits);
    uint32_t weights[kTiles / 2][4];
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      weights[i / 4][i % 4] = pair_of<T>(logits[i / 2][i % 2 * 2], logits[i / 2][i % 2 * 2 + 1]);
    }
    Layout::add_values(sums, weights, keys + Layout::kBytes, lane);
  }

  // What lanes have copied is there for those that read it.
  __device__ void meet() const {
    if (together > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // What brings products to logits, or beside a cap to what `scale_products` makes them of; and the values' scale is noted.
  __device__ float read_scales(const Request& request, int key_head) const {
    float factor = problem.scale * (problem.soft_cap > 0.f ? 2.f * kLog2E / problem.soft_cap : kLog2E), value_scale = 1.f;
    if (problem.value_scale)
      value_scale = problem.value_scale[request.batch * problem.value_scale_batch + key_head * problem.value_scale_head];
    if (problem.key_scale)
      factor *= problem.key_scale[request.batch * problem.key_scale_batch + key_head * problem.key_scale_head];
    if (lane == 0) notes.value_scale[warp] = value_scale;
    return factor;
  }

  // Blocks `from` to `to` of a tile; rows hold this warp's share of them afterwards.
  __device__ void walk(const Request& request, const TileOf& tile, int from, int to) {
    const char* keys = held(problem.key.data + request.batch * problem.key.batch + tile.key_head * problem.key.head);
    const char* values = held(problem.value.data + request.batch * problem.value.batch + tile.key_head * problem.value.head);
    const int first_key =
        ((request.first_block + from) << problem.block_bits) + my_turn() * Layout::kKeys + lane % Layout::kKeys;
    Cursor cursor(problem, request, tile.local, first_key, 1 << problem.block_bits);
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = -INFINITY, sum[half] = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK / 8; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    Queries<BLOCK> queries(rings + ring_bytes<S, BLOCK>(stages), lane);
    const char* rows = queries_of(request, tile);
#pragma unroll 1
    for (int byte = lane * kLine; byte < tile.rows * problem.key.size * 2; byte += 32 * kLine) fetch_ahead(rows + byte);
    const int steps = to - from;
    int slot = 0, free = 0, rest = steps;  // rest: steps that have not begun
    float factor = 0.f;
#pragma unroll 1
    for (int step = -stages; step < steps; ++step) {
      if (step == 0) {  // while the whole ring is on its way
        factor = read_scales(request, tile.key_head + my_head());
        constexpr int kRun = Layout::kIsBytes ? 4 : 2;
        problem.key.size % kRun ? read_queries<1>(queries, rows, tile) : read_queries<kRun>(queries, rows, tile);
      }
      if (step >= 0) {
        wait_for_copies(stages - 1 - (step > 0));
        meet();  // and every lane is done with the slot of the step before, if there was one
      }
      if (step != 0) {
        if (rest-- > 0) begin_step(cursor, keys, values, free);
        commit_copies();
        free = free + 1 == stages ? 0 : free + 1;
      }
      if (step < 0) continue;
      take_step(queries, factor, slot);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    wait_for_copies(0);
  }

  // The warps' sums into shared memory, all relative to their key head's maximum.
  __device__ void gather(int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(kWarp, sum[half], 1);
      sum[half] += __shfl_xor_sync(kWarp, sum[half], 2);
      if (lane % 4 == 0) notes.largest[warp][lane / 4 + 8 * half] = largest[half];
    }
    __syncthreads();  // and all warps are done with their rings
    float* all = reinterpret_cast<float*>(rings) + warp * kRows * BLOCK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
      const float kept = fast_exp2(largest[half] - shift_of(largest_of(row)));
      if (lane % 4 == 0) notes.sum[warp][row] = sum[half] * kept;
#pragma unroll
      for (int i = 0; i < BLOCK / 8; ++i) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          all[row * BLOCK + Layout::value_channel(i, second, lane)] = sums[i][2 * half + second] * kept;
        }
      }
    }
    __syncthreads();
  }

  // Whether another warp looks after the same key head.
  __device__ bool is_beside(int other) const { return ((other ^ warp) & (together - 1)) == 0; }

  __device__ float largest_of(int row) const {
    float most = notes.largest[my_head()][row];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      if (is_beside(other)) most = fmaxf(most, notes.largest[other][row]);
    }
    return most;
  }

  __device__ float sum_of(int row) const {
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      if (is_beside(other)) total += notes.sum[other][row];
    }
    return total;
  }

  // Rows of this warp's key head: of a tile that is `whole` into the results, of another one as part `part`.
  __device__ void write(const Request& request, const TileOf& tile, bool whole, int64_t part) const {
    const float* all = reinterpret_cast<const float*>(rings);
    const int size = problem.value.size;
    const int64_t first = tile.row(problem, request, my_head()), first_part = (part * together + my_head()) * kRows;
    for (int row = my_turn(); row < tile.rows; row += kWarps >> together / 2) {
      float most = largest_of(row), shift = shift_of(most), kept = 1.f;
      float total = sum_of(row);
      if (whole && problem.sinks) {
        const int head = tile.head(problem, my_head()) + row;
        const float sink = problem.sinks[request.batch * problem.sinks_batch + head] * kLog2E;
        most = fmaxf(most, sink);
        kept = fast_exp2(shift - shift_of(most));
        shift = shift_of(most);
        total = total * kept + fast_exp2(sink - shift);
      }
      const float lse = total == 0.f ? -INFINITY : shift + log2f(total);
      float factor = total == 0.f ? 0.f : kept * fast_inverse(total);
      if (whole) factor *= notes.value_scale[warp];
#pragma unroll 4
      for (int channel = lane; channel < size; channel += 32) {
        float value = 0.f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
          if (is_beside(other)) value += all[(other * kRows + row) * BLOCK + channel];
        }
        if (whole) {
          write_result((first + row) * size + channel, value * factor);
        } else {
          results.part[(first_part + row) * size + channel] = value * factor;
        }
      }
      if (lane == 0 && whole && results.lse) results.lse[first + row] = lse * kLn2;
      if (lane == 0 && !whole) results.part_lse[first_part + row] = lse;
    }
    __syncthreads();  // before the rings are filled anew
  }

  __device__ void run(int most_workers) {
    const int worker = blockIdx.x;
    Request::fetch_tables_ahead(problem);
    if (threadIdx.x == 0) results.splits[worker].parts = 0;
    const Start start = find_start(problem, most_workers, notes.sums, notes.start);
    if (worker >= start.shares.workers) return;
    const int share_begin = start.shares.begin(worker), share_end = start.shares.begin(worker + 1);
    int index = start.request, before = start.before, at = share_begin;
    while (at < share_end && index < problem.all_requests()) {
      const Request request(problem, index);
      int from;
      const int number = divide(at - before, request.blocks, from);
      const int tile_begin = at - from, to = min(request.blocks, share_end - tile_begin);
      const TileOf tile(problem, request, number);
      const bool begins = from == 0, ends = to == request.blocks;
      walk(request, tile, from, to);
      at = tile_begin + to;
      if (at >= share_end) start_next_kernel();
      gather(tile.rows);
      if (begins && !ends && threadIdx.x == 0) {
        const int last = notes.start.shares.owner(tile_begin + request.blocks - 1);
        results.splits[worker] = {int(tile.row(problem, request, 0)), last - worker + 1};
      }
      write(request, tile, begins && ends, worker * int64_t(2) + begins);
      const int next = before + request.tiles(problem) * request.blocks;
      if (at >= next && at < share_end) {
        before = next;
        index = next_request(problem, index);
      }
    }
  }
};

// `most_workers` blocks of kThreads.
template <typename T, typename S, int BLOCK>
__global__ void __launch_bounds__(kThreads, BLOCK > 64 ? 2 : 3)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ Results results, int most_workers, int stages) {
  EJKERNEL_SHARED_REST(char, shared);
  Notes& notes = *reinterpret_cast<Notes*>(shared + ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes);
  Attention<T, S, BLOCK>(problem, results, notes, shared, stages).run(most_workers);
}

constexpr int kMergeWarps = 16;     // of a block of the merge at most
constexpr int kSplitsAtOnce = 512;  // workers that a warp looks through at once

// How the merge is launched. Where a tile is many workers', many warps share a row, so that few come back for more parts.
struct MergeShape {
  int tiles;         // that may be split
  int warps;         // of a row, a power of 2
  int rows, blocks;  // of a block, and blocks of a tile
};

// Parts that a warp reads at once, of values of up to `width` elements: as many as registers have room for.
constexpr int parts_at_once(int width) { return width <= 128 ? 8 : 3; }

inline MergeShape merge_shape(const Problem& problem, int width, int workers) {
  const int64_t all = int64_t(problem.batch) * problem.requests.tokens * problem.tiles_of_token();
  const int tiles = int(all < workers ? all : workers), rows = problem.together * problem.rows_of_head();
  int warps = 1;
  while (warps < kMergeWarps && (warps * rows < kMergeWarps || warps * parts_at_once(width) <= workers / tiles)) warps *= 2;
  const int at_once = rows < kMergeWarps / warps ? rows : kMergeWarps / warps;
  return {tiles, warps, at_once, (rows + at_once - 1) / at_once};
}

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
    for (int i = lane; i < elements; i += 32) out[i] = from_float<T>(0.f);
    if (!results.lse) continue;
    for (int head = lane; head < problem.heads; head += 32) results.lse[at * problem.heads + head] = -INFINITY;
  }
}

// The worker with whom the `wanted`-th tile that is split begins, -1 where there are fewer. Every warp looks for itself.
__device__ inline int find_split(const Results& results, int workers, int wanted) {
  constexpr int kEach = kSplitsAtOnce / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = 0; base < workers; base += kSplitsAtOnce) {
    int parts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int worker = base + i * 32 + lane;
      parts[i] = worker < workers ? results.splits[worker].parts : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      unsigned some = __ballot_sync(kWarp, parts[i] > 0);
      const int found = __popc(some);
      if (wanted < found) {
        for (; wanted > 0; --wanted) some &= some - 1;
        return base + i * 32 + __ffs(int(some)) - 1;
      }
      wanted -= found;
    }
  }
  return -1;
}

// Rows of split tiles from their parts; `shape.tiles` times `shape.blocks` blocks of `shape.rows` times `shape.warps` warps.
//
// This kernel may begin before `attend` ends: until it has waited it reads arguments of the call alone and writes tokens that
// `attend` leaves out. All that ran before `attend`, and so all that may have had the results' memory, was done when that began;
// and whatever comes next waits for this kernel, which does not end before `attend` does. So every thread waits.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(32 * kMergeWarps, 2)
    merge(const __grid_constant__ Problem problem, const __grid_constant__ Results results, int workers, MergeShape shape) {
  constexpr int kAtOnce = parts_at_once(WIDTH), kEach = WIDTH / 32;
  EJKERNEL_SHARED(float, values, kMergeWarps* WIDTH);
  EJKERNEL_SHARED(float, maxima, kMergeWarps);
  EJKERNEL_SHARED(float, totals, kMergeWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp % shape.warps, size = problem.value.size;
  const int index = int(blockIdx.x) % shape.blocks * shape.rows + warp / shape.warps;  // of a tile's rows
  const int group = problem.group;
  int in_head;
  const int beside = divide(index, problem.rows_of_head(), in_head);
  clear_tokens<T>(problem, results);
  wait_for_last_kernel();
  const int first = find_split(results, workers, int(blockIdx.x) / shape.blocks);
  if (first < 0) return;
  const Split split = results.splits[first];
  const bool there = beside < problem.together && split.row % group + in_head < group;
  const int row = split.row + beside * group + in_head, head = row % problem.heads;
  const int batch = row / problem.heads / int(problem.requests.tokens);
  float sink = -INFINITY, factor = 1.f;
  if (there && problem.sinks) sink = problem.sinks[batch * problem.sinks_batch + head] * kLog2E;
  if (there && problem.value_scale)
    factor = problem.value_scale[batch * problem.value_scale_batch + head / group * problem.value_scale_head];
  float largest = -INFINITY, total = 0.f, sums[kEach] = {};
#pragma unroll 1
  for (int base = mine; there && base < split.parts; base += shape.warps * kAtOnce) {
    float lse[kAtOnce], found[kAtOnce][kEach];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int number = base + j * shape.warps;
      const int part = (first + number) * 2 + (number == 0), at = (part * problem.together + beside) * kRows + in_head;
      lse[j] = number < split.parts ? results.part_lse[at] : -INFINITY;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int channel = i * 32 + lane;
        found[j][i] = number < split.parts && channel < size ? results.part[int64_t(at) * size + channel] : 0.f;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float most = fmaxf(largest, lse[j]), shift = shift_of(most);
      const float kept = fast_exp2(largest - shift), weight = fast_exp2(lse[j] - shift);
      largest = most, total = total * kept + weight;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] = sums[i] * kept + weight * found[j][i];
    }
  }
  if (lane == 0) maxima[warp] = largest, totals[warp] = total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) values[warp * WIDTH + i * 32 + lane] = sums[i];
  __syncthreads();
  // Lane l knows of the row's l-th warp.
  const int warps_before = warp - mine;
  const float of_lane = lane < shape.warps ? maxima[warps_before + lane] : -INFINITY;
  const float most = fmaxf(Reducer::warp<Largest>(of_lane, 32), sink), shift = shift_of(most), weight = fast_exp2(of_lane - shift);
  total = Reducer::warp<Add>(lane < shape.warps ? totals[warps_before + lane] * weight : 0.f, 32) + fast_exp2(sink - shift);
  factor = total == 0.f ? 0.f : factor / total;
  T* out = static_cast<T*>(results.out) + int64_t(row) * size;
  for (int base = mine * 32; base < size; base += shape.warps * 32) {
    float value = 0.f;
    for (int other = 0; other < shape.warps; ++other) {
      value += values[(warps_before + other) * WIDTH + base + lane] * __shfl_sync(kWarp, weight, other);
    }
    if (there && base + lane < size) out[base + lane] = from_float<T>(value * factor);
  }
  if (there && mine == 0 && lane == 0 && results.lse)
    results.lse[row] = total == 0.f ? -INFINITY : (shift + log2f(total)) * kLn2;
}

}  // namespace ejkernel::paged_attention
