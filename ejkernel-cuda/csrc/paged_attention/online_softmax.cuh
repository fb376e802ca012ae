// The warps' attention over a tile's keys and values in shared memory, loaded by kernels.cuh or tma_pages.cuh: each warp keeps
// a running maximum and sum of its keys; combine.cuh combines tiles that several workers split. Logits are in log2 units.
#pragma once

#include "paged_attention/results.cuh"
#include "paged_attention/schedule.cuh"
#include "reduce.cuh"

namespace ejkernel::paged_attention {

// State of the warps in shared memory, beside keys and values.
struct WarpState {
  float row_max[kWarps][kRows], row_sum[kWarps][kRows];  // of each warp's keys; sums are relative to their key head's maximum
  int visible_keys[kWarps][kMaxStages];                  // bit k: key k of the step is visible; per warp
  float value_scale[kWarps];                             // of each warp's key head
};

// Bytes of the warps' unnormalised outputs at the end of a tile, float [kWarps, kRows, BLOCK].
constexpr int64_t gathered_bytes(int width) { return int64_t(sizeof(float)) * kWarps * kRows * width; }

// A tile's queries as MMA fragments: in registers, or in shared memory for wide heads, which would need too many.
template <int BLOCK, bool IN_REGISTERS = BLOCK <= 128>
struct Queries {
  using Fragment = Pack<uint32_t, 4>;
  static constexpr int64_t kSharedBytes = 0;
  static constexpr int kFirst = 0, kEach = 1;  // warp w builds every kEach-th from kFirst * w on
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

// SWAP_AB: keys are the rows of the MMA, and up to 8 queries its columns; half of the MMAs and registers that 16 rows of
// queries take.
template <typename LAYOUT, bool SWAP_AB>
struct OnlineSoftmax {
  using Layout = LAYOUT;
  using T = typename Layout::T;                    // of queries and MMA operands
  using S = typename Layout::S;                    // of stored pages
  static constexpr int BLOCK = Layout::kChannels;  // at least the head sizes of keys and values
  static constexpr int kTiles = Layout::kKeys / (SWAP_AB ? 16 : 8),
                       kLogits = 4 * kTiles;  // of a step's MMA tiles, each [16, 8]
  static constexpr int kSums = BLOCK / (SWAP_AB ? 16 : 8);
  static constexpr int kFirstLane = SWAP_AB ? 4 : 1,
                       kEndLane = SWAP_AB ? 32 : 4;  // shuffle steps between lanes that share two rows
  using Logits = float[kTiles][4];
  struct Scales {  // of a key head
    float key = 1.f, value = 1.f;
  };

  const Problem& problem;
  const Results& results;
  WarpState& warp_state;
  Layout layout;
  int lane, warp, tile_key_heads;               // key heads of a tile
  float row_max[2], row_sum[2], acc[kSums][4];  // of this lane's two rows; row_sum of this lane's keys only
  float pow2_scale[2];                          // power-of-two scale of those rows' queries

  __device__ OnlineSoftmax(const Problem& problem, const Results& results, WarpState& warp_state)
      : problem(problem),
        results(results),
        warp_state(warp_state),
        layout(problem),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        tile_key_heads(Layout::kMultiHead ? problem.tile_key_heads : 1) {}

  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[half] = -INFINITY, row_sum[half] = 0.f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
  }

  // The queries of this warp's key head, which are contiguous.
  __device__ const char* queries_of(const Request& request, const TileCoord& tile) const {
    return static_cast<const char*>(problem.query) + tile.row(problem, request, tile_head()) * problem.query_size * 2;
  }

  // The lane's row of queries, and its key or channel, of an element of an MMA fragment.
  static __device__ constexpr int row_in(int element) { return SWAP_AB ? element % 2 : element % 4 / 2; }
  static __device__ constexpr int column_in(int element) { return SWAP_AB ? element % 4 / 2 : element % 2; }
  static __device__ constexpr int element_of(int row, int column) { return SWAP_AB ? 2 * column + row : 2 * row + column; }
  __device__ int row_of_half(int half) const { return SWAP_AB ? 2 * (lane % 4) + half : lane / 4 + 8 * half; }

  // This warp's key head within the tile, and its position among the warps of that head.
  __device__ int tile_head() const { return warp & (tile_key_heads - 1); }
  __device__ int interleave_index() const { return warp >> tile_key_heads / 2; }

  __device__ bool is_bf16() const { return Layout::kIsOneByte ? problem.is_bf16 : std::is_same_v<T, __nv_bfloat16>; }

  // This lane's four elements in the `step`-th 16 columns of a row of queries, as stored: of an operand's first pair, then of
  // its second; 0 outside of the array.
  __device__ Pack<uint16_t, 4> query_pairs(const char* from, const TileCoord& tile, int half, int step) const {
    constexpr int kRun = Layout::kIsOneByte ? 4 : 2;  // contiguous elements
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

  // For one-byte pages, bfloat16 queries become float16, scaled per row by a power of 2 that brings the largest magnitude to
  // 2^14 ... 2^15: nothing overflows, and the loss is 2^-39 of the largest. A row with an infinity loses everything else, which
  // does not matter.
  __device__ float find_pow2_scale(const char* from, const TileCoord& tile, int half) const {
    int bits_of_most = 0;  // magnitudes order as their bits
#pragma unroll
    for (int step = 0; step < BLOCK / 16; ++step) {
      const Pack<uint16_t, 4> bits = query_pairs(from, tile, half, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) bits_of_most = max(bits_of_most, bits.data[i] & 0x7fff);
    }
    float new_max = __builtin_bit_cast(float, bits_of_most << 16);
    new_max = fmaxf(new_max, __shfl_xor_sync(kWarp, new_max, 1));
    new_max = fmaxf(new_max, __shfl_xor_sync(kWarp, new_max, 2));
    const int exponent = max(__builtin_bit_cast(int, new_max) >> 23, 15);
    return __builtin_bit_cast(float, (exponent - 14) << 23);
  }

  // A query element as float, for one-byte pages.
  __device__ float number_of(uint32_t bits) const {
    return problem.is_bf16 ? __builtin_bit_cast(float, bits << 16) : __half2float(__half_raw{uint16_t(bits)});
  }

  __device__ void read_queries(Queries<BLOCK>& queries, const char* from, const TileCoord& tile) {
    constexpr int kEach = Queries<BLOCK>::kEach, kMine = BLOCK / 16 / kEach;
    const int first = Queries<BLOCK>::kFirst * warp;
    Pack<uint32_t, 4> mine[kMine] = {};
#pragma unroll
    for (int half = 0; half < (SWAP_AB ? 1 : 2); ++half) {
      pow2_scale[half] = 1.f;
      if (half == 1 && !problem.fills_tiles()) continue;
      if (Layout::kIsOneByte && problem.is_bf16) pow2_scale[half] = find_pow2_scale(from, tile, half);
      const float inverse = __builtin_bit_cast(float, 0x7f000000u - __builtin_bit_cast(uint32_t, pow2_scale[half]));
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const Pack<uint16_t, 4> bits = query_pairs(from, tile, half, first + i * kEach);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t low = bits.data[2 * pair], high = bits.data[2 * pair + 1];
          mine[i].data[2 * pair + half] =
              Layout::kIsOneByte ? pair_of<T>(number_of(low) * inverse, number_of(high) * inverse) : low | high << 16;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) queries.set(first + i * kEach, mine[i]);
    queries.share();
    if constexpr (SWAP_AB) {  // a lane's accumulators have other rows than the queries that it read
      const float read = pow2_scale[0];
#pragma unroll
      for (int half = 0; half < 2; ++half) pow2_scale[half] = __shfl_sync(kWarp, read, 4 * row_of_half(half));
    }
  }

  // Turn dot products into logits; -inf for masked keys.
  __device__ void scale_products(Logits& logits, float factor, unsigned visible_keys) const {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      float& logit = logits[i / 4][i % 4];
      if constexpr (Layout::kIsOneByte) logit *= pow2_scale[row_in(i)];
      logit *= factor;
    }
    if (problem.soft_cap > 0.f) {  // tanh(x) = 1 - 2 / (e^2x + 1), with factor = 2 log2(e) scale / cap
#pragma unroll
      for (int i = 0; i < kLogits; ++i) {
        float& logit = logits[i / 4][i % 4];
        logit = problem.soft_cap * kLog2E * (1.f - 2.f * fast_reciprocal(fast_exp2(logit) + 1.f));
      }
    }
    if (visible_keys == Layout::kAllVisible) return;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const int key = SWAP_AB ? i / 4 * 16 + 8 * column_in(i) + lane / 4 : i / 4 * 8 + lane % 4 * 2 + column_in(i);
      if (!(visible_keys >> key & 1u)) logits[i / 4][i % 4] = -INFINITY;
    }
  }

  // Online-softmax update: turn logits into weights, and rescale the accumulators to the new row maximum.
  __device__ void softmax_step(Logits& logits) {
    bool changed = false;
    float rescale[2] = {1.f, 1.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto mine = [&](int i) -> float& { return logits[i / 2][element_of(half, i % 2)]; };
      if (!SWAP_AB && half == 1 && !problem.fills_tiles()) {  // no query has these rows, and they are not written
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) mine(i) = 0.f;
        continue;
      }
      float new_max = mine(0);
#pragma unroll
      for (int i = 1; i < 2 * kTiles; ++i) new_max = fmaxf(new_max, mine(i));
#pragma unroll
      for (int step = kFirstLane; step < kEndLane; step *= 2) new_max = fmaxf(new_max, __shfl_xor_sync(kWarp, new_max, step));
      new_max = fmaxf(new_max, row_max[half]);
      const float shift = shift_of(new_max);
      rescale[half] = fast_exp2(row_max[half] - shift);
      changed |= new_max != row_max[half];
      row_max[half] = new_max;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        mine(i) = fast_exp2(mine(i) - shift);
        total += mine(i);
      }
      row_sum[half] = row_sum[half] * rescale[half] + total;
    }
    if (!__any_sync(kWarp, changed)) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] *= rescale[row_in(j)];
    }
  }

  // Add a step's visible keys and values to the accumulators.
  __device__ void update(const Queries<BLOCK>& queries, float factor, const char* keys, const char* values,
                         unsigned visible_keys) {
    Logits logits = {};
    layout.template multiply_keys<SWAP_AB>(logits, queries, keys, lane);
    scale_products(logits, factor, visible_keys);
    softmax_step(logits);
    uint32_t weights[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      weights[i] = pair_of<T>(logits[i / 2][i % 2 * 2], logits[i / 2][i % 2 * 2 + 1]);
      if constexpr (SWAP_AB) weights[i] = movmatrix_trans(weights[i]);
    }
    layout.template add_values<SWAP_AB>(acc, weights, values, lane);
  }

  // Issue these loads early: they may miss the caches.
  __device__ Scales read_scales(const Request& request, int key_head) const {
    Scales found;
    if (problem.key_scale)
      found.key = problem.key_scale[request.batch * problem.key_scale_batch + key_head * problem.key_scale_head];
    if (problem.value_scale)
      found.value = problem.value_scale[request.batch * problem.value_scale_batch + key_head * problem.value_scale_head];
    return found;
  }

  // The factor from dot products to logits, or to the operand of the tanh with a soft cap.
  __device__ float factor_of(float key_scale) const {
    return problem.scale * key_scale * (problem.soft_cap > 0.f ? 2.f * kLog2E / problem.soft_cap : kLog2E);
  }

  // Reduce a lane's row sums over the lanes that share its rows.
  __device__ void sum_lanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = kFirstLane; step < kEndLane; step *= 2) row_sum[half] += __shfl_xor_sync(kWarp, row_sum[half], step);
    }
  }

  // Write this lane's accumulators of one of its rows, times `factor`.
  __device__ void store_row(float* to, int half, float factor) const {
    if constexpr (Layout::kContiguousChannels) {
#pragma unroll
      for (int i = 0; i < kSums; i += 2) {
        Pack<float, 4> some;
#pragma unroll
        for (int j = 0; j < 4; ++j) some.data[j] = acc[i + j / 2][element_of(half, j % 2)] * factor;
        store(to + lane / 4 * (2 * kSums) + 2 * i, some);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const float first = acc[i][element_of(half, 0)] * factor, second = acc[i][element_of(half, 1)] * factor;
        const int channel = SWAP_AB ? i * 16 + lane / 4 * 2 : Layout::value_channel(i, 0, lane);
        if constexpr (SWAP_AB || !Layout::kIsOneByte) {
          *reinterpret_cast<float2*>(to + channel) = {first, second};
        } else {
          to[channel] = first, to[channel + 2] = second;
        }
      }
    }
  }

  // Whether this lane writes for the lanes that share its rows.
  __device__ bool is_row_leader() const { return lane % kEndLane / kFirstLane == 0; }

  // Write this warp's accumulators as one of the partial results from `partial` on.
  __device__ void store_partial(int partial, int rows) {
    sum_lanes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_half(half);
      if (row >= rows) continue;
      const int64_t at =
          int64_t(partial + interleave_index()) * problem.rows_per_partial() + tile_head() * problem.rows_of_head() + row;
      store_row(results.partial + at * BLOCK, half, 1.f);
      if (is_row_leader()) results.partial_stats[at] = {row_max[half], row_sum[half]};
    }
  }

  // Gather the warps' accumulators in shared memory, relative to their key head's maximum.
  __device__ void gather(float* gathered, int rows) {
    sum_lanes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_row_leader()) warp_state.row_max[warp][row_of_half(half)] = row_max[half];
    }
    layout.sync_consumers();  // all warps have read the ring buffers
    float* all = gathered + warp * kRows * BLOCK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_half(half);
      if (row >= rows) continue;
      const float rescale = fast_exp2(row_max[half] - shift_of(reduce_warps<Max>(warp_state.row_max, row)));
      if (is_row_leader()) warp_state.row_sum[warp][row] = row_sum[half] * rescale;
      store_row(all + row * BLOCK, half, rescale);
    }
    layout.sync_consumers();
  }

  // Reduce over the warps of this warp's key head.
  template <class Op>
  __device__ float reduce_warps(const float (&values)[kWarps][kRows], int row) const {
    float found = Op::kNeutral;
#pragma unroll 1
    for (int other = tile_head(); other < kWarps; other += tile_key_heads) found = Op::of(found, values[other][row]);
    return found;
  }

  // Write the rows of this warp's key head: the results of a `whole` tile, else partial result `partial`.
  __device__ void write(const float* all, const Request& request, const TileCoord& tile, bool whole, int partial) const {
    constexpr int kEach = BLOCK < 128 ? 2 : 4;  // channels per lane
    const int size = problem.value.size,
              first_partial = partial * problem.rows_per_partial() + tile_head() * problem.rows_of_head();
    const int64_t first = tile.row(problem, request, tile_head());
#pragma unroll 1
    for (int row = interleave_index(); row < tile.rows; row += kWarps >> tile_key_heads / 2) {
      float new_max = reduce_warps<Max>(warp_state.row_max, row), shift = shift_of(new_max), rescale = 1.f;
      float total = reduce_warps<Add>(warp_state.row_sum, row);
      if (whole && problem.sinks) {
        const int head = tile.head(problem, tile_head()) + row;
        const float sink = problem.sinks[request.batch * problem.sinks_batch + head] * kLog2E;
        new_max = fmaxf(new_max, sink);
        rescale = fast_exp2(shift - shift_of(new_max));
        shift = shift_of(new_max);
        total = total * rescale + fast_exp2(sink - shift);
      }
      float factor = 1.f;
      if (whole) factor = total == 0.f ? 0.f : rescale * fast_reciprocal(total) * warp_state.value_scale[warp];
#pragma unroll
      for (int channel = lane * kEach; channel < BLOCK; channel += 32 * kEach) {
        Pack<float, kEach> values = {};
#pragma unroll 1
        for (int other = tile_head(); other < kWarps; other += tile_key_heads) {
          const auto more = load<float, kEach>(all + (other * kRows + row) * BLOCK + channel);
#pragma unroll
          for (int i = 0; i < kEach; ++i) values.data[i] += more.data[i];
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) values.data[i] *= factor;
        if (whole) {
          write_results(results.out, is_bf16(), (first + row) * size, channel, size, values);
        } else {
          store(results.partial + int64_t(first_partial + row) * BLOCK + channel, values);
        }
      }
      if (lane == 0 && whole && results.lse)
        results.lse[first + row] = total == 0.f ? -INFINITY : (shift + log2f(total)) * kLn2;
      if (lane == 0 && !whole) results.partial_stats[first_partial + row] = {new_max, total};
    }
    layout.sync_consumers();  // before this memory is reused
  }

  // Write a segment: the results of a whole tile, else a partial result.
  __device__ void finish(const Segment& segment, float* gathered) {
    const bool whole = segment.whole();
    if (segment.begins() && !whole && threadIdx.x == 0) results.splits[blockIdx.x] = segment.split(problem);
    const int partial =
        (int(blockIdx.x) * 2 + segment.begins()) * partials_per_block(sizeof(S), BLOCK, problem.group, tile_key_heads);
    if (SWAP_AB && !whole) return store_partial(partial, segment.tile.rows);
    gather(gathered, segment.tile.rows);
    write(gathered, segment.request, segment.tile, SWAP_AB || whole, partial);
  }
};

}  // namespace ejkernel::paged_attention
