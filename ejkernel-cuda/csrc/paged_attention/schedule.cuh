// Stream-K partition of the KV steps, computed on the device from the lengths: one compilation serves every mix of requests.
//
// A tile has the query heads of one new token under one key head, up to kRows, or under each of several adjacent key heads,
// whose rows in the pages are contiguous. Its keys are cut into steps. The steps of all tiles are split evenly among as many
// workers as are resident (Osama et al., Stream-K, 2023). If several workers split a tile, each writes a partial result. A
// worker splits at most two tiles, the first and the last of its share, which bounds the memory for partial results without
// reading lengths.
#pragma once

#include "divide.cuh"
#include "pages.cuh"
#include "paged_attention/tiles.cuh"

namespace ejkernel::paged_attention {

// An array of key or value pages from its first element on; strides in bytes.
struct KvArray {
  const char* data;
  int64_t page, token, head, batch;
  int size;     // elements of a head
  bool packed;  // every head is aligned to kVectorBytes, and vectors can be counted in 32 bits
};

// Arguments of a call.
struct Call {
  Requests requests;
  const void* query;  // [batch, tokens, heads, query_size]
  KvArray key, value;
  const float* sinks;      // [1 or batch, heads], null when absent
  const float* key_scale;  // [1 or batch, 1 or key_heads], null when absent
  const float* value_scale;
  int sinks_batch, key_scale_batch, key_scale_head, value_scale_batch, value_scale_head;  // strides
  int batch, heads, query_size, group;  // query_size: key.size with padding; group: query heads per key head
  int head_tiles, key_tiles;            // tiles of one key head's query heads; tiles of all key heads
  int tile_key_heads;                   // key heads of a tile: 1, 2 or 4, and 1 unless Tile::kMultiHead
  int window;                           // 0 for none
  float scale, soft_cap;                // soft_cap 0 for none
  bool causal;
  bool is_bf16;   // queries and results, else float16
  int step_bits;  // a warp's step has 2^step_bits keys
};

// A call, and values that all threads would compute from it.
struct Problem : Call {
  Divisor page, head_tile_divisor, key_tile_divisor;       // of page_size, head_tiles, key_tiles
  Divisor group_divisor, heads_divisor, tokens_divisor;    // of group, heads, tokens
  VectorStrides key_vector_strides, value_vector_strides;  // strides of packed arrays
  int total_requests, max_keys;                            // requests of the batch; keys that a table names
  int interleave_bits;                                     // 2^interleave_bits warps interleave a key head's steps
  int step_stride, step_stride_pages,
      step_stride_rest;               // keys from one step of a warp to its next; as whole pages and the rest
  int prefetch_lines;                 // cache lines of the tables, which each thread prefetches one of
  int starts_stride, lengths_stride;  // strides of the batch
  int64_t tables_stride;

  explicit Problem(const Call& call)
      : Call(call),
        page(divisor(uint32_t(call.requests.page_size))),
        head_tile_divisor(divisor(uint32_t(call.head_tiles))),
        key_tile_divisor(divisor(uint32_t(call.key_tiles))),
        group_divisor(divisor(uint32_t(call.group))),
        heads_divisor(divisor(uint32_t(call.heads))),
        tokens_divisor(divisor(uint32_t(call.requests.tokens))),
        key_vector_strides(vector_strides_of(call.key)),
        value_vector_strides(vector_strides_of(call.value)),
        total_requests(call.batch * int(call.requests.requests)),
        max_keys(int(call.requests.table_width * call.requests.page_size)),
        interleave_bits(kWarpsBits - call.tile_key_heads / 2),
        step_stride(1 << (call.step_bits + interleave_bits)),
        step_stride_pages(int(step_stride / call.requests.page_size)),
        step_stride_rest(int(step_stride % call.requests.page_size)),
        starts_stride(call.requests.one_starts ? 0 : int(call.requests.requests + 1)),
        lengths_stride(call.requests.one_lengths ? 0 : int(call.requests.requests)),
        tables_stride(call.requests.one_tables ? 0 : call.requests.requests * call.requests.table_width) {
    const int64_t entries = (call.requests.one_tables ? 1 : call.batch) * call.requests.requests * call.requests.table_width;
    const int64_t lines = (entries * int64_t(sizeof(int32_t)) + kCacheLine - 1) / kCacheLine;
    prefetch_lines = int(lines < kMaxPrefetchLines ? lines : kMaxPrefetchLines);
  }

  // Of a packed array.
  static constexpr VectorStrides vector_strides_of(const KvArray& kv) {
    return {uint32_t(kv.page / kVectorBytes), uint32_t(kv.token / kVectorBytes), uint32_t(kv.head / kVectorBytes)};
  }

  constexpr int rows_of_head() const { return group < kRows ? group : kRows; }  // maximum per tile and key head
  constexpr bool fills_tiles() const { return group > kRows / 2; }              // more than half of some tile's rows
  constexpr int rows_per_partial() const { return tile_key_heads * rows_of_head(); }
  constexpr int tiles_of_token() const { return key_tiles * head_tiles; }
  constexpr int64_t tiles() const { return int64_t(batch) * requests.tokens * tiles_of_token(); }  // of all tokens
};

// A tile that several workers split, in the record of the first of them.
struct Split {
  int row;      // the first query head under the first key head, among all tokens'
  int workers;  // workers from this one on; 0 if this worker's last tile is not split or began earlier
};

struct Results {
  void* out;   // [batch, tokens, heads, value.size]
  float* lse;  // [batch, tokens, heads], null if not requested
  // Partial results of a worker's first and last tile, [workers, 2, partials_per_block, tile_key_heads * rows_of_head]: the
  // unnormalised output of padded heads; and the row maximum with the sum of weights relative to it.
  float* partial;
  float2* partial_stats;
  Split* splits;  // [workers]
};

// A request of any batch member, and the KV steps that any of its new tokens sees.
struct Request {
  int batch, member;  // index in the batch, and in the member's requests
  int begin, count;   // new tokens
  int keys;           // keys, and those of them that the table names
  int limit;
  int first_step, steps;

  __device__ Request(const Problem& problem, int index) : Request(problem, Read(problem, index)) {}

  // Broadcast a request that lane `lane` has read.
  static __device__ Request of_lane(const Problem& problem, const Request& read, int lane) {
    const auto from_lane = [&](int value) { return warp_broadcast(value, lane); };
    return Request(problem, Read{from_lane(read.batch), from_lane(read.member), from_lane(read.begin), from_lane(read.count),
                                 from_lane(read.keys)});
  }

  __device__ int tiles(const Problem& problem) const { return count * problem.tiles_of_token(); }

  // The first key that new token `local` sees, and the end of its keys.
  __device__ int lowest(const Problem& problem, int local) const {
    return problem.window ? max(keys - count + local - problem.window + 1, 0) : 0;
  }
  __device__ int last(const Problem& problem, int local) const {
    return problem.causal ? min(limit, keys - count + local + 1) : limit;
  }

  // Prefetch the tables, one cache line per thread of all workers, while the partition is computed.
  static __device__ void prefetch_tables(const Problem& problem) {
    const int line = int(blockIdx.x) * kThreads + int(threadIdx.x);
    if (line < problem.prefetch_lines) prefetch_l2(problem.requests.tables + line * int64_t(kCacheLine / sizeof(int32_t)));
  }

  __device__ const int32_t* table(const Problem& problem) const {
    return problem.requests.tables + batch * problem.tables_stride + member * problem.requests.table_width;
  }

 private:
  // The array elements of a request.
  struct Read {
    int batch, member, begin, count, keys;

    __device__ Read(int batch, int member, int begin, int count, int keys)
        : batch(batch), member(member), begin(begin), count(count), keys(keys) {}
    __device__ Read(const Problem& problem, int index) {
      const Requests& all = problem.requests;
      batch = problem.batch == 1 ? 0 : divide(index, int(all.requests), index), member = index;
      const int tokens = int(all.tokens);
      const int32_t* starts = all.starts + batch * problem.starts_stride + member;
      begin = min(max(starts[0], 0), tokens);
      count = min(max(starts[1], begin), tokens) - begin;
      keys = max(all.lengths[batch * problem.lengths_stride + member], 0);
    }
  };

  __device__ Request(const Problem& problem, const Read& read)
      : batch(read.batch), member(read.member), begin(read.begin), count(read.count), keys(read.keys) {
    limit = min(keys, problem.max_keys);
    first_step = lowest(problem, 0) >> problem.step_bits;
    steps = max(((limit + (1 << problem.step_bits) - 1) >> problem.step_bits) - first_step, 1);
  }
};

// A tile of a request.
struct TileCoord {
  int token, local;              // in the member's tokens, and in the request's
  int key_head, in_group, rows;  // the first key head; under each key head the first query head, and how many

  __device__ TileCoord(const Problem& problem, const Request& request, int tile) {
    const int above = problem.head_tile_divisor.divide(tile);
    local = problem.key_tile_divisor.divide(above);
    in_group = (tile - above * problem.head_tiles) * kRows,
    key_head = (above - local * problem.key_tiles) * problem.tile_key_heads;
    token = request.begin + local;
    rows = min(problem.group - in_group, kRows);
  }

  // The first query head under the `tile_head`-th key head, and its row among all tokens'.
  __device__ int head(const Problem& problem, int tile_head) const { return (key_head + tile_head) * problem.group + in_group; }
  __device__ int64_t row(const Problem& problem, const Request& request, int tile_head) const {
    return (request.batch * problem.requests.tokens + token) * problem.heads + head(problem, tile_head);
  }
};

// Even stream-K partition: tiles of equal length begin at a worker's share if their number divides the workers'. With too few
// steps for all workers, each takes one step per warp.
struct StreamK {
  Divisor all;  // workers
  int total, per_worker, extra;

  __device__ StreamK(int total, Divisor all, int interleave_bits)
      : all(all), total(total), per_worker(1 << interleave_bits), extra(0) {
    if (total >> interleave_bits >= int(all.value)) per_worker = all.divide(total), extra = total - per_worker * int(all.value);
  }
  __device__ int begin(int worker) const { return min(worker * per_worker + int(all.divide(worker * extra)), total); }
  // The worker of step `at`; any worker if starts do not ascend and the sums are meaningless.
  __device__ int owner(int at) const {
    const int last = int(all.value) - 1;
    int found = min(max(int(float(at) / (float(per_worker) + float(extra) / float(all.value))), 0), last);
    while (found > 0 && begin(found) > at) --found;
    while (found < last && begin(found + 1) <= at) ++found;
    return found;
  }
};

// The partition, and where this worker's share begins: its request, and the steps of all requests before it. A worker without a
// share has index -1.
struct Start {
  StreamK stream_k;
  Request request;
  int index, before;
};

// Every warp computes this on its own.
__device__ inline Start find_start(const Problem& problem, Divisor workers) {
  constexpr int kInFlight = 4;  // requests whose loads a lane keeps in flight
  const int requests = problem.total_requests, lane = threadIdx.x % 32;
  const auto read = [&](int index) { return Request(problem, min(index, requests - 1)); };
  const auto steps_of = [&](const Request& request, int index) {
    return index < requests ? request.tiles(problem) * request.steps : 0;
  };
  Request mine = read(lane);
  int steps = steps_of(mine, lane), total = steps;
#pragma unroll 1
  for (int base = 32; base < requests; base += 32 * kInFlight) {
    int more[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) more[i] = steps_of(read(base + 32 * i + lane), base + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) total += more[i];
  }
  total = warp_sum(total);
  const StreamK stream_k(total, workers, problem.interleave_bits);
  const int wanted = stream_k.begin(blockIdx.x);
  if (wanted >= total) return {stream_k, mine, -1, 0};
#pragma unroll 1
  for (int base = 0, before = 0;;) {
    const int up_to = inclusive_scan(steps);
    const unsigned ends_later = __ballot_sync(kWarp, before + up_to > wanted);
    if (ends_later) {
      const int at = __ffs(int(ends_later)) - 1;
      return {stream_k, Request::of_lane(problem, mine, at), warp_broadcast(base + lane, at),
              before + warp_broadcast(up_to - steps, at)};
    }
    before += warp_broadcast(up_to, 31), base += 32;
    if (base >= requests) return {stream_k, mine, -1, 0};
    mine = read(base + lane), steps = steps_of(mine, base + lane);
  }
}

// Advance to the next request with new tokens after `index`; false if there is none. Every warp computes this on its own.
__device__ inline bool next_request(const Problem& problem, Request& request, int& index) {
  const int requests = problem.total_requests, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = index + 1; base < requests; base += 32) {
    const Request mine(problem, min(base + lane, requests - 1));
    const unsigned some = __ballot_sync(kWarp, base + lane < requests && mine.count > 0);
    if (some) {
      const int at = __ffs(int(some)) - 1;
      index = warp_broadcast(base + lane, at), request = Request::of_lane(problem, mine, at);
      return true;
    }
  }
  return false;
}

// A worker's segment of a tile: steps `from` to `to`.
struct Segment {
  StreamK stream_k;
  Request request;
  TileCoord tile;
  int tile_begin, from, to;  // tile_begin: steps of all tiles before it
  bool last;                 // of this worker's share

  __device__ bool begins() const { return from == 0; }  // whether the tile begins here
  __device__ bool whole() const { return from == 0 && to == request.steps; }
  // The record of a tile that begins in this worker's share and ends in another.
  __device__ Split split(const Problem& problem) const {
    return {int(tile.row(problem, request, 0)), stream_k.owner(tile_begin + request.steps - 1) - int(blockIdx.x) + 1};
  }
};

// Call `body` for each segment of this worker's share. Every warp computes the segments on its own.
template <typename Body>
__device__ inline void for_each_segment(const Problem& problem, Divisor workers, Body body) {
  const int worker = blockIdx.x;
  if (problem.total_requests == 0) return;
  const Start start = find_start(problem, workers);
  if (start.index < 0) return;
  const int end = start.stream_k.begin(worker + 1);
  int index = start.index, before = start.before, at = start.stream_k.begin(worker);
  Request request = start.request;
  while (at < end) {
    int from;
    const int number = divide(at - before, request.steps, from);
    const int tile_begin = at - from, to = min(request.steps, end - tile_begin);
    at = tile_begin + to;
    body(Segment{start.stream_k, request, TileCoord(problem, request, number), tile_begin, from, to, at >= end});
    const int next = before + request.tiles(problem) * request.steps;
    if (at >= next && at < end) {
      before = next;
      if (!next_request(problem, request, index)) return;
    }
  }
}

}  // namespace ejkernel::paged_attention
