// Warp-specialised attention: a producer warpgroup loads KV tiles by TMA, two or three consumer warpgroups own 64 queries each.
// Keys and values are arrays, or pages (paged_prefill/kernels.cuh), which have a producer of their own.
//
// A consumer computes S = Q K^T from shared memory, softmax weights in registers, and O += P V with P in registers. It issues
// the next QK before the last PV, so that the softmax of one overlaps the other. With `ping_pong`, consumers issue their wgmmas
// in turn, so that the wgmmas of one overlap the softmax of another. All consumers of a block visit the same tiles. Design:
// FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2.
#pragma once

#include <type_traits>

#include "flash_attention/schedule.cuh"
#include "flash_attention/shape.cuh"
#include "flash_attention/softmax.cuh"
#include "wgmma.cuh"

namespace ejkernel::flash_attention {

// Partial results of the two segments of each split-KV CTA, by row of a block: the unnormalised output, relative to the row
// maximum, and that maximum with the row sum. Null without split KV.
struct PartialResults {
  float* values;  // [ctas, 2, S::kBlockQ, S::kSize]
  float2* stats;  // [ctas, 2, S::kBlockQ]
};

// The 64 rows of a consumer are tokens of one head or, with packed GQA, of `2 ** shift` query heads of one key head: by token,
// then head.
struct Arguments {
  // Of arrays [batch, length, heads, size], in TMA boxes of tokens, these heads, and the columns of a swizzle atom.
  TensorMap query, key, value, out;
  float* lse;  // [batch, queries, heads], natural logarithm; null if not requested
  PartialResults partials;
  MaskParams mask;
  TileScheduler scheduler;  // counts packs of `2 ** shift` query heads as heads
  StreamK stream_k;
  Logits logits;
  int shift;
  int group;  // query heads of a key head
  int ctas;   // persistent CTAs; a read of gridDim would take a register
  bool ping_pong;

  EJKERNEL_HOST_DEVICE int tokens(int rows) const { return rows >> shift; }
  EJKERNEL_HOST_DEVICE int batch_of(const TileCoord& coord) const { return scheduler.batch_of(coord); }
  EJKERNEL_HOST_DEVICE int head_of(const TileCoord& coord, int row = 0) const {
    return (scheduler.head_of(coord) << shift) + (row & ((1 << shift) - 1));
  }

  // The row among all queries; `query` and `row` belong to the tile coordinate.
  EJKERNEL_HOST_DEVICE int64_t row_of(const TileCoord& coord, int query, int row) const {
    const int64_t token = int64_t(scheduler.batch_of(coord)) * mask.queries + query;
    return token * (scheduler.heads << shift) + head_of(coord, row);
  }

  // What pages have. The slots of a page after its last key hold anything; after arrays TMA loads zeros.
  static constexpr bool kPaged = false;
  EJKERNEL_HOST_DEVICE unsigned hidden(int) const { return 0; }
  EJKERNEL_HOST_DEVICE int token_of(int first) const { return first; }
};

#ifdef EJKERNEL_HOPPER

// Named barriers: one per consumer for ping-pong, then one per consumer for its own threads.
constexpr int kPingPongBarrier = 1, kConsumerBarrier = 4;

// The producer: one thread issues all TMA loads of a CTA.
template <class S>
struct Producer {
  const Arguments& arguments;
  const SharedStorage<S>& shared;
  int done = 0;  // tiles

  // The KV tiles of one query block.
  struct Source {
    int batch, head, key_head, first;
  };

  EJKERNEL_INLINE void load_tile(const TensorMap& map, unsigned char* to, Mbarrier* full, const Source& source,
                                 int tile) const {
    mbarrier_arrive_expect_tx(full, S::kTileBytes);
    for (int atom = 0; atom < S::kAtoms; ++atom) {
      tma_load(to + atom * S::kTileAtomBytes, map, full, atom * kAtomColumns, tile * S::kBlockK, source.key_head, source.batch);
    }
  }

  EJKERNEL_INLINE void load_keys(const Source& source, int tile, int count) const {
    const int stage = stage_of<S>(count);
    mbarrier_wait(shared.key_empty(stage), parity_of<S>(count) ^ 1);
    load_tile(arguments.key, shared.key(stage), shared.key_full(stage), source, tile);
  }

  EJKERNEL_INLINE void load_values(const Source& source, int tile, int count) const {
    const int stage = stage_of<S>(count);
    mbarrier_wait(shared.value_empty(stage), parity_of<S>(count) ^ 1);
    load_tile(arguments.value, shared.value(stage), shared.value_full(stage), source, tile);
  }

  EJKERNEL_INLINE void load_queries(const Source& source, int wave) const {
    for (int i = 0; i < S::kConsumers; ++i) {
      mbarrier_wait(shared.query_empty(i), unsigned(wave & 1) ^ 1);
      mbarrier_arrive_expect_tx(shared.query_full(i), S::kQueryBytes);
      for (int atom = 0; atom < S::kAtoms; ++atom) {
        tma_load(shared.query(i) + atom * S::kQueryAtomBytes, arguments.query, shared.query_full(i), atom * kAtomColumns,
                 source.first + arguments.tokens(i * kRows), source.head, source.batch);
      }
    }
  }

  // Load each K tile before the V tile of the preceding one, in the order in which consumers read them.
  EJKERNEL_INLINE void run(const TileCoord& coord, const Range& range, int wave, int) {
    const int head = arguments.head_of(coord), first = arguments.tokens(coord.block * S::kBlockQ);
    const Source source{arguments.scheduler.batch_of(coord), head, head / arguments.group, first};
    if (range.low < range.high) load_keys(source, range.low, done);
    load_queries(source, wave);  // also for a block without keys, whose output may reuse their buffer
#pragma unroll 1
    for (int tile = range.low; tile < range.high; ++tile, ++done) {
      if (tile + 1 < range.high) load_keys(source, tile + 1, done + 1);
      load_values(source, tile, done);
    }
  }
};

template <class S, class A = Arguments>
struct Consumer {
  using T = typename S::T;
  using Scores = float[S::kBlockK / 2];
  using Weights = uint32_t[S::kBlockK / 4];  // packed pairs
  using Out = float[S::kSize / 2];

  const A& arguments;
  const SharedStorage<S>& shared;
  const int consumer;
  int done = 0;  // tiles

  // A query block: this consumer's first query, the block's tiles, the tiles that need no mask for this consumer, and those
  // that need none for any consumer.
  struct Task {
    int first;
    Range tiles, unmasked, fully_visible;
  };

  EJKERNEL_INLINE int thread() const { return threadIdx.x % kWarpgroupThreads; }
  EJKERNEL_INLINE int lane() const { return threadIdx.x % 32; }
  // The first of the thread's two rows of the consumer; the second is 8 further.
  EJKERNEL_INLINE int row() const { return thread() / 32 * 16 + lane() / 4; }

  EJKERNEL_INLINE void release(Mbarrier* barrier) const {
    if (lane() == 0) mbarrier_arrive(barrier);
  }

  EJKERNEL_INLINE void ping_pong_wait() const {
    if (arguments.ping_pong) named_barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroupThreads);
  }

  EJKERNEL_INLINE void ping_pong_arrive() const {
    const int next = consumer + 1 == S::kConsumers ? 0 : consumer + 1;
    if (arguments.ping_pong) named_barrier_arrive(kPingPongBarrier + next, 2 * kWarpgroupThreads);
  }

  EJKERNEL_INLINE void issue_qk(Scores& s, int count) const {
    const uint64_t query = smem_descriptor(shared_address(shared.query(consumer)), 16, 1024);
    const uint64_t key = smem_descriptor(shared_address(shared.key(stage_of<S>(count))), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::kSize; k += 16) {
      const int atom = k / kAtomColumns, column = 2 * (k % kAtomColumns);
      WgmmaSS<T, S::kBlockK>::run(s, advance_descriptor(query, atom * S::kQueryAtomBytes + column),
                                  advance_descriptor(key, atom * S::kTileAtomBytes + column), k > 0);
    }
    wgmma_commit_group();
  }

  EJKERNEL_INLINE void issue_pv(Out& o, const Weights& p, int count) const {
    const uint64_t value = smem_descriptor(shared_address(shared.value(stage_of<S>(count))), S::kTileAtomBytes, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::kBlockK / 16; ++k) {
      WgmmaRS<T, S::kSize>::run(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                advance_descriptor(value, 16 * kAtomRowBytes * k));
    }
    wgmma_commit_group();
  }

  // Set masked logits to -inf; `hidden` has a bit for each eight keys of the tile that nobody sees.
  EJKERNEL_INLINE void apply_mask(Scores& s, const Task& task, int tile, unsigned hidden) const {
    if (hidden) {
#pragma unroll
      for (int i = 0; i < S::kBlockK / 2; ++i) s[i] = hidden >> (i / 4) & 1 ? -INFINITY : s[i];
    }
    if (task.unmasked.contains(tile)) return;
    const MaskParams& mask = arguments.mask;
    const int column = tile * S::kBlockK + 2 * (lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = task.first + arguments.tokens(row() + 8 * half);
      const int low = query - mask.below - column, high = min_of(query + mask.above, mask.keys - 1) - column;
#pragma unroll
      for (int i = 0; i < S::kBlockK / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (2 * i + j < low || 2 * i + j > high) s[i + 2 * half + j] = -INFINITY;
        }
      }
    }
  }

  // NaN-safe path: weight 0 times NaN is NaN. In a tile with masked pairs, nonfinite values become 0, as in core's reference.
  // All consumers of the block do the same to the tile, each before its own PV.
  EJKERNEL_INLINE void zero_nonfinite_values(const Task& task, int tile, int count) const {
    if (task.fully_visible.contains(tile)) return;
    uint4* words = reinterpret_cast<uint4*>(shared.value(stage_of<S>(count)));
    constexpr int kWords = S::kTileBytes / int(sizeof(uint4));
    bool bad = false;
    for (int i = thread(); i < kWords; i += kWarpgroupThreads) bad |= has_nonfinite(words[i]);
    if (!named_barrier_sync_or(kConsumerBarrier + consumer, kWarpgroupThreads, bad)) return;
    for (int i = thread(); i < kWords; i += kWarpgroupThreads) {
      if (has_nonfinite(words[i])) words[i] = zero_nonfinite(words[i]);
    }
    fence_proxy_async();
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroupThreads);
  }

  // The exponent bits of either half of a word.
  static constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  static constexpr uint32_t kLowest = std::is_same_v<T, __nv_bfloat16> ? 0x0080u : 0x0400u;  // the lowest of them

  // Adding the lowest exponent bit to an exponent of all ones carries into the sign bit, which was masked out.
  static EJKERNEL_INLINE uint32_t carries(uint32_t word) {
    return ((word & (kExponent * 0x10001u)) + kLowest * 0x10001u) & 0x80008000u;
  }

  static EJKERNEL_INLINE bool has_nonfinite(const uint4& four) {
    return (carries(four.x) | carries(four.y) | carries(four.z) | carries(four.w)) != 0;
  }

  static EJKERNEL_INLINE uint32_t zero_nonfinite(uint32_t word) {
    const uint32_t found = carries(word);
    return word & ~((found >> 15) * 0xffffu);
  }

  static EJKERNEL_INLINE uint4 zero_nonfinite(const uint4& four) {
    return {zero_nonfinite(four.x), zero_nonfinite(four.y), zero_nonfinite(four.z), zero_nonfinite(four.w)};
  }

  // Turn the logits of a finished QK into weights.
  EJKERNEL_INLINE void softmax_step(Scores& s, OnlineSoftmax& softmax, float (&rescale_factor)[2], const Task& task,
                                    int tile, unsigned hidden) const {
    transform_logits(s, arguments.logits);
    apply_mask(s, task, tile, hidden);
    softmax.update(s, arguments.logits.unit, rescale_factor);
  }

  static EJKERNEL_INLINE void pack_weights(const Scores& s, Weights& p) {
#pragma unroll
    for (int i = 0; i < S::kBlockK / 4; ++i) p[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  // Release the query buffer, unless the output reuses it.
  EJKERNEL_INLINE void release_queries() const {
    if (S::kSeparateOut) release(shared.query_empty(consumer));
  }

  EJKERNEL_INLINE void wait_keys(int count) const { mbarrier_wait(shared.key_full(stage_of<S>(count)), parity_of<S>(count)); }

  EJKERNEL_INLINE void wait_values(int count) const {
    mbarrier_wait(shared.value_full(stage_of<S>(count)), parity_of<S>(count));
  }

  EJKERNEL_INLINE void release_keys(int count) const { release(shared.key_empty(stage_of<S>(count))); }
  EJKERNEL_INLINE void release_values(int count) const { release(shared.value_empty(stage_of<S>(count))); }

  // Waits for the next tiles overlap a wgmma in flight.
  EJKERNEL_INLINE void attend(Out& o, OnlineSoftmax& softmax, const Task& task) {
    Scores s;
    Weights p;
    float rescale_factor[2];
    const int end = task.tiles.high;
    wait_keys(done);
    ping_pong_wait();
    issue_qk(s, done);
    ping_pong_arrive();
    wgmma_wait_group<0>();
    wgmma_fence_operand(s);
    unsigned hidden = arguments.hidden(stage_of<S>(done));
    release_keys(done);
    softmax_step(s, softmax, rescale_factor, task, task.tiles.low, hidden);
    pack_weights(s, p);
    wait_values(done);
    if (task.tiles.low + 1 < end) wait_keys(done + 1);
    for (int tile = task.tiles.low + 1; tile < end; ++tile) {
      zero_nonfinite_values(task, tile - 1, done);
      ping_pong_wait();
      issue_qk(s, done + 1);
      issue_pv(o, p, done);
      ping_pong_arrive();
      wgmma_wait_group<1>();
      wgmma_fence_operand(s);
      hidden = arguments.hidden(stage_of<S>(done + 1));
      release_keys(done + 1);
      softmax_step(s, softmax, rescale_factor, task, tile, hidden);
      // ptxas hoists a wgmma wait as far as it can, above the exponentials. It stops at a branch, here that of the wait for the
      // next values. Rounding the weights earlier would need the registers of those that the wgmma reads.
      wgmma_fence_operand(s);
      wait_values(done + 1);
      if (tile + 1 < end) wait_keys(done + 2);
      wgmma_wait_group<0>();
      wgmma_fence_operand(o);
      wgmma_fence_operand(s);
      release_values(done);
      rescale_if_needed(o, rescale_factor);
      pack_weights(s, p);
      ++done;
    }
    release_queries();
    zero_nonfinite_values(task, end - 1, done);
    issue_pv(o, p, done);
    wgmma_wait_group<0>();
    wgmma_fence_operand(o);
    release_values(done);
    ++done;
  }

  // Row maxima are stable after a few tiles; then nothing needs a rescale.
  static EJKERNEL_INLINE void rescale_if_needed(Out& o, const float (&rescale_factor)[2]) {
    if (__any_sync(~0u, rescale_factor[0] != 1.f || rescale_factor[1] != 1.f)) rescale(o, rescale_factor);
  }

  static EJKERNEL_INLINE void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < S::kSize / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  EJKERNEL_INLINE void store(Out& o, const OnlineSoftmax& softmax, const TileCoord& coord, int first) const {
    float factor[2], lse[2];
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.quad_sum(half), unit = arguments.logits.unit;
      if constexpr (A::kPaged) {
        factor[half] = finish_row(softmax.row_max[half], sum, unit, arguments.sink_of(coord, row() + 8 * half), lse[half]);
      } else {
        factor[half] = finish_row(softmax.row_max[half], sum, unit, lse[half]);
      }
    }
    rescale(o, factor);
    // An earlier TMA store may still read this buffer, and other warps may still read the queries in it.
    if (S::kSeparateOut && thread() == 0) tma_store_wait_group_read();
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroupThreads);
    unsigned char* out = shared.out(consumer);
#pragma unroll
    for (int i = 0; i < S::kSize / 2; i += 2) {
      const int chunk = i / 4, half = i / 2 % 2;
      unsigned char* atom = out + chunk / 8 * S::kQueryAtomBytes + 4 * (lane() % 4);
      *reinterpret_cast<uint32_t*>(atom + swizzled_offset(row() + 8 * half, chunk % 8)) = pack_pair<T>(o[i], o[i + 1]);
    }
    fence_proxy_async();
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroupThreads);
    if constexpr (A::kPaged) {
      if (first + arguments.tokens(kRows) > arguments.mask.queries) {  // the rows after it are another request's
        store_rows(out, coord, first);
        return store_lse(lse, coord, first);
      }
    }
    if (thread() == 0) {
      for (int atom = 0; atom < S::kAtoms; ++atom) {
        tma_store(arguments.out, out + atom * S::kQueryAtomBytes, atom * kAtomColumns, arguments.token_of(first),
                  arguments.head_of(coord), arguments.batch_of(coord));
      }
      tma_store_commit_group();
      if (!S::kSeparateOut) {
        tma_store_wait_group_read();
        mbarrier_arrive(shared.query_empty(consumer));
      }
    }
    store_lse(lse, coord, first);
  }

  // Store the rows of the request's own queries from shared memory.
  EJKERNEL_INLINE void store_rows(const unsigned char* from, const TileCoord& coord, int first) const {
    constexpr int kChunks = S::kSize / 8;
    for (int i = thread(); i < kRows * kChunks; i += kWarpgroupThreads) {
      const int at = i / kChunks, chunk = i % kChunks, query = first + arguments.tokens(at);
      if (query >= arguments.mask.queries || 8 * chunk >= arguments.value_size) continue;
      const unsigned char* atom = from + chunk / 8 * S::kQueryAtomBytes;
      T* const to = static_cast<T*>(arguments.results) + arguments.row_of(coord, query, at) * arguments.value_size;
      *reinterpret_cast<uint4*>(to + 8 * chunk) = *reinterpret_cast<const uint4*>(atom + swizzled_offset(at, chunk % 8));
    }
  }

  EJKERNEL_INLINE void store_lse(const float (&lse)[2], const TileCoord& coord, int first) const {
    if (arguments.lse == nullptr || lane() % 4) return;
    for (int half = 0; half < 2; ++half) {
      const int query = first + arguments.tokens(row() + 8 * half);
      if (query >= arguments.mask.queries) return;
      arguments.lse[arguments.row_of(coord, query, row() + 8 * half)] = lse[half];
    }
  }

  // Write the partial result of a segment for the combine kernel.
  EJKERNEL_INLINE void store_partial(const Out& o, const OnlineSoftmax& softmax, int partial) const {
    const int64_t first = int64_t(partial) * S::kBlockQ + consumer * kRows + row();
    float2* const values = reinterpret_cast<float2*>(arguments.partials.values + first * S::kSize) + lane() % 4;
#pragma unroll
    for (int i = 0; i < S::kSize / 2; i += 2) {
      const int chunk = i / 4, half = i / 2 % 2;
      values[half * (8 * S::kSize / 2) + 4 * chunk] = {o[i], o[i + 1]};
    }
    for (int half = 0; half < 2; ++half) {
      const float row_sum = softmax.quad_sum(half);
      if (lane() % 4 == 0) arguments.partials.stats[first + 8 * half] = {softmax.row_max[half], row_sum};
    }
    if (S::kSeparateOut) return;
    named_barrier_sync(kConsumerBarrier + consumer,
                       kWarpgroupThreads);  // other warps may still read the queries, whose buffer is not reused here
    if (thread() == 0) mbarrier_arrive(shared.query_empty(consumer));
  }

  EJKERNEL_INLINE Task task_of(const TileCoord& coord, const Range& tiles) const {
    const MaskParams& mask = arguments.mask;
    const int block = arguments.tokens(coord.block * S::kBlockQ), first = block + arguments.tokens(consumer * kRows);
    return {first, tiles, mask.fully_visible_tiles(first, first + arguments.tokens(kRows) - 1, S::kBlockK, true),
            mask.fully_visible_tiles(block, block + arguments.tokens(S::kBlockQ) - 1, S::kBlockK, A::kPaged)};
  }

  EJKERNEL_INLINE void run(const TileCoord& coord, const Range& range, int wave, int partial) {
    const Task task = task_of(coord, range);
    Out o;
    OnlineSoftmax softmax;
#pragma unroll
    for (int i = 0; i < S::kSize / 2; ++i) o[i] = 0.f;
    mbarrier_wait(shared.query_full(consumer), unsigned(wave & 1));
    if (range.low < range.high) {
      attend(o, softmax, task);
    } else {
      release_queries();
    }
    partial < 0 ? store(o, softmax, coord, task.first) : store_partial(o, softmax, partial);
  }

  // The first consumer goes first. It also waits for the last signal, which nobody else consumes.
  EJKERNEL_INLINE void begin() const {
    if (consumer == S::kConsumers - 1) ping_pong_arrive();
  }
  EJKERNEL_INLINE void end() const {
    if (consumer == 0) ping_pong_wait();
    if (thread() == 0) tma_store_wait_group_read();
  }
};

// All work of this CTA: whole query blocks, then its stream-K segments.
template <class S, class Role>
EJKERNEL_INLINE void persistent_loop(const Arguments& arguments, Role& role) {
  const int cta = int(blockIdx.x);
  const StreamK& stream_k = arguments.stream_k;
  for (int wave = 0;; ++wave) {
    const int work = work_of(cta, arguments.ctas, wave);
    TileCoord coord;
    Range tiles;
    int partial = -1;
    if (work < stream_k.first) {
      coord = arguments.scheduler.coord(work);
      const int first = arguments.tokens(coord.block * S::kBlockQ), last = first + arguments.tokens(S::kBlockQ) - 1;
      tiles = visible_tiles(arguments.mask, first, last, S::kBlockK);
    } else {
      const int index = wave - stream_k.waves;
      const Segment segment = stream_k.segment(cta, index);
      if (segment.tiles.low >= segment.tiles.high) break;
      coord = arguments.scheduler.coord(stream_k.first + segment.block), tiles = segment.tiles;
      if (tiles.high - tiles.low < stream_k.tiles) partial = 2 * cta + index;
    }
    role.run(coord, tiles, wave, partial);
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) attend(const __grid_constant__ Arguments arguments) {
#ifdef EJKERNEL_HOPPER
  EJKERNEL_DYNAMIC_SHARED(unsigned char, memory);
  const SharedStorage<S> shared(memory);
  shared.init_barriers();
  const int group = warp_uniform(int(threadIdx.x) / kWarpgroupThreads);
  if (group == S::kConsumers) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x % kWarpgroupThreads < 32 && elect_one()) {
      for (const TensorMap* map : {&arguments.query, &arguments.key, &arguments.value, &arguments.out})
        prefetch_tensor_map(*map);
      Producer<S> producer{arguments, shared};
      persistent_loop<S>(arguments, producer);
      launch_dependents();
    }
  } else {
    setmaxnreg_inc<S::kConsumerRegisters>();
    Consumer<S> consumer{arguments, shared, group};
    consumer.begin();
    persistent_loop<S>(arguments, consumer);
    consumer.end();
  }
#endif
}

}  // namespace ejkernel::flash_attention
