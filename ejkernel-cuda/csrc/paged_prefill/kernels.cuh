// Attention of many new tokens over a paged cache: the consumers of flash_attention, and a producer that loads pages by TMA.
//
// A CTA has one block of queries of one request. Of its producer warps one loads keys, one values; their lanes read the block table a
// tile ahead. A page outside of the cache comes as zeros, and the tile's `hidden` word tells the consumers to mask its keys.
#pragma once

#include "divide.cuh"
#include "flash_attention/kernels.cuh"
#include "pages.cuh"

namespace ejkernel::paged_prefill {

using flash_attention::Logits;
using flash_attention::MaskParams;
using flash_attention::Range;
using flash_attention::TileCoord;

constexpr int kFar = 1 << 30;    // a window that masks nothing
constexpr int kKeysOfBit = 8;    // keys that a bit of a `hidden` word stands for; page sizes are multiples of it
constexpr int kExtraShared = 64;  // bytes after the mbarriers

// The axes of a tensor map of pages after a row's own, by rising strides.
enum class PageOrder : int { kHeadTokenPage, kTokenHeadPage, kTokenPageHead };

// Queries and results are [batch, tokens, heads, size]; `2 ** shift` query heads of a key head share the rows of a block.
struct Arguments {
  TensorMap query, out;
  PageTensorMap key, value;  // a box has tokens of one head, and the columns of a swizzle atom
  void* results;             // what `out` maps
  float* lse;                // null if not requested
  const float* sinks;        // [1 or batch, heads], null when absent
  Requests requests;
  Logits logits;
  Divisor page_size;
  int sinks_stride;  // of the batch
  int shift, group;  // group: query heads of a key head
  int heads, value_size, window, box_tokens, ctas_of_member;
  PageOrder order;
  bool own_pages;  // each batch member has pages of its own
  bool causal;
};

// A block of a request's queries, for `2 ** shift` heads of a key head from `head` on. `first` is the request's first token among all. Tokens
// that no request owns belong to blocks without keys, of request -1.
struct Block {
  MaskParams mask;
  int batch, request, first, head, key_head, index;
};
static_assert(sizeof(Block) + 4 * sizeof(unsigned) <= kExtraShared);

#ifdef EJKERNEL_HOPPER

// `arguments` of the consumers.
struct Work {
  const Arguments& all;
  const Block& block;
  const unsigned* hidden_keys;  // by stage
  const TensorMap& out;
  const Logits& logits;
  const MaskParams& mask;
  void* results;
  float* lse;
  int value_size;
  flash_attention::PartialResults partials{};

  static constexpr bool kPaged = true, ping_pong = false;

  EJKERNEL_INLINE Work(const Arguments& all, const Block& block, const unsigned* hidden_keys)
      : all(all),
        block(block),
        hidden_keys(hidden_keys),
        out(all.out),
        logits(all.logits),
        mask(block.mask),
        results(all.results),
        lse(all.lse),
        value_size(all.value_size) {}

  EJKERNEL_INLINE int tokens(int rows) const { return rows >> all.shift; }
  EJKERNEL_INLINE int token_of(int query) const { return block.first + query; }
  EJKERNEL_INLINE int batch_of(const TileCoord&) const { return block.batch; }
  EJKERNEL_INLINE int head_of(const TileCoord&, int row = 0) const { return block.head + (row & ((1 << all.shift) - 1)); }
  EJKERNEL_INLINE int64_t row_of(const TileCoord& coord, int query, int row) const {
    return (block.batch * all.requests.tokens + token_of(query)) * all.heads + head_of(coord, row);
  }
  EJKERNEL_INLINE unsigned hidden(int stage) const { return hidden_keys[stage]; }
  EJKERNEL_INLINE float sink_of(const TileCoord& coord, int row) const {
    if (all.sinks == nullptr || block.request < 0) return -INFINITY;
    return all.sinks[block.batch * all.sinks_stride + head_of(coord, row)];
  }
};

// The block of this CTA, with no queries if there is none. A whole warp calls this. Requests come in order, then the tokens before
// and after them; of a request its key heads, whose blocks share keys in L2, and of these the last blocks first.
template <class S>
EJKERNEL_INLINE void find_block(const Arguments& arguments, Block& found) {
  const Requests& all = arguments.requests;
  const int lane = int(threadIdx.x) % 32, requests = int(all.requests), tokens = int(all.tokens);
  int at;  // among the CTAs of the batch member
  const int batch = divide(int(blockIdx.x), arguments.ctas_of_member, at);
  const int packs = arguments.heads >> arguments.shift, packs_of_group = arguments.group >> arguments.shift;
  const int32_t* starts = all.starts + (all.one_starts ? 0 : batch * (all.requests + 1));
  const int32_t* lengths = all.lengths + (all.one_lengths ? 0 : batch * all.requests);
  const auto start = [&](int request) { return flash_attention::clamp(0, starts[request], tokens); };
  const int wanted = at / packs, block_tokens = S::kBlockQ >> arguments.shift;
  if (lane == 0) found.mask.queries = 0;
  __syncwarp();
#pragma unroll 1
  for (int base = 0, before = 0; base <= requests + 1; base += 32) {
    const int request = base + lane;
    const int begin = request < requests ? start(request) : request == requests + 1 ? start(requests) : 0;
    int end = begin;
    if (request < requests) end = start(request + 1);
    if (request == requests) end = start(0);
    if (request == requests + 1) end = tokens;
    const int count = end > begin ? end - begin : 0, blocks = (count + block_tokens - 1) / block_tokens;
    const int up_to = before + inclusive_scan(blocks), mine = up_to - blocks;
    if (blocks && mine <= wanted && wanted < up_to) {
      int rest, in_group;
      const int key_head = divide(at - mine * packs, blocks * packs_of_group, rest);
      const int block = blocks - 1 - divide(rest, packs_of_group, in_group);
      const bool owned = request < requests;
      const int keys = owned ? max(lengths[request], 0) : 0, before_new = keys - count;
      const int64_t named = all.table_width * all.page_size;
      found.mask = {count, int(keys < named ? keys : named), arguments.window ? arguments.window - 1 - before_new : kFar,
                    arguments.causal ? before_new : kFar};
      found.batch = batch, found.request = owned ? request : -1, found.first = begin, found.index = block;
      found.key_head = key_head, found.head = key_head * arguments.group + (in_group << arguments.shift);
    }
    before = __shfl_sync(0xffffffffu, up_to, 31);
    if (before > wanted) return;
  }
}

// All lanes of a producer warp call this: one warp loads keys, another values. A lane knows the page of eight keys of each tile.
template <class S>
struct Producer {
  const Arguments& arguments;
  const flash_attention::SharedStorage<S>& shared;
  const Block& block;
  unsigned* hidden_keys;

  static constexpr int kLanes = S::kBlockK / kKeysOfBit;
  static constexpr int kNoPage = -1;

  EJKERNEL_INLINE int lane() const { return int(threadIdx.x) % 32; }
  EJKERNEL_INLINE int key_of(int tile) const { return tile * S::kBlockK + lane() * kKeysOfBit; }

  // The page of this lane's keys.
  EJKERNEL_INLINE int page_of(int tile) const {
    const int key = key_of(tile);
    if (lane() >= kLanes || key >= block.mask.keys) return kNoPage;
    const Requests& all = arguments.requests;
    const int64_t member = (all.one_tables ? 0 : block.batch * all.requests) + block.request;
    const int page = all.tables[member * all.table_width + arguments.page_size.divide(uint32_t(key))];
    return page >= 0 && page < all.pages ? page : kNoPage;
  }

  // One thread issues all boxes, without a loop over lanes: coordinates that are uniform in the warp stay in uniform registers.
  EJKERNEL_INLINE void load_tile(const PageTensorMap& map, unsigned char* to, Mbarrier* full, int tile, int page) const {
    const int boxes = S::kBlockK / arguments.box_tokens, lanes = arguments.box_tokens / kKeysOfBit;
    const int head = block.key_head, batch = arguments.own_pages ? block.batch : 0;
#pragma unroll 4
    for (int i = 0; i < boxes; ++i) {
      const int of_box = warp_broadcast(page, i * lanes), key = tile * S::kBlockK + i * arguments.box_tokens;
      const int token = key - int(arguments.page_size.divide(uint32_t(key)) * arguments.page_size.value);
      const int second = arguments.order == PageOrder::kHeadTokenPage ? head : token;
      const int third = arguments.order == PageOrder::kHeadTokenPage   ? token
                        : arguments.order == PageOrder::kTokenHeadPage ? head
                                                                       : of_box;
      const int fourth = arguments.order == PageOrder::kTokenPageHead ? head : of_box;
      if (!elect_one()) continue;
      for (int atom = 0; atom < S::kAtoms; ++atom) {
        unsigned char* const box = to + atom * S::kTileAtomBytes + i * arguments.box_tokens * kAtomRowBytes;
        tma_load_pages(box, map, full, atom * flash_attention::kAtomColumns, second, third, fourth, batch);
      }
    }
  }

  EJKERNEL_INLINE void load_queries() const {
    if (lane()) return;
    const int first = block.first + ((block.index * S::kBlockQ) >> arguments.shift);
    for (int i = 0; i < S::kConsumers; ++i) {
      mbarrier_arrive_expect_tx(shared.query_full(i), S::kQueryBytes);
      for (int atom = 0; atom < S::kAtoms; ++atom) {
        tma_load(shared.query(i) + atom * S::kQueryAtomBytes, arguments.query, shared.query_full(i),
                 atom * flash_attention::kAtomColumns, first + ((i * flash_attention::kRows) >> arguments.shift), block.head,
                 block.batch);
      }
    }
  }

  EJKERNEL_INLINE void run_keys(const Range& range) const {
    load_queries();
    int page = page_of(range.low);
#pragma unroll 1
    for (int tile = range.low, done = 0; tile < range.high; ++tile, ++done) {
      const int next = page_of(tile + 1), stage = flash_attention::stage_of<S>(done);
      mbarrier_wait(shared.key_empty(stage), flash_attention::parity_of<S>(done) ^ 1);
      const unsigned hidden =
          __ballot_sync(0xffffffffu, lane() < kLanes && page == kNoPage && key_of(tile) < block.mask.keys);
      if (lane() == 0) {
        hidden_keys[stage] = hidden;
        mbarrier_arrive_expect_tx(shared.key_full(stage), S::kTileBytes);
      }
      __syncwarp();
      load_tile(arguments.key, shared.key(stage), shared.key_full(stage), tile, page);
      page = next;
    }
  }

  EJKERNEL_INLINE void run_values(const Range& range) const {
    int page = page_of(range.low);
#pragma unroll 1
    for (int tile = range.low, done = 0; tile < range.high; ++tile, ++done) {
      const int next = page_of(tile + 1), stage = flash_attention::stage_of<S>(done);
      mbarrier_wait(shared.value_empty(stage), flash_attention::parity_of<S>(done) ^ 1);
      if (lane() == 0) mbarrier_arrive_expect_tx(shared.value_full(stage), S::kTileBytes);
      __syncwarp();
      load_tile(arguments.value, shared.value(stage), shared.value_full(stage), tile, page);
      page = next;
    }
  }
};
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) attend(const __grid_constant__ Arguments arguments) {
#ifdef EJKERNEL_HOPPER
  EJKERNEL_DYNAMIC_SHARED(unsigned char, memory);
  const flash_attention::SharedStorage<S> shared(memory);
  Block& block = *reinterpret_cast<Block*>(shared.barriers() + S::kBarriers);
  unsigned* const hidden_keys = reinterpret_cast<unsigned*>(&block + 1);
  if (threadIdx.x < 32) find_block<S>(arguments, block);
  shared.init_barriers();
  if (block.mask.queries == 0) return;
  const int first = (block.index * S::kBlockQ) >> arguments.shift;
  const int end = flash_attention::min_of(first + (S::kBlockQ >> arguments.shift), block.mask.queries);
  const Range tiles = flash_attention::visible_tiles(block.mask, first, end - 1, S::kBlockK);
  const int group = warp_uniform(int(threadIdx.x) / kWarpgroupThreads);
  if (group == S::kConsumers) {
    setmaxnreg_dec<S::kProducerRegisters>();
    const Producer<S> producer{arguments, shared, block, hidden_keys};
    const int warp = warp_uniform(int(threadIdx.x) % kWarpgroupThreads / 32);
    if (warp == 0) producer.run_keys(tiles);
    if (warp == 1) producer.run_values(tiles);
  } else {
    setmaxnreg_inc<S::kConsumerRegisters>();
    const Work work(arguments, block, hidden_keys);
    flash_attention::Consumer<S, Work> consumer{work, shared, group};
    consumer.run(TileCoord{0, block.index}, tiles, 0, -1);
    consumer.end();
  }
#endif
}

}  // namespace ejkernel::paged_prefill
