// Attention of packed queries over a paged cache: each worker walks over its share of the keys (schedule.cuh) with a running
// maximum and sum, and merge.cuh puts tiles together whose keys are shared.
//
// The warps of a block take turns at the keys of a tile, each with a ring of its own in shared memory, so that none waits for
// another before the tile is done. Where a tile has several key heads, warps take turns at those first, and fill their rings
// together: what lies side by side in memory is read at once, for which they wait for each other at every step. Logits are in
// units of log 2.
#pragma once

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"
#include "reduce.cuh"

namespace ejkernel::paged_attention {

// Beside the rings, in the same shared memory.
struct Notes {
  float largest[kWarps][kRows], sum[kWarps][kRows];  // of each warp's keys; sums are relative to their key head's maximum
  int seen[kWarps][kMaxStages];                      // bit k: key k of the step is visible
  float value_scale[kWarps];                         // of each warp's key head
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

// A warp's way through the keys of a tile up to `end`: each lane looks after one key of each step.
struct Cursor {
  const Problem& problem;
  const int32_t* entry;                 // of the block table
  int lowest, last, key, offset, page;  // page: -1 where the key is not visible

  __device__ Cursor(const Problem& problem, const Request& request, int local, int first_key, int end)
      : problem(problem), lowest(request.lowest(problem, local)), last(min(request.last(problem, local), end)), key(first_key) {
    const int before = problem.page.divide(first_key);
    offset = first_key - before * page_size(), entry = request.table(problem) + before;
    look_up();
  }

  __device__ int page_size() const { return int(problem.requests.page_size); }

  __device__ void look_up() { page = key >= lowest && key < last ? *entry : -1; }

  __device__ bool visible() const { return unsigned(page) < unsigned(problem.requests.pages); }

  __device__ int64_t byte_in(const Side& side) const { return visible() ? page * side.page + offset * side.token : -1; }

  // Of a packed side.
  __device__ uint32_t access_in(const Accesses& apart) const {
    return visible() ? uint32_t(page) * apart.page + uint32_t(offset) * apart.token : kNowhere;
  }

  __device__ void advance() {
    key += problem.turn, offset += problem.turn_rest, entry += problem.turn_pages;
    if (offset >= page_size()) offset -= page_size(), ++entry;
    look_up();
  }
};

// Where products are TURNED, keys are their rows, and up to 8 queries their columns: half of the products, and of the
// registers, that 16 rows of queries take.
template <typename T_, typename S_, int BLOCK_, bool TURNED>
struct Attention {
  using T = T_;                         // of queries and products
  using S = S_;                         // as pages hold them
  static constexpr int BLOCK = BLOCK_;  // at least the sizes of keys and values
  using Layout = Tile<T, S, BLOCK>;
  static constexpr int kTiles = Layout::kKeys / (TURNED ? 16 : 8), kLogits = 4 * kTiles;  // of a step's products, each [16, 8]
  static constexpr int kSums = BLOCK / (TURNED ? 16 : 8);
  static constexpr int kFirstLane = TURNED ? 4 : 1, kEndLane = TURNED ? 32 : 4;  // steps between lanes that share two rows
  using Logits = float[kTiles][4];
  struct Scales {  // of a key head
    float key = 1.f, value = 1.f;
  };

  const Problem& problem;
  const Results& results;
  Notes& notes;
  char* rings;
  int stages;
  int lane, warp, together;                  // key heads of a tile
  float largest[2], sum[2], sums[kSums][4];  // of this lane's two rows; sum of this lane's keys alone
  float unit[2];                             // of those rows' queries as the products have them

  __device__ Attention(const Problem& problem, const Results& results, Notes& notes, char* rings, int stages)
      : problem(problem),
        results(results),
        notes(notes),
        rings(rings),
        stages(stages),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        together(Layout::kShares ? problem.together : 1) {}

  // Of an element of a fragment of products: which of the lane's two rows of queries, and which of two keys or channels.
  static __device__ constexpr int row_in(int element) { return TURNED ? element % 2 : element % 4 / 2; }
  static __device__ constexpr int column_in(int element) { return TURNED ? element % 4 / 2 : element % 2; }
  static __device__ constexpr int element_of(int row, int column) { return TURNED ? 2 * column + row : 2 * row + column; }
  __device__ int my_row(int half) const { return TURNED ? 2 * (lane % 4) + half : lane / 4 + 8 * half; }

  // Of a tile's key heads, which one this warp looks after, and how many warps before it do.
  __device__ int my_head() const { return warp & (together - 1); }
  __device__ int my_turn() const { return warp >> together / 2; }

  __device__ char* step_at(int warp, int slot) const { return rings + (warp * stages + slot) * 2 * Layout::kBytes; }

  // This warp's part of what warps with the same keys copy: to the ring of the first of them on.
  template <int HEADS>
  __device__ void copy_part(const Cursor& cursor, const Side& side, const Accesses& apart, const char* from, int slot,
                            int beside) const {
    constexpr int kEach = sizeof(S);
    copy_rows<Layout::kKeys, kEach, BLOCK, HEADS>(step_at(warp - warp % HEADS, slot) + beside, stages * 2 * Layout::kBytes,
                                                  from, cursor.access_in(apart), apart.head, side.size * kEach, warp % HEADS,
                                                  lane);
  }

  __device__ void copy_side(const Cursor& cursor, const Side& side, const Accesses& apart, const char* from, int slot,
                            int beside) const {
    if (!side.packed) {
      copy_elements<Layout::kKeys, sizeof(S), BLOCK>(step_at(warp, slot) + beside, from + my_head() * side.head,
                                                     cursor.byte_in(side), side.size * int(sizeof(S)), lane);
      return;
    }
    if constexpr (Layout::kShares) {
      if (together == 2) return copy_part<2>(cursor, side, apart, from, slot, beside);
    }
    copy_part<1>(cursor, side, apart, from, slot, beside);
  }

  // Begin to copy the cursor's keys and values.
  __device__ void begin_step(Cursor& cursor, const char* keys, const char* values, int slot) {
    const unsigned seen = __ballot_sync(kWarp, cursor.visible());
    if (lane == 0) notes.seen[warp][slot] = int(seen & Layout::kAllSeen);
    copy_side(cursor, problem.key, problem.keys_apart, keys, slot, 0);
    copy_side(cursor, problem.value, problem.values_apart, values, slot, Layout::kBytes);
    cursor.advance();
  }

  __device__ bool is_bf16() const { return Layout::kIsBytes ? problem.is_bf16 : std::is_same_v<T, __nv_bfloat16>; }

  // This lane's four in the `step`-th 16 columns of a row of queries, as they are stored: of an operand's first pair, then of
  // its second; 0 for rows and columns that are not there.
  __device__ Pack<uint16_t, 4> query_pairs(const char* from, const TileOf& tile, int half, int step) const {
    constexpr int kRun = Layout::kIsBytes ? 4 : 2;  // that lie side by side
    const int row = lane / 4 + half * 8, size = problem.query_size;
    Pack<uint16_t, 4> bits = {};
#pragma unroll
    for (int i = 0; i < 4; i += kRun) {
      const int channel = Layout::query_channel(step, i / 2, lane);
      if (row >= tile.rows || channel >= size) continue;
      const auto some = load<uint16_t, kRun>(reinterpret_cast<const uint16_t*>(from) + row * size + channel);
#pragma unroll
      for (int j = 0; j < kRun; ++j) bits.data[i + j] = some.data[j];
    }
    return bits;
  }

  // Beside stored bytes, queries of bfloat16 become float16, in units of a power of 2 for each row that brings its largest
  // number to 2^14 ... 2^15: nothing overflows, and what is lost is 2^-39 of the largest. Of a row with an infinity nothing
  // else is left, nor does it matter.
  __device__ float find_unit(const char* from, const TileOf& tile, int half) const {
    int bits_of_most = 0;  // magnitudes are in the order of their bits
#pragma unroll
    for (int step = 0; step < BLOCK / 16; ++step) {
      const Pack<uint16_t, 4> bits = query_pairs(from, tile, half, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) bits_of_most = max(bits_of_most, bits.data[i] & 0x7fff);
    }
    float most = __builtin_bit_cast(float, bits_of_most << 16);
    most = fmaxf(most, __shfl_xor_sync(kWarp, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kWarp, most, 2));
    const int exponent = max(__builtin_bit_cast(int, most) >> 23, 15);
    return __builtin_bit_cast(float, (exponent - 14) << 23);
  }

  // Begin to copy the rows of queries of this warp's key head, which lie one after the other.
  __device__ void copy_queries(char* to, const Request& request, const TileOf& tile) const {
    const char* from = static_cast<const char*>(problem.query) + tile.row(problem, request, my_head()) * problem.query_size * 2;
#pragma unroll 1
    for (int byte = lane * kQueryBytes; byte < tile.rows * problem.query_size * 2; byte += 32 * kQueryBytes)
      copy_bytes_ahead<kQueryBytes>(to + byte, from + byte, true);
    commit_copies();
  }

  // A query's number as products beside stored bytes have it.
  __device__ float number_of(uint32_t bits) const {
    return problem.is_bf16 ? __builtin_bit_cast(float, bits << 16) : __half2float(__half_raw{uint16_t(bits)});
  }

  __device__ void read_queries(Queries<BLOCK>& queries, const char* from, const TileOf& tile) {
    constexpr int kEach = Queries<BLOCK>::kEach, kMine = BLOCK / 16 / kEach;
    const int first = Queries<BLOCK>::kFirst * warp;
    Pack<uint32_t, 4> mine[kMine] = {};
#pragma unroll
    for (int half = 0; half < (TURNED ? 1 : 2); ++half) {
      unit[half] = 1.f;
      if (half == 1 && !problem.fills_tiles()) continue;
      if (Layout::kIsBytes && problem.is_bf16) unit[half] = find_unit(from, tile, half);
      const float inverse = __builtin_bit_cast(float, 0x7f000000u - __builtin_bit_cast(uint32_t, unit[half]));
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const Pack<uint16_t, 4> bits = query_pairs(from, tile, half, first + i * kEach);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t low = bits.data[2 * pair], high = bits.data[2 * pair + 1];
          mine[i].data[2 * pair + half] =
              Layout::kIsBytes ? pair_of<T>(number_of(low) * inverse, number_of(high) * inverse) : low | high << 16;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) queries.set(first + i * kEach, mine[i]);
    queries.share();
    if constexpr (TURNED) {  // a lane's products are of other rows than the queries that it read
      const float read = unit[0];
#pragma unroll
      for (int half = 0; half < 2; ++half) unit[half] = __shfl_sync(kWarp, read, 4 * my_row(half));
    }
  }

  // Products to logits; -inf for keys that are not visible.
  __device__ void scale_products(Logits& logits, float factor, unsigned seen) const {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      float& logit = logits[i / 4][i % 4];
      if constexpr (Layout::kIsBytes) logit *= unit[row_in(i)];
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
      const int key = TURNED ? i / 4 * 16 + 8 * column_in(i) + lane / 4 : i / 4 * 8 + lane % 4 * 2 + column_in(i);
      if (!(seen >> key & 1u)) logits[i / 4][i % 4] = -INFINITY;
    }
  }

  // The running maximum and sum with these logits, which become weights; sums so far are brought to the new maximum.
  __device__ void weigh(Logits& logits) {
    bool changed = false;
    float kept[2] = {1.f, 1.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto mine = [&](int i) -> float& { return logits[i / 2][element_of(half, i % 2)]; };
      if (!TURNED && half == 1 && !problem.fills_tiles()) {  // no query is there, nor is the result written
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) mine(i) = 0.f;
        continue;
      }
      float most = mine(0);
#pragma unroll
      for (int i = 1; i < 2 * kTiles; ++i) most = fmaxf(most, mine(i));
#pragma unroll
      for (int step = kFirstLane; step < kEndLane; step *= 2) most = fmaxf(most, __shfl_xor_sync(kWarp, most, step));
      most = fmaxf(most, largest[half]);
      const float shift = shift_of(most);
      kept[half] = fast_exp2(largest[half] - shift);
      changed |= most != largest[half];
      largest[half] = most;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        mine(i) = fast_exp2(mine(i) - shift);
        total += mine(i);
      }
      sum[half] = sum[half] * kept[half] + total;
    }
    if (!__any_sync(kWarp, changed)) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] *= kept[row_in(j)];
    }
  }

  // The keys and values in a slot, those that are `seen`, join the sums.
  __device__ void take_step(const Queries<BLOCK>& queries, float factor, int slot, unsigned seen) {
    if (seen == 0) return;
    Logits logits = {};
    const char* keys = step_at(warp, slot);
    Layout::template multiply_keys<TURNED>(logits, queries, keys, lane);
    scale_products(logits, factor, seen);
    weigh(logits);
    uint32_t weights[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      weights[i] = pair_of<T>(logits[i / 2][i % 2 * 2], logits[i / 2][i % 2 * 2 + 1]);
      if constexpr (TURNED) weights[i] = turned_matrix(weights[i]);
    }
    Layout::template add_values<TURNED>(sums, weights, keys + Layout::kBytes, lane);
  }

  // What lanes have copied is there for those that read it: the warps that fill their rings together.
  __device__ void meet() const {
    if (together == 2) {
      meet_beside(warp / 2);
    } else {
      __syncwarp();
    }
  }

  // On their way from here on: they may come from memory.
  __device__ Scales read_scales(const Request& request, int key_head) const {
    Scales found;
    if (problem.key_scale)
      found.key = problem.key_scale[request.batch * problem.key_scale_batch + key_head * problem.key_scale_head];
    if (problem.value_scale)
      found.value = problem.value_scale[request.batch * problem.value_scale_batch + key_head * problem.value_scale_head];
    return found;
  }

  // What brings products to logits, or beside a cap to what `scale_products` makes them of.
  __device__ float factor_of(float key_scale) const {
    return problem.scale * key_scale * (problem.soft_cap > 0.f ? 2.f * kLog2E / problem.soft_cap : kLog2E);
  }

  // Steps `from` to `to` of a tile, at which warps take turns; rows hold this warp's share of them afterwards.
  __device__ void walk(const Request& request, const TileOf& tile, int from, int to) {
    const char* keys = held(problem.key.data + request.batch * problem.key.batch + tile.key_head * problem.key.head);
    const char* values = held(problem.value.data + request.batch * problem.value.batch + tile.key_head * problem.value.head);
    const int first_key = (request.first_step + from + my_turn()) * Layout::kKeys + lane % Layout::kKeys;
    Cursor cursor(problem, request, tile.local, first_key, (request.first_step + to) * Layout::kKeys);
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = -INFINITY, sum[half] = 0.f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    Queries<BLOCK> queries(rings + ring_bytes<S, BLOCK>(stages), lane);
    static_assert(kRows * BLOCK * 2 <= 2 * Layout::kBytes);
    char* const rows = step_at(warp, stages - 1);  // as they are stored, until the ring is filled to its end
    const Scales scales = read_scales(request, tile.key_head + my_head());
    const int queries_at = stages > kLeastStages ? 1 - stages : -stages;  // behind the first keys, where others follow
    const int steps = (to - from + (1 << problem.turns_bits) - 1) >> problem.turns_bits;
    int slot = 0, free = 0, rest = steps;  // rest: steps that have not begun
    float factor = 0.f;
#pragma unroll 1
    for (int step = -stages; step < steps; ++step) {
      if (step == -1) {  // while all but the last keys of the ring are on their way
        factor = factor_of(scales.key);
        if (lane == 0) notes.value_scale[warp] = scales.value;
        wait_for_copies(-1 - queries_at);
        __syncwarp();
        read_queries(queries, rows, tile);
        meet();  // and all lanes that fill this end of the ring have read theirs
      }
      unsigned seen = 0;
      if (step >= 0) {
        wait_for_copies(stages - 1 - (step > 0));
        meet();                                   // and every lane is done with the slot of the step before, if there was one
        seen = unsigned(notes.seen[warp][slot]);  // on its way while the next step begins
      }
      if (step == queries_at) copy_queries(rows, request, tile);
      if (step != 0) {
        if (rest-- > 0) begin_step(cursor, keys, values, free);
        commit_copies();
        free = free + 1 == stages ? 0 : free + 1;
      }
      if (step < 0) continue;
      take_step(queries, factor, slot, seen);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    wait_for_copies(0);
  }

  // The sum of a lane's rows over the lanes that share them.
  __device__ void sum_lanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = kFirstLane; step < kEndLane; step *= 2) sum[half] += __shfl_xor_sync(kWarp, sum[half], step);
    }
  }

  // This lane's sums of one of its rows, times `factor`, to where the row lies.
  __device__ void put_row(float* to, int half, float factor) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float first = sums[i][element_of(half, 0)] * factor, second = sums[i][element_of(half, 1)] * factor;
      const int channel = TURNED ? i * 16 + lane / 4 * 2 : Layout::value_channel(i, 0, lane);
      if constexpr (TURNED || !Layout::kIsBytes) {
        *reinterpret_cast<float2*>(to + channel) = {first, second};
      } else {
        to[channel] = first, to[channel + 2] = second;
      }
    }
  }

  // Whether this lane speaks for those that share its rows.
  __device__ bool speaks() const { return lane % kEndLane / kFirstLane == 0; }

  // This warp's sums as one of the parts that begin with `part`.
  __device__ void write_part(int part, int rows) {
    sum_lanes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = my_row(half);
      if (row >= rows) continue;
      const int64_t at = int64_t(part + my_turn()) * problem.rows_of_part() + my_head() * problem.rows_of_head() + row;
      put_row(results.part + at * BLOCK, half, 1.f);
      if (speaks()) results.part_weight[at] = {largest[half], sum[half]};
    }
  }

  // The warps' sums into shared memory, all relative to their key head's maximum.
  __device__ void gather(int rows) {
    sum_lanes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (speaks()) notes.largest[warp][my_row(half)] = largest[half];
    }
    __syncthreads();  // and all warps are done with their rings
    float* all = reinterpret_cast<float*>(rings) + warp * kRows * BLOCK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = my_row(half);
      if (row >= rows) continue;
      const float kept = fast_exp2(largest[half] - shift_of(of_warps<Largest>(notes.largest, row)));
      if (speaks()) notes.sum[warp][row] = sum[half] * kept;
      put_row(all + row * BLOCK, half, kept);
    }
    __syncthreads();
  }

  // Of all warps that look after this one's key head.
  template <class Op>
  __device__ float of_warps(const float (&values)[kWarps][kRows], int row) const {
    float found = Op::kNeutral;
#pragma unroll 1
    for (int other = my_head(); other < kWarps; other += together) found = Op::of(found, values[other][row]);
    return found;
  }

  // Rows of this warp's key head: of a tile that is `whole` into the results, of another one as part `part`.
  __device__ void write(const Request& request, const TileOf& tile, bool whole, int part) const {
    constexpr int kEach = BLOCK < 128 ? 2 : 4;  // of a lane at once
    const float* all = reinterpret_cast<const float*>(rings);
    const int size = problem.value.size, first_part = part * problem.rows_of_part() + my_head() * problem.rows_of_head();
    const int64_t first = tile.row(problem, request, my_head());
#pragma unroll 1
    for (int row = my_turn(); row < tile.rows; row += kWarps >> together / 2) {
      float most = of_warps<Largest>(notes.largest, row), shift = shift_of(most), kept = 1.f;
      float total = of_warps<Add>(notes.sum, row);
      if (whole && problem.sinks) {
        const int head = tile.head(problem, my_head()) + row;
        const float sink = problem.sinks[request.batch * problem.sinks_batch + head] * kLog2E;
        most = fmaxf(most, sink);
        kept = fast_exp2(shift - shift_of(most));
        shift = shift_of(most);
        total = total * kept + fast_exp2(sink - shift);
      }
      float factor = 1.f;
      if (whole) factor = total == 0.f ? 0.f : kept * fast_inverse(total) * notes.value_scale[warp];
#pragma unroll
      for (int channel = lane * kEach; channel < BLOCK; channel += 32 * kEach) {
        Pack<float, kEach> values = {};
#pragma unroll 1
        for (int other = my_head(); other < kWarps; other += together) {
          const auto more = load<float, kEach>(all + (other * kRows + row) * BLOCK + channel);
#pragma unroll
          for (int i = 0; i < kEach; ++i) values.data[i] += more.data[i];
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) values.data[i] *= factor;
        if (whole) {
          write_results(results.out, is_bf16(), (first + row) * size, channel, size, values);
        } else {
          store(results.part + int64_t(first_part + row) * BLOCK + channel, values);
        }
      }
      if (lane == 0 && whole && results.lse)
        results.lse[first + row] = total == 0.f ? -INFINITY : (shift + log2f(total)) * kLn2;
      if (lane == 0 && !whole) results.part_weight[first_part + row] = {most, total};
    }
    __syncthreads();  // before the rings are filled anew
  }

  __device__ void run(Divisor workers) {
    const int worker = blockIdx.x;
    Request::fetch_tables_ahead(problem);
    if (threadIdx.x == 0) results.splits[worker].workers = 0;
    if (problem.requests_in_all == 0) return;
    const Start start = find_start(problem, workers);
    if (start.index < 0) return;
    const int share_end = start.shares.begin(worker + 1);
    int index = start.index, before = start.before, at = start.shares.begin(worker);
    Request request = start.request;
    while (at < share_end) {
      int from;
      const int number = divide(at - before, request.steps, from);
      const int tile_begin = at - from, to = min(request.steps, share_end - tile_begin);
      const TileOf tile(problem, request, number);
      const bool begins = from == 0, ends = to == request.steps;
      const int part = (worker * 2 + begins) * parts_of_block(sizeof(S), BLOCK, problem.group, together);
      at = tile_begin + to;
      if (at >= share_end) start_next_kernel();  // it finds out meanwhile what it is to put together
      walk(request, tile, from, to);
      if (begins && !ends && threadIdx.x == 0) {
        const int last = start.shares.owner(tile_begin + request.steps - 1);
        results.splits[worker] = {int(tile.row(problem, request, 0)), last - worker + 1};
      }
      if (TURNED && !(begins && ends)) {
        write_part(part, tile.rows);
        __syncthreads();  // before the rings are filled anew
      } else {
        gather(tile.rows);
        write(request, tile, TURNED || (begins && ends), part);
      }
      const int next = before + request.tiles(problem) * request.steps;
      if (at >= next && at < share_end) {
        before = next;
        if (!to_next_request(problem, request, index)) return;
      }
    }
  }
};

// `workers` blocks of kThreads. They may begin before the kernel ahead of them has ended, and touch nothing until it has.
template <typename T, typename S, int BLOCK, bool TURNED>
__global__ void __launch_bounds__(kThreads, TURNED || BLOCK == 64 ? 3 : 2)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ Results results, Divisor workers, int stages) {
  EJKERNEL_SHARED_REST(char, shared);
  wait_for_last_kernel();
  Notes& notes = *reinterpret_cast<Notes*>(shared + ring_bytes<S, BLOCK>(stages) + Queries<BLOCK>::kSharedBytes);
  Attention<T, S, BLOCK, TURNED>(problem, results, notes, shared, stages).run(workers);
}

}  // namespace ejkernel::paged_attention
