// Paged attention with TMA loads of KV pages: one-byte heads of 128, and up to 8 query heads per key head.
//
// A producer warp fills a ring buffer for all consumer warps, and runs ahead of them from tile to tile: consumers issue no
// loads, and do not wait for each other before a tile ends. A row is one key head of one token, the heads of a token are
// adjacent; the row number swizzles the row's 16-byte chunks.
#pragma once

#include <array>

#include "tensor_map_axis.h"
#include "hopper.cuh"
#include "paged_attention/online_softmax.cuh"

namespace ejkernel::paged_attention {

constexpr int kTmaThreads = kThreads + 32;
constexpr int kTmaRegisters = 136;                  // leaves room for one block of the combine kernel beside two of these
constexpr int kHeadBytes = 128, kAtomBytes = 1024;  // of a key head of a token; alignment of TMA boxes, for equal swizzles
constexpr int kStepKeys = keys_per_step(1, kHeadBytes);
constexpr int kOperandBytes = kWarps * kStepKeys * kHeadBytes;  // of keys, and of values, of a step of all warps
constexpr int kMinBoxTokens = 8;                                // minimum tokens of a box; the maximum is kStepKeys

// Tensor maps of the pages.
struct TmaPages {
  PageTensorMap key, value;
  int box_tokens;  // of a box
};

// Whether the tokens of a head are closer than the heads of a page; then a TMA box has one head.
EJKERNEL_HOST_DEVICE constexpr bool is_head_major(const KvArray& kv) { return kv.head > kv.token; }

// Tokens of a TMA box: a divisor of a warp's step and of the page size; pages with less than kMinBoxTokens are not supported.
constexpr int box_tokens_for(int64_t page_size) {
  int tokens = kStepKeys;
  while (tokens > 1 && page_size % tokens) tokens /= 2;
  return tokens;
}

// Axes of the tensor map: rows, heads and tokens (tokens and heads if head-major), pages, batch.
inline std::array<TensorMapAxis, 5> tensor_map_axes(const Problem& problem, const KvArray& kv) {
  const Requests& all = problem.requests;
  const TensorMapAxis head{problem.heads / problem.group, problem.tile_key_heads, kv.head};
  const TensorMapAxis token{all.page_size, box_tokens_for(all.page_size), kv.token};
  const bool head_major = is_head_major(kv), own = kv.batch > 0;  // own: batch members have pages of their own
  return {TensorMapAxis{kHeadBytes / 8, kHeadBytes / 8, 8}, head_major ? token : head, head_major ? head : token,
          TensorMapAxis{all.pages, 1, kv.page},
          TensorMapAxis{own ? problem.batch : 1, 1, own ? kv.batch : all.pages * kv.page}};
}

// mbarriers of the ring buffer, behind its stages.
struct PipelineBarriers {
  Mbarrier full[kMaxStages], empty[kMaxStages];
};

constexpr int64_t tma_shared_bytes(int stages) {
  return int64_t(stages) * 2 * kOperandBytes + int64_t(sizeof(PipelineBarriers) + sizeof(WarpState)) + kAtomBytes;
}

// Keys and values in the layout of TMA boxes, and MMA operands without data movement between lanes: any channel may be any K
// index of QK, and any value channel any row of PV, as long as queries and results agree. A lane reads 16 bytes of a row, eight
// lanes at a time: four chunks each of two keys, in different banks; two chunks each of four tokens' values, with 2-way bank
// conflicts if a tile has more than one key head.
template <typename S_>
struct TmaTile {
  using T = __half;
  using S = S_;
  using Words = Pack<uint32_t, 4>;
  static constexpr int kChannels = kHeadBytes, kKeys = kStepKeys;
  static constexpr unsigned kAllVisible = 0xffffffffu;
  static constexpr bool kIsOneByte = true, kMultiHead = true, kContiguousChannels = true;

  int token_bytes;             // from one token to the next
  int key_offset, next_chunk;  // this lane's first chunk of keys, and the XOR to its second
  int value_offset[2];         // its chunk of the values of an even token and of the next, or the reverse

  __device__ explicit TmaTile(const Problem& problem) : token_bytes(problem.tile_key_heads * kHeadBytes) {
    const int tile_key_heads = problem.tile_key_heads, lane = threadIdx.x % 32, head = threadIdx.x / 32 & (tile_key_heads - 1);
    const int key = lane / 4, in_quad = lane % 4;
    const auto offset_of = [&](int token, int chunk) {
      const int row = token * tile_key_heads + head;
      return row * kHeadBytes + ((chunk ^ row % 8) * kVectorBytes);
    };
    key_offset = offset_of(key, first_chunk(in_quad)), next_chunk = tile_key_heads * kVectorBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) value_offset[i] = offset_of(2 * in_quad + (in_quad + i) % 2, key);
  }

  static __device__ void sync_consumers() { named_barrier_sync(1, kThreads); }

  // The first of a lane's two chunks of keys; the second differs in the bit that separates the swizzles of two tokens' rows.
  __device__ int first_chunk(int in_quad) const {
    const int tile_key_heads = token_bytes / kHeadBytes;
    return in_quad % tile_key_heads + in_quad / tile_key_heads * tile_key_heads * 2;
  }

  // Lane l has channels of two chunks, four in each step.
  __device__ int query_channel(int step, int half, int lane) const {
    const int chunk = first_chunk(lane % 4) + step / 4 * (token_bytes / kHeadBytes);
    return kVectorBytes * chunk + 4 * (step % 4) + 2 * half;
  }

  // products[2] [16, 8] of keys and up to 8 queries.
  template <bool SWAP_AB, typename Queries>
  __device__ void multiply_keys(float (&products)[2][4], const Queries& queries, const char* keys, int) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const char* mine = keys + (chunk ? key_offset ^ next_chunk : key_offset);
      Words found[4];  // of keys l / 4, and 8, 16 and 24 further
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(mine + 8 * i * token_bytes));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const Words query = queries(4 * chunk + word);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t upper[2], lower[2];
          widen_bytes<S, false>(found[2 * tile].data[word], upper);
          widen_bytes<S, false>(found[2 * tile + 1].data[word], lower);
          mma_m16n8k16<T>(products[tile], {upper[0], lower[0], upper[1], lower[1]}, query.data[0], query.data[2]);
        }
      }
    }
  }

  // acc[8] [16, 8] of transposed values and the weights of 8 keys each: lane l has channels 16 (l / 4) ... + 15, two in each.
  template <bool SWAP_AB>
  __device__ void add_values(float (&acc)[8][4], uint32_t (&weights)[4], const char* values, int lane) const {
    const unsigned order = lane % 2 ? 0x1032 : 0x3210;  // of a pair of tokens, as this lane reads them
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = __byte_perm(weights[i], 0, order);
#pragma unroll
    for (int first = 0; first < kKeys; first += 16) {
      Words found[2][2];  // of tokens 2 (l % 4) and the next, and 8 further
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* from = values + value_offset[i % 2] + (first + i / 2 * 8) * token_bytes;
        found[i / 2][i % 2] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from));
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // the first or last two of four channels
          uint32_t near[2], far[2];             // of each channel a pair of keys
          const unsigned which = half ? 0x7362 : 0x5140;
          widen_bytes<S, false>(__byte_perm(found[0][0].data[word], found[0][1].data[word], which), near);
          widen_bytes<S, false>(__byte_perm(found[1][0].data[word], found[1][1].data[word], which), far);
          mma_m16n8k16<T>(acc[2 * word + half], {near[0], near[1], far[0], far[1]}, weights[first / 8], weights[first / 8 + 1]);
        }
      }
    }
  }
};

#ifdef EJKERNEL_TMA
// Pipeline state: stage index and phase.
struct PipelineState {
  int stages, index = 0;
  unsigned phase = 0;

  __device__ void advance() {
    if (++index == stages) index = 0, phase ^= 1;
  }
};

// The producer warp.
struct TmaProducer {
  const Problem& problem;
  const TmaPages& tma;
  WarpState& warp_state;
  PipelineBarriers& barriers;
  char* stage_data;
  PipelineState state;
  int lane = threadIdx.x % 32;
  CachePolicy policy = evict_first_policy();  // workers' partial results are read again, pages are not

  // Page and token of a key; no page outside of the tile.
  struct KeyCoord {
    int page, token;
    bool visible;
  };

  __device__ KeyCoord look_up(const int32_t* table, int lowest, int last, int key) const {
    const int before = int(problem.page.divide(key));
    const int page = key < last ? table[before] : -1;
    const bool in_cache = unsigned(page) < unsigned(problem.requests.pages);
    return {page, key - before * int(problem.requests.page_size), in_cache && key >= lowest};
  }

  __device__ void load_kv(char* to, const KvArray& kv, const PageTensorMap& map, const Segment& segment,
                          const KeyCoord& coord) const {
    const int head = segment.tile.key_head, batch = kv.batch ? segment.request.batch : 0;
    const bool head_major = is_head_major(kv);
    tma_load_pages(to, map, &barriers.full[state.index], policy, head_major ? coord.token : head,
                   head_major ? head : coord.token, coord.page, batch);
  }

  // Load the boxes of one warp's step that have a visible key; returns their bytes.
  __device__ int issue_step(const Segment& segment, const KeyCoord& coord, int interleave) const {
    const int token_bytes = problem.tile_key_heads * kHeadBytes, tokens = tma.box_tokens;
    const unsigned visible_keys = __ballot_sync(kWarp, coord.visible);
    const unsigned box_mask = 0xffffffffu >> (32 - tokens) << (lane & -tokens);
    if (lane == 0) warp_state.visible_keys[interleave][state.index] = int(visible_keys);
    const bool leads = (lane & (tokens - 1)) == 0 && (visible_keys & box_mask);
    const unsigned leaders = __ballot_sync(kWarp, leads);
    if (leads) {
      char* to = stage_data + state.index * 2 * kOperandBytes + (interleave * kStepKeys + lane) * token_bytes;
      load_kv(to, problem.key, tma.key, segment, coord);
      load_kv(to + kOperandBytes, problem.value, tma.value, segment, coord);
    }
    return 2 * __popc(leaders) * tokens * token_bytes;
  }

  __device__ void produce(const Segment& segment) {
    const int32_t* table = segment.request.table(problem);
    const int lowest = segment.request.lowest(problem, segment.tile.local);
    const int end = (segment.request.first_step + segment.to) * kStepKeys;
    const int last = min(segment.request.last(problem, segment.tile.local), end);
    int key = (segment.request.first_step + segment.from) * kStepKeys + lane;
    KeyCoord next = look_up(table, lowest, last, key);
#pragma unroll 1
    for (int step = segment.from; step < segment.to; step += 1 << problem.interleave_bits) {
      mbarrier_wait(&barriers.empty[state.index], state.phase ^ 1);
      int bytes = 0;
#pragma unroll 1
      for (int interleave = 0; interleave < 1 << problem.interleave_bits; ++interleave) {
        const KeyCoord coord = next;
        key += kStepKeys;
        next = look_up(table, lowest, last, key);  // in flight until the next step
        bytes += issue_step(segment, coord, interleave);
      }
      if (lane == 0) mbarrier_arrive_expect_tx(&barriers.full[state.index], bytes);
      state.advance();
    }
    if (!segment.whole()) return;
    mbarrier_wait(&barriers.empty[state.index], state.phase ^ 1);  // the consumers gather the tile's results in this stage
    if (lane == 0) mbarrier_arrive(&barriers.full[state.index]);
    state.advance();
  }
};

// The consumer warps.
template <typename S>
struct TmaConsumer : OnlineSoftmax<TmaTile<S>, true> {
  using Base = OnlineSoftmax<TmaTile<S>, true>;
  using Layout = typename Base::Layout;
  using Base::problem, Base::warp_state, Base::layout, Base::lane, Base::warp, Base::tile_key_heads, Base::tile_head,
      Base::interleave_index;
  using typename Base::Scales;

  PipelineBarriers& barriers;
  char* stage_data;
  PipelineState state;

  __device__ TmaConsumer(const Problem& problem, const Results& results, WarpState& warp_state, PipelineBarriers& barriers,
                         char* stage_data, int stages)
      : Base(problem, results, warp_state), barriers(barriers), stage_data(stage_data), state{stages} {}

  __device__ char* current_stage() const { return stage_data + state.index * 2 * kOperandBytes; }

  __device__ void release() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&barriers.empty[state.index]);
    state.advance();
  }

  // NaN-safe path: zero this warp's values that no query sees, which may be NaN.
  __device__ void zero_masked_values(char* values, unsigned visible_keys) const {
    if (!(visible_keys >> lane & 1u)) {
#pragma unroll
      for (int byte = 0; byte < kHeadBytes; byte += kVectorBytes) {
        char* to = values + lane * layout.token_bytes + tile_head() * kHeadBytes + byte;
        store(reinterpret_cast<uint32_t*>(to), Pack<uint32_t, 4>{});
      }
    }
    fence_proxy_async();
    __syncwarp();
  }

  __device__ void process_steps(const Segment& segment) {
    this->clear();
    Queries<kHeadBytes> queries(nullptr, lane);
    const Scales scales = this->read_scales(segment.request, segment.tile.key_head + tile_head());
    this->read_queries(queries, this->queries_of(segment.request, segment.tile), segment.tile);
    const float factor = this->factor_of(scales.key);
    if (lane == 0) warp_state.value_scale[warp] = scales.value;
    const int warp_offset = interleave_index() * kStepKeys * layout.token_bytes;
#pragma unroll 1
    for (int step = segment.from; step < segment.to; step += 1 << problem.interleave_bits) {
      mbarrier_wait(&barriers.full[state.index], state.phase);
      int bits = 0;
      // The lane that reads the mask also releases the stage, after which the producer may overwrite it.
      if (lane == 0) bits = warp_state.visible_keys[interleave_index()][state.index];
      const unsigned visible_keys = unsigned(__shfl_sync(kWarp, bits, 0));
      char *keys = current_stage() + warp_offset, *values = keys + kOperandBytes;
      if (visible_keys) {
        if (visible_keys != Layout::kAllVisible) zero_masked_values(values, visible_keys);
        this->update(queries, factor, keys, values, visible_keys);
      }
      release();
    }
  }

  __device__ void process_segment(const Segment& segment) {
    if (segment.last) launch_dependents();  // the combine kernel computes its addresses meanwhile
    process_steps(segment);
    if (!segment.whole()) return this->finish(segment, nullptr);
    mbarrier_wait(&barriers.full[state.index], state.phase);
    this->finish(segment, reinterpret_cast<float*>(current_stage()));
    fence_proxy_async();
    release();
  }
};
#endif

// `workers` blocks of kTmaThreads. They may start before the preceding kernel has ended, and access no memory until it has.
template <typename S>
__global__ void __maxnreg__(kTmaRegisters)
    attend_tma(const __grid_constant__ Problem problem, const __grid_constant__ Results results,
               const __grid_constant__ TmaPages tma, Divisor workers, int stages) {
#ifdef EJKERNEL_TMA
  EJKERNEL_DYNAMIC_SHARED(char, memory);
  char* stage_data = memory + (-shared_address(memory) & (kAtomBytes - 1));
  char* after = stage_data + stages * 2 * kOperandBytes;
  PipelineBarriers& barriers = *reinterpret_cast<PipelineBarriers*>(after);
  WarpState& warp_state = *reinterpret_cast<WarpState*>(after + sizeof(PipelineBarriers));
  const int warp = warp_uniform(int(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) mbarrier_init(&barriers.full[i], 1), mbarrier_init(&barriers.empty[i], kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_for_prerequisites();
  if (warp < kWarps) Request::prefetch_tables(problem);
  if (threadIdx.x == 0) results.splits[blockIdx.x].workers = 0;
  TmaProducer producer{problem, tma, warp_state, barriers, stage_data, {stages}};
  TmaConsumer<S> consumer(problem, results, warp_state, barriers, stage_data, stages);
  for_each_segment(problem, workers, [&](const Segment& segment) {
    warp == kWarps ? producer.produce(segment) : consumer.process_segment(segment);
  });
#endif
}

}  // namespace ejkernel::paged_attention
