// Who reads which keys, decided on the device from the lengths: one compilation serves every mix of requests.
//
// A tile is one new token's query heads under one key head, up to kRows of them, or under each of two key heads that lie side
// by side in the pages, which are then read in longer pieces. Its keys come in steps; the steps of all tiles, one after the
// other, are dealt out in even shares to as many workers as run at once (Osama et al., Stream-K, 2023). A tile of which no one
// worker has all steps is a sum of parts; a worker has at most two such tiles, the first and the last of its share, which
// bounds the memory for parts without looking at lengths.
#pragma once

#include "divide.cuh"
#include "pages.cuh"
#include "paged_attention/tiles.cuh"

namespace ejkernel::paged_attention {

// An array of pages from the first of its kind on; strides in bytes.
struct Side {
  const char* data;
  int64_t page, token, head, batch;
  int size;     // elements of a head
  bool packed;  // every head begins and ends at a multiple of kAccess, and 32 bits count accesses
};

// What a call says.
struct Call {
  Requests requests;
  const void* query;  // [batch, tokens, heads, query_size]
  Side key, value;
  const float* sinks;      // [1 or batch, heads], null when absent
  const float* key_scale;  // [1 or batch, 1 or key_heads], null when absent
  const float* value_scale;
  int sinks_batch, key_scale_batch, key_scale_head, value_scale_batch, value_scale_head;  // strides
  int batch, heads, query_size, group;  // query_size: of key.size and zeros; group: query heads of a key head
  int head_tiles, key_tiles;            // tiles of one key head's query heads, and tiles side by side for all key heads
  int together;                         // key heads of a tile: 1 or 2, and 1 unless Tile::kShares
  int window;                           // 0 for none
  float scale, soft_cap;                // soft_cap 0 for none
  bool causal;
  bool is_bf16;   // queries and results, else float16
  int step_bits;  // a warp takes 2^step_bits keys at a step
};

// A call and what all threads would have to work out of it.
struct Problem : Call {
  Divisor page, heads_above, keys_above;  // of page_size, head_tiles, key_tiles
  Divisor groups, all_heads, all_tokens;  // of group, heads, tokens
  Accesses keys_apart, values_apart;      // strides of what is packed
  int requests_in_all, longest;           // requests of the batch; keys that a table names
  int turns_bits;                         // 2^turns_bits warps take turns at a key head's keys
  int turn, turn_pages, turn_rest;        // keys from one step of a warp to its next; as whole pages and what is left
  int table_lines;                        // of memory that tables take, each thread's to fetch ahead
  int starts_apart, lengths_apart;        // strides of the batch
  int64_t tables_apart;

  explicit Problem(const Call& call)
      : Call(call),
        page(divisor(uint32_t(call.requests.page_size))),
        heads_above(divisor(uint32_t(call.head_tiles))),
        keys_above(divisor(uint32_t(call.key_tiles))),
        groups(divisor(uint32_t(call.group))),
        all_heads(divisor(uint32_t(call.heads))),
        all_tokens(divisor(uint32_t(call.requests.tokens))),
        keys_apart(accesses_of(call.key)),
        values_apart(accesses_of(call.value)),
        requests_in_all(call.batch * int(call.requests.requests)),
        longest(int(call.requests.table_width * call.requests.page_size)),
        turns_bits(kWarpsBits - call.together / 2),
        turn(1 << (call.step_bits + turns_bits)),
        turn_pages(int(turn / call.requests.page_size)),
        turn_rest(int(turn % call.requests.page_size)),
        starts_apart(call.requests.one_starts ? 0 : int(call.requests.requests + 1)),
        lengths_apart(call.requests.one_lengths ? 0 : int(call.requests.requests)),
        tables_apart(call.requests.one_tables ? 0 : call.requests.requests * call.requests.table_width) {
    const int64_t entries = (call.requests.one_tables ? 1 : call.batch) * call.requests.requests * call.requests.table_width;
    const int64_t lines = (entries * int64_t(sizeof(int32_t)) + kLine - 1) / kLine;
    table_lines = int(lines < kMostLines ? lines : kMostLines);
  }

  // Of a packed side.
  static constexpr Accesses accesses_of(const Side& side) {
    return {uint32_t(side.page / kAccess), uint32_t(side.token / kAccess), uint32_t(side.head / kAccess)};
  }

  constexpr int rows_of_head() const { return group < kRows ? group : kRows; }  // of a tile at most, of each key head
  constexpr bool fills_tiles() const { return group > kRows / 2; }              // more than half of some tile's rows
  constexpr int rows_of_part() const { return together * rows_of_head(); }
  constexpr int tiles_of_token() const { return key_tiles * head_tiles; }
  constexpr int64_t tiles() const { return int64_t(batch) * requests.tokens * tiles_of_token(); }  // of all tokens
};

// A tile whose steps several workers have, by the first of them.
struct Split {
  int row;      // the first query head under the first key head, among all tokens'
  int workers;  // that many from this one on; 0 where the last tile of its share is its own or began before
};

struct Results {
  void* out;   // [batch, tokens, heads, value.size]
  float* lse;  // [batch, tokens, heads], null when not asked for
  // Of a share's first and last tile, [workers, 2, parts_of_block, together * rows_of_head]: weighted values, room of each; and
  // the largest logit with the sum of weights relative to it.
  float* part;
  float2* part_weight;
  Split* splits;  // [workers]
};

// A request of any batch member, and the steps of keys that any of its new tokens sees.
struct Request {
  int batch, member;  // index in the batch, and in the member's requests
  int begin, count;   // new tokens
  int keys;           // how many there are, and how many of them the table names
  int limit;
  int first_step, steps;

  __device__ Request(const Problem& problem, int index) : Request(problem, Read(problem, index)) {}

  // Of a request that lane `lane` has read.
  static __device__ Request of_lane(const Problem& problem, const Request& read, int lane) {
    const auto there = [&](int value) { return known_of_lane(value, lane); };
    return Request(problem,
                   Read{there(read.batch), there(read.member), there(read.begin), there(read.count), there(read.keys)});
  }

  __device__ int tiles(const Problem& problem) const { return count * problem.tiles_of_token(); }

  // The first key that new token `local` sees, and the one after the last.
  __device__ int lowest(const Problem& problem, int local) const {
    return problem.window ? max(keys - count + local - problem.window + 1, 0) : 0;
  }
  __device__ int last(const Problem& problem, int local) const {
    return problem.causal ? min(limit, keys - count + local + 1) : limit;
  }

  // All workers together, as far as a line for each thread goes: tables come from memory while shares are worked out.
  static __device__ void fetch_tables_ahead(const Problem& problem) {
    const int line = int(blockIdx.x) * kThreads + int(threadIdx.x);
    if (line < problem.table_lines) fetch_ahead(problem.requests.tables + line * int64_t(kLine / sizeof(int32_t)));
  }

  __device__ const int32_t* table(const Problem& problem) const {
    return problem.requests.tables + batch * problem.tables_apart + member * problem.requests.table_width;
  }

 private:
  // What arrays say of a request.
  struct Read {
    int batch, member, begin, count, keys;

    __device__ Read(int batch, int member, int begin, int count, int keys)
        : batch(batch), member(member), begin(begin), count(count), keys(keys) {}
    __device__ Read(const Problem& problem, int index) {
      const Requests& all = problem.requests;
      batch = problem.batch == 1 ? 0 : divide(index, int(all.requests), index), member = index;
      const int tokens = int(all.tokens);
      const int32_t* starts = all.starts + batch * problem.starts_apart + member;
      begin = min(max(starts[0], 0), tokens);
      count = min(max(starts[1], begin), tokens) - begin;
      keys = max(all.lengths[batch * problem.lengths_apart + member], 0);
    }
  };

  __device__ Request(const Problem& problem, const Read& read)
      : batch(read.batch), member(read.member), begin(read.begin), count(read.count), keys(read.keys) {
    limit = min(keys, problem.longest);
    first_step = lowest(problem, 0) >> problem.step_bits;
    steps = max(((limit + (1 << problem.step_bits) - 1) >> problem.step_bits) - first_step, 1);
  }
};

// One tile of a request.
struct TileOf {
  int token, local;              // in the member's tokens, and in the request's
  int key_head, in_group, rows;  // the first key head; of each one's query heads the first, and how many

  __device__ TileOf(const Problem& problem, const Request& request, int tile) {
    const int above = problem.heads_above.divide(tile);
    local = problem.keys_above.divide(above);
    in_group = (tile - above * problem.head_tiles) * kRows, key_head = (above - local * problem.key_tiles) * problem.together;
    token = request.begin + local;
    rows = min(problem.group - in_group, kRows);
  }

  // The first query head under the `beside`-th key head, and its row among all tokens'.
  __device__ int head(const Problem& problem, int beside) const { return (key_head + beside) * problem.group + in_group; }
  __device__ int64_t row(const Problem& problem, const Request& request, int beside) const {
    return (request.batch * problem.requests.tokens + token) * problem.heads + head(problem, beside);
  }
};

// How steps are dealt out: evenly, so that tiles of one length begin with shares where their number divides the workers'. Where
// there are too few for all of them, each worker takes a step for each warp.
struct Shares {
  Divisor all;  // workers
  int total, each, longer;

  __device__ Shares(int total, Divisor all, int turns_bits) : all(all), total(total), each(1 << turns_bits), longer(0) {
    if (total >> turns_bits >= int(all.value)) each = all.divide(total), longer = total - each * int(all.value);
  }
  __device__ int begin(int worker) const { return min(worker * each + int(all.divide(worker * longer)), total); }
  // Whose share step `at` is in; some worker's even where starts do not ascend and sums mean nothing.
  __device__ int owner(int at) const {
    const int last = int(all.value) - 1;
    int found = min(max(int(float(at) / (float(each) + float(longer) / float(all.value))), 0), last);
    while (found > 0 && begin(found) > at) --found;
    while (found < last && begin(found + 1) <= at) ++found;
    return found;
  }
};

// The sum over this lane and those before it.
__device__ inline int sum_up_to(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_sync(kWarp, value, max(lane - step, 0));
    value += lane >= step ? other : 0;
  }
  return value;
}

// The shares, and where this worker's begins: with which request, and steps of all requests before it. A worker without a share
// has index -1.
struct Start {
  Shares shares;
  Request request;
  int index, before;
};

// Every warp looks for itself.
__device__ inline Start find_start(const Problem& problem, Divisor workers) {
  constexpr int kAtOnce = 4;  // requests that a lane asks for together
  const int requests = problem.requests_in_all, lane = threadIdx.x % 32;
  const auto read = [&](int index) { return Request(problem, min(index, requests - 1)); };
  const auto steps_of = [&](const Request& request, int index) {
    return index < requests ? request.tiles(problem) * request.steps : 0;
  };
  Request mine = read(lane);
  int steps = steps_of(mine, lane), total = steps;
#pragma unroll 1
  for (int base = 32; base < requests; base += 32 * kAtOnce) {
    int more[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) more[i] = steps_of(read(base + 32 * i + lane), base + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) total += more[i];
  }
  total = sum_of_warp(total);
  const Shares shares(total, workers, problem.turns_bits);
  const int wanted = shares.begin(blockIdx.x);
  if (wanted >= total) return {shares, mine, -1, 0};
#pragma unroll 1
  for (int base = 0, before = 0;;) {
    const int up_to = sum_up_to(steps);
    const unsigned ends_later = __ballot_sync(kWarp, before + up_to > wanted);
    if (ends_later) {
      const int at = __ffs(int(ends_later)) - 1;
      return {shares, Request::of_lane(problem, mine, at), known_of_lane(base + lane, at),
              before + known_of_lane(up_to - steps, at)};
    }
    before += known_of_lane(up_to, 31), base += 32;
    if (base >= requests) return {shares, mine, -1, 0};
    mine = read(base + lane), steps = steps_of(mine, base + lane);
  }
}

// To the next request with new tokens after `index`; whether there is one. Every warp looks for itself.
__device__ inline bool to_next_request(const Problem& problem, Request& request, int& index) {
  const int requests = problem.requests_in_all, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = index + 1; base < requests; base += 32) {
    const Request mine(problem, min(base + lane, requests - 1));
    const unsigned some = __ballot_sync(kWarp, base + lane < requests && mine.count > 0);
    if (some) {
      const int at = __ffs(int(some)) - 1;
      index = known_of_lane(base + lane, at), request = Request::of_lane(problem, mine, at);
      return true;
    }
  }
  return false;
}

// What a worker has of a tile: steps `from` to `to`.
struct Piece {
  Shares shares;
  Request request;
  TileOf tile;
  int tile_begin, from, to;  // tile_begin: steps of all tiles before it
  bool last;                 // of this worker's share

  __device__ bool begins() const { return from == 0; }  // with its tile
  __device__ bool whole() const { return from == 0 && to == request.steps; }
  // Of a tile that begins in this worker's share and ends in another.
  __device__ Split split(const Problem& problem) const {
    return {int(tile.row(problem, request, 0)), shares.owner(tile_begin + request.steps - 1) - int(blockIdx.x) + 1};
  }
};

// The pieces of this worker's share, one after the other. Every warp looks for itself.
template <typename Each>
__device__ inline void each_piece(const Problem& problem, Divisor workers, Each each) {
  const int worker = blockIdx.x;
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
    at = tile_begin + to;
    each(Piece{start.shares, request, TileOf(problem, request, number), tile_begin, from, to, at >= share_end});
    const int next = before + request.tiles(problem) * request.steps;
    if (at >= next && at < share_end) {
      before = next;
      if (!to_next_request(problem, request, index)) return;
    }
  }
}

}  // namespace ejkernel::paged_attention
