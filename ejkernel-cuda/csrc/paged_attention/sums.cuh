// What the warps of a worker make of a tile's keys and values, however those come to shared memory (kernels.cuh, boxes.cuh):
// each has a running maximum and sum of some of its keys, and merge.cuh puts tiles together whose keys several workers had.
// Logits are in units of log 2.
#pragma once

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"
#include "reduce.cuh"

namespace ejkernel::paged_attention {

// Beside keys and values, in the same shared memory.
struct Notes {
  float largest[kWarps][kRows], sum[kWarps][kRows];  // of each warp's keys; sums are relative to their key head's maximum
  int seen[kWarps][kMaxStages];                      // bit k: key k of the step is visible; of each warp, or of each turn
  float value_scale[kWarps];                         // of each warp's key head
};

// Bytes of the weighted values of each warp when a tile is done, float [kWarps, kRows, BLOCK].
constexpr int64_t gathered_bytes(int width) { return int64_t(sizeof(float)) * kWarps * kRows * width; }

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

// Where products are TURNED, keys are their rows, and up to 8 queries their columns: half of the products, and of the
// registers, that 16 rows of queries take.
template <typename LAYOUT, bool TURNED>
struct Sums {
  using Layout = LAYOUT;
  using T = typename Layout::T;                    // of queries and products
  using S = typename Layout::S;                    // as pages hold them
  static constexpr int BLOCK = Layout::kChannels;  // at least the sizes of keys and values
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
  Layout layout;
  int lane, warp, together;                  // key heads of a tile
  float largest[2], sum[2], sums[kSums][4];  // of this lane's two rows; sum of this lane's keys alone
  float unit[2];                             // of those rows' queries as the products have them

  __device__ Sums(const Problem& problem, const Results& results, Notes& notes)
      : problem(problem),
        results(results),
        notes(notes),
        layout(problem),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        together(Layout::kShares ? problem.together : 1) {}

  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = -INFINITY, sum[half] = 0.f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
  }

  // The rows of queries of this warp's key head, which lie one after the other.
  __device__ const char* queries_of(const Request& request, const TileOf& tile) const {
    return static_cast<const char*>(problem.query) + tile.row(problem, request, my_head()) * problem.query_size * 2;
  }

  // Of an element of a fragment of products: which of the lane's two rows of queries, and which of two keys or channels.
  static __device__ constexpr int row_in(int element) { return TURNED ? element % 2 : element % 4 / 2; }
  static __device__ constexpr int column_in(int element) { return TURNED ? element % 4 / 2 : element % 2; }
  static __device__ constexpr int element_of(int row, int column) { return TURNED ? 2 * column + row : 2 * row + column; }
  __device__ int my_row(int half) const { return TURNED ? 2 * (lane % 4) + half : lane / 4 + 8 * half; }

  // Of a tile's key heads, which one this warp looks after, and how many warps before it do.
  __device__ int my_head() const { return warp & (together - 1); }
  __device__ int my_turn() const { return warp >> together / 2; }

  __device__ bool is_bf16() const { return Layout::kIsBytes ? problem.is_bf16 : std::is_same_v<T, __nv_bfloat16>; }

  // This lane's four in the `step`-th 16 columns of a row of queries, as they are stored: of an operand's first pair, then of
  // its second; 0 for rows and columns that are not there.
  __device__ Pack<uint16_t, 4> query_pairs(const char* from, const TileOf& tile, int half, int step) const {
    constexpr int kRun = Layout::kIsBytes ? 4 : 2;  // that lie side by side
    const int row = lane / 4 + half * 8, size = problem.query_size;
    Pack<uint16_t, 4> bits = {};
#pragma unroll
    for (int i = 0; i < 4; i += kRun) {
      const int channel = layout.query_channel(step, i / 2, lane);
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

  // A step's keys and values, those that are `seen`, join the sums.
  __device__ void take(const Queries<BLOCK>& queries, float factor, const char* keys, const char* values, unsigned seen) {
    Logits logits = {};
    layout.template multiply_keys<TURNED>(logits, queries, keys, lane);
    scale_products(logits, factor, seen);
    weigh(logits);
    uint32_t weights[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      weights[i] = pair_of<T>(logits[i / 2][i % 2 * 2], logits[i / 2][i % 2 * 2 + 1]);
      if constexpr (TURNED) weights[i] = turned_matrix(weights[i]);
    }
    layout.template add_values<TURNED>(sums, weights, values, lane);
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
    if constexpr (Layout::kInRuns) {
#pragma unroll
      for (int i = 0; i < kSums; i += 2) {
        Pack<float, 4> some;
#pragma unroll
        for (int j = 0; j < 4; ++j) some.data[j] = sums[i + j / 2][element_of(half, j % 2)] * factor;
        store(to + lane / 4 * (2 * kSums) + 2 * i, some);
      }
    } else {
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
  __device__ void gather(float* gathered, int rows) {
    sum_lanes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (speaks()) notes.largest[warp][my_row(half)] = largest[half];
    }
    layout.meet_all();  // and all warps are done with what was there
    float* all = gathered + warp * kRows * BLOCK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = my_row(half);
      if (row >= rows) continue;
      const float kept = fast_exp2(largest[half] - shift_of(of_warps<Largest>(notes.largest, row)));
      if (speaks()) notes.sum[warp][row] = sum[half] * kept;
      put_row(all + row * BLOCK, half, kept);
    }
    layout.meet_all();
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
  __device__ void write(const float* all, const Request& request, const TileOf& tile, bool whole, int part) const {
    constexpr int kEach = BLOCK < 128 ? 2 : 4;  // of a lane at once
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
    layout.meet_all();  // before anything else comes there
  }

  // What was found of a piece: results of a whole tile, else a part of it.
  __device__ void finish(const Piece& piece, float* gathered) {
    const bool whole = piece.whole();
    if (piece.begins() && !whole && threadIdx.x == 0) results.splits[blockIdx.x] = piece.split(problem);
    const int part = (int(blockIdx.x) * 2 + piece.begins()) * parts_of_block(sizeof(S), BLOCK, problem.group, together);
    if (TURNED && !whole) return write_part(part, piece.tile.rows);
    gather(gathered, piece.tile.rows);
    write(gathered, piece.request, piece.tile, TURNED || whole, part);
  }
};

}  // namespace ejkernel::paged_attention
