// Attention of blocks of queries: one warpgroup copies tiles of keys and values, two or three others own 64 queries each.
//
// A consumer forms scores from shared memory, turns them into weights in registers and multiplies those with values. The
// product of the next scores is issued before that of the last weights with values, so that exponentials of one run beside the
// other; by `take_turns`, consumers also issue their products one after the other, so that those of one run beside the
// exponentials of another. All consumers of a block visit the same tiles. Design: FlashAttention-3 (arXiv 2407.08608),
// sections 3.1 and 3.2.
#pragma once

#include <type_traits>

#include "flash_attention/schedule.cuh"
#include "flash_attention/shape.cuh"
#include "flash_attention/softmax.cuh"
#include "products.cuh"

namespace ejkernel::flash_attention {

// Of two pieces of each program that shares blocks, by its number: for each row of a block sums of values, relative to the
// largest logit, and that logit with the sum of weights. Null where none are shared.
struct Parts {
  float* values;    // [programs, 2, S::kBlockQ, S::kSize]
  float2* weights;  // [programs, 2, S::kBlockQ]
};

// The 64 rows of a consumer are tokens of one head, or of `2 ** shift` heads side by side that share keys: by token, then head.
struct Arguments {
  TensorMap query, key, value, out;  // [batch, length, heads, size], in boxes of tokens of these heads and a panel's columns
  float* lse;                        // [batch, queries, heads], natural logarithm; null where nobody wants it
  Parts parts;
  Rules rules;
  Order order;  // its heads are of `2 ** shift` query heads each
  Shares shares;
  Logits logits;
  int shift;
  int group;     // query heads of a key head
  int programs;  // that share the blocks; gridDim, which would take a register
  bool take_turns;

  EJKERNEL_BOTH int tokens(int rows) const { return rows >> shift; }
  EJKERNEL_BOTH int head_of(const Place& place, int row = 0) const {
    return (order.head_of(place) << shift) + (row & ((1 << shift) - 1));
  }

  // Among all rows of queries, where `query` and `row` are those of the place.
  EJKERNEL_BOTH int64_t row_of(const Place& place, int query, int row) const {
    const int64_t token = int64_t(order.batch_of(place)) * rules.queries + query;
    return token * (order.heads << shift) + head_of(place, row);
  }
};

#ifdef EJKERNEL_HOPPER

// By number: turns of the consumers, then barriers of one consumer's own.
constexpr int kTurn = 1, kOwn = 4;

// One thread copies everything of one block of the grid.
template <class S>
struct Producer {
  const Arguments& arguments;
  const Shared<S>& shared;
  int done = 0;  // tiles

  // Tiles of one block of queries.
  struct Source {
    int batch, head, key_head, first;
  };

  EJKERNEL_INLINE void load_tile(const TensorMap& map, unsigned char* to, Arrivals* here, const Source& source,
                                 int tile) const {
    arrive_expecting(here, S::kTileBytes);
    for (int panel = 0; panel < S::kPanels; ++panel) {
      load_box(to + panel * S::kTilePanel, map, here, panel * kPanel, tile * S::kBlockK, source.key_head, source.batch);
    }
  }

  EJKERNEL_INLINE void load_keys(const Source& source, int tile, int count) const {
    const int slot = slot_of<S>(count);
    await(shared.key_free(slot), parity_of<S>(count) ^ 1);
    load_tile(arguments.key, shared.key(slot), shared.key_here(slot), source, tile);
  }

  EJKERNEL_INLINE void load_values(const Source& source, int tile, int count) const {
    const int slot = slot_of<S>(count);
    await(shared.value_free(slot), parity_of<S>(count) ^ 1);
    load_tile(arguments.value, shared.value(slot), shared.value_here(slot), source, tile);
  }

  EJKERNEL_INLINE void load_queries(const Source& source, int round) const {
    for (int i = 0; i < S::kConsumers; ++i) {
      await(shared.query_free(i), unsigned(round & 1) ^ 1);
      arrive_expecting(shared.query_here(i), S::kQueryBytes);
      for (int panel = 0; panel < S::kPanels; ++panel) {
        load_box(shared.query(i) + panel * S::kQueryPanel, arguments.query, shared.query_here(i), panel * kPanel,
                 source.first + arguments.tokens(i * kRows), source.head, source.batch);
      }
    }
  }

  // Each tile of keys is asked for before the values of the tile ahead of it, as consumers read them.
  EJKERNEL_INLINE void run(const Place& place, const Range& range, int round, int) {
    const int head = arguments.head_of(place), first = arguments.tokens(place.block * S::kBlockQ);
    const Source source{arguments.order.batch_of(place), head, head / arguments.group, first};
    if (range.low < range.high) load_keys(source, range.low, done);
    load_queries(source, round);  // of a block without keys too, whose output may take their place
#pragma unroll 1
    for (int tile = range.low; tile < range.high; ++tile, ++done) {
      if (tile + 1 < range.high) load_keys(source, tile + 1, done + 1);
      load_values(source, tile, done);
    }
  }
};

template <class S>
struct Consumer {
  using T = typename S::T;
  using Scores = float[S::kBlockK / 2];
  using Weights = uint32_t[S::kBlockK / 4];  // pairs
  using Out = float[S::kSize / 2];

  const Arguments& arguments;
  const Shared<S>& shared;
  const int consumer;
  int done = 0;  // tiles

  // Of one block: this consumer's first query, the tiles of the block, those of which the consumer hides nothing, and those of
  // which no consumer does.
  struct Task {
    int first;
    Range tiles, whole, clean;
  };

  EJKERNEL_INLINE int thread() const { return threadIdx.x % kGroupThreads; }
  EJKERNEL_INLINE int lane() const { return threadIdx.x % 32; }
  // The first of the thread's two rows among those of the consumer; the second is 8 further.
  EJKERNEL_INLINE int row() const { return thread() / 32 * 16 + lane() / 4; }

  EJKERNEL_INLINE void leave(Arrivals* barrier) const {
    if (lane() == 0) arrive(barrier);
  }

  EJKERNEL_INLINE void take_turn() const {
    if (arguments.take_turns) meet(kTurn + consumer, 2 * kGroupThreads);
  }

  EJKERNEL_INLINE void pass_turn() const {
    const int next = consumer + 1 == S::kConsumers ? 0 : consumer + 1;
    if (arguments.take_turns) signal(kTurn + next, 2 * kGroupThreads);
  }

  EJKERNEL_INLINE void issue_scores(Scores& s, int count) const {
    const uint64_t query = matrix_at(shared_address(shared.query(consumer)), 16, 1024);
    const uint64_t key = matrix_at(shared_address(shared.key(slot_of<S>(count))), 16, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < S::kSize; k += 16) {
      const int panel = k / kPanel, column = 2 * (k % kPanel);
      Product<T, S::kBlockK>::run(s, moved(query, panel * S::kQueryPanel + column), moved(key, panel * S::kTilePanel + column),
                                  k > 0);
    }
    commit_products();
  }

  EJKERNEL_INLINE void issue_values(Out& o, const Weights& p, int count) const {
    const uint64_t value = matrix_at(shared_address(shared.value(slot_of<S>(count))), S::kTilePanel, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < S::kBlockK / 16; ++k) {
      Weighted<T, S::kSize>::run(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], moved(value, 16 * kPanelBytes * k));
    }
    commit_products();
  }

  // Hidden pairs of the tile to -inf, where there are any.
  EJKERNEL_INLINE void hide(Scores& s, const Task& task, int tile) const {
    if (task.whole.has(tile)) return;
    const Rules& rules = arguments.rules;
    const int column = tile * S::kBlockK + 2 * (lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = task.first + arguments.tokens(row() + 8 * half);
      const int low = query - rules.below - column, high = smaller(query + rules.above, rules.keys - 1) - column;
#pragma unroll
      for (int i = 0; i < S::kBlockK / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (2 * i + j < low || 2 * i + j > high) s[i + 2 * half + j] = -INFINITY;
        }
      }
    }
  }

  // A weight of 0 times what is not a number is not 0: in a tile with pairs that are hidden from some query, values that are
  // not finite become 0, as core's reference has it. All consumers of the block do the same to it, each before its own product.
  EJKERNEL_INLINE void clean_values(const Task& task, int tile, int count) const {
    if (task.clean.has(tile)) return;
    uint4* words = reinterpret_cast<uint4*>(shared.value(slot_of<S>(count)));
    constexpr int kWords = S::kTileBytes / int(sizeof(uint4));
    bool bad = false;
    for (int i = thread(); i < kWords; i += kGroupThreads) bad |= infinite(words[i]);
    if (!meet_any(kOwn + consumer, kGroupThreads, bad)) return;
    for (int i = thread(); i < kWords; i += kGroupThreads) {
      if (infinite(words[i])) words[i] = finite(words[i]);
    }
    show_to_async();
    meet(kOwn + consumer, kGroupThreads);
  }

  // All bits of the exponent, of either half of a word.
  static constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  static constexpr uint32_t kLowest = std::is_same_v<T, __nv_bfloat16> ? 0x0080u : 0x0400u;  // of them

  // Adding the lowest bit of an exponent of ones carries into the bit of the sign, which was masked out.
  static EJKERNEL_INLINE uint32_t carries(uint32_t word) {
    return ((word & (kExponent * 0x10001u)) + kLowest * 0x10001u) & 0x80008000u;
  }

  static EJKERNEL_INLINE bool infinite(const uint4& four) {
    return (carries(four.x) | carries(four.y) | carries(four.z) | carries(four.w)) != 0;
  }

  static EJKERNEL_INLINE uint32_t finite(uint32_t word) {
    const uint32_t found = carries(word);
    return word & ~((found >> 15) * 0xffffu);
  }

  static EJKERNEL_INLINE uint4 finite(const uint4& four) {
    return {finite(four.x), finite(four.y), finite(four.z), finite(four.w)};
  }

  // Scores that have been waited for, to weights.
  EJKERNEL_INLINE void weigh(Scores& s, Sums& sums, float (&decay)[2], const Task& task, int tile) const {
    shape_logits(s, arguments.logits);
    hide(s, task, tile);
    sums.weigh(s, arguments.logits.unit, decay);
  }

  static EJKERNEL_INLINE void round_to_pairs(const Scores& s, Weights& p) {
#pragma unroll
    for (int i = 0; i < S::kBlockK / 4; ++i) p[i] = pair<T>(s[2 * i], s[2 * i + 1]);
  }

  // The next block's may come; those in whose place the output is going stay.
  EJKERNEL_INLINE void leave_queries() const {
    if (S::kOutApart) leave(shared.query_free(consumer));
  }

  EJKERNEL_INLINE void await_keys(int count) const { await(shared.key_here(slot_of<S>(count)), parity_of<S>(count)); }

  EJKERNEL_INLINE void await_values(int count) const { await(shared.value_here(slot_of<S>(count)), parity_of<S>(count)); }

  EJKERNEL_INLINE void leave_keys(int count) const { leave(shared.key_free(slot_of<S>(count))); }
  EJKERNEL_INLINE void leave_values(int count) const { leave(shared.value_free(slot_of<S>(count))); }

  // The next tiles are waited for while a product is under way, not between two.
  EJKERNEL_INLINE void attend(Out& o, Sums& sums, const Task& task) {
    Scores s;
    Weights p;
    float decay[2];
    const int end = task.tiles.high;
    await_keys(done);
    take_turn();
    issue_scores(s, done);
    pass_turn();
    await_products<0>();
    settle(s);
    leave_keys(done);
    weigh(s, sums, decay, task, task.tiles.low);
    round_to_pairs(s, p);
    await_values(done);
    if (task.tiles.low + 1 < end) await_keys(done + 1);
    for (int tile = task.tiles.low + 1; tile < end; ++tile) {
      clean_values(task, tile - 1, done);
      take_turn();
      issue_scores(s, done + 1);
      issue_values(o, p, done);
      pass_turn();
      await_products<1>();
      settle(s);
      leave_keys(done + 1);
      weigh(s, sums, decay, task, tile);
      // The assembler moves a wait for products up as far as it may, in front of the exponentials. It stops at a branch: that
      // of the wait for the next values. Weights that were rounded before would need the registers of those being multiplied.
      settle(s);
      await_values(done + 1);
      if (tile + 1 < end) await_keys(done + 2);
      await_products<0>();
      settle(o);
      settle(s);
      leave_values(done);
      shrink(o, decay);
      round_to_pairs(s, p);
      ++done;
    }
    leave_queries();
    clean_values(task, end - 1, done);
    issue_values(o, p, done);
    await_products<0>();
    settle(o);
    leave_values(done);
    ++done;
  }

  // Maxima settle after a few tiles; then nothing shrinks.
  static EJKERNEL_INLINE void shrink(Out& o, const float (&decay)[2]) {
    if (__any_sync(~0u, decay[0] != 1.f || decay[1] != 1.f)) rescale(o, decay);
  }

  static EJKERNEL_INLINE void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < S::kSize / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  EJKERNEL_INLINE void store(Out& o, const Sums& sums, const Place& place, int first) const {
    float factor[2], lse[2];
    for (int half = 0; half < 2; ++half) factor[half] = sums.finish(half, arguments.logits.unit, lse[half]);
    rescale(o, factor);
    // Earlier output may still be on its way from here, and other warps may read the queries that lie here.
    if (S::kOutApart && thread() == 0) await_stores_read();
    meet(kOwn + consumer, kGroupThreads);
    unsigned char* out = shared.out(consumer);
#pragma unroll
    for (int i = 0; i < S::kSize / 2; i += 2) {
      const int chunk = i / 4, half = i / 2 % 2;
      unsigned char* panel = out + chunk / 8 * S::kQueryPanel + 4 * (lane() % 4);
      *reinterpret_cast<uint32_t*>(panel + swizzled(row() + 8 * half, chunk % 8)) = pair<T>(o[i], o[i + 1]);
    }
    show_to_async();
    meet(kOwn + consumer, kGroupThreads);
    if (thread() == 0) {
      for (int panel = 0; panel < S::kPanels; ++panel) {
        store_box(arguments.out, out + panel * S::kQueryPanel, panel * kPanel, first, arguments.head_of(place),
                  arguments.order.batch_of(place));
      }
      commit_stores();
      if (!S::kOutApart) {
        await_stores_read();
        arrive(shared.query_free(consumer));
      }
    }
    store_lse(lse, place, first);
  }

  EJKERNEL_INLINE void store_lse(const float (&lse)[2], const Place& place, int first) const {
    if (arguments.lse == nullptr || lane() % 4) return;
    for (int half = 0; half < 2; ++half) {
      const int query = first + arguments.tokens(row() + 8 * half);
      if (query >= arguments.rules.queries) return;
      arguments.lse[arguments.row_of(place, query, row() + 8 * half)] = lse[half];
    }
  }

  // What was found of some tiles, for the merge.
  EJKERNEL_INLINE void leave_part(const Out& o, const Sums& sums, int part) const {
    const int64_t first = int64_t(part) * S::kBlockQ + consumer * kRows + row();
    float2* const values = reinterpret_cast<float2*>(arguments.parts.values + first * S::kSize) + lane() % 4;
#pragma unroll
    for (int i = 0; i < S::kSize / 2; i += 2) {
      const int chunk = i / 4, half = i / 2 % 2;
      values[half * (8 * S::kSize / 2) + 4 * chunk] = {o[i], o[i + 1]};
    }
    for (int half = 0; half < 2; ++half) {
      const float total = sums.all(half);
      if (lane() % 4 == 0) arguments.parts.weights[first + 8 * half] = {sums.largest[half], total};
    }
    if (S::kOutApart) return;
    meet(kOwn + consumer, kGroupThreads);  // other warps may read the queries, in whose place nothing is going
    if (thread() == 0) arrive(shared.query_free(consumer));
  }

  EJKERNEL_INLINE Task task_of(const Place& place, const Range& tiles) const {
    const Rules& rules = arguments.rules;
    const int block = arguments.tokens(place.block * S::kBlockQ), first = block + arguments.tokens(consumer * kRows);
    return {first, tiles, rules.seen_by_all(first, first + arguments.tokens(kRows) - 1, S::kBlockK, true),
            rules.seen_by_all(block, block + arguments.tokens(S::kBlockQ) - 1, S::kBlockK, false)};
  }

  EJKERNEL_INLINE void run(const Place& place, const Range& range, int round, int part) {
    const Task task = task_of(place, range);
    Out o;
    Sums sums;
#pragma unroll
    for (int i = 0; i < S::kSize / 2; ++i) o[i] = 0.f;
    await(shared.query_here(consumer), unsigned(round & 1));
    if (range.low < range.high) {
      attend(o, sums, task);
    } else {
      leave_queries();
    }
    part < 0 ? store(o, sums, place, task.first) : leave_part(o, sums, part);
  }

  // The first consumer has the first turn, and takes the last one, which nobody uses.
  EJKERNEL_INLINE void begin() const {
    if (consumer == S::kConsumers - 1) pass_turn();
  }
  EJKERNEL_INLINE void end() const {
    if (consumer == 0) take_turn();
    if (thread() == 0) await_stores_read();
  }
};

// Everything that this block of the grid is dealt: blocks of queries, then its share of the last ones.
template <class S, class Worker>
EJKERNEL_INLINE void work_through(const Arguments& arguments, Worker& worker) {
  const int program = int(blockIdx.x);
  const Shares& shares = arguments.shares;
  for (int round = 0;; ++round) {
    const int work = work_of(program, arguments.programs, round);
    Place place;
    Range tiles;
    int part = -1;
    if (work < shares.first) {
      place = arguments.order.place(work);
      const int first = arguments.tokens(place.block * S::kBlockQ), last = first + arguments.tokens(S::kBlockQ) - 1;
      tiles = tiles_of(arguments.rules, first, last, S::kBlockK);
    } else {
      const int number = round - shares.rounds;
      const Piece piece = shares.piece(program, number);
      if (piece.tiles.low >= piece.tiles.high) break;
      place = arguments.order.place(shares.first + piece.block), tiles = piece.tiles;
      if (tiles.high - tiles.low < shares.tiles) part = 2 * program + number;
    }
    worker.run(place, tiles, round, part);
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) attend(const __grid_constant__ Arguments arguments) {
#ifdef EJKERNEL_HOPPER
  EJKERNEL_SHARED_REST(unsigned char, memory);
  const Shared<S> shared(memory);
  shared.open();
  const int group = same_in_warp(int(threadIdx.x) / kGroupThreads);
  if (group == S::kConsumers) {
    fewer_registers<S::kProducerRegisters>();
    if (threadIdx.x % kGroupThreads < 32 && one_of_warp()) {
      for (const TensorMap* map : {&arguments.query, &arguments.key, &arguments.value, &arguments.out}) prefetch_map(*map);
      Producer<S> producer{arguments, shared};
      work_through<S>(arguments, producer);
      start_next_kernel();
    }
  } else {
    more_registers<S::kConsumerRegisters>();
    Consumer<S> consumer{arguments, shared, group};
    consumer.begin();
    work_through<S>(arguments, consumer);
    consumer.end();
  }
#endif
}

}  // namespace ejkernel::flash_attention
