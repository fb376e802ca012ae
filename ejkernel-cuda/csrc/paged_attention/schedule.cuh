// Who reads which keys, decided on the device from the lengths: one compilation serves every mix of requests.
//
// A tile is one new token's query heads under one key head, up to kRows of them, or under each of several key heads that lie
// side by side in the pages, which are then read in longer pieces. Its keys come in blocks; the blocks of
// all tiles, one after the other, are dealt out in equal shares to as many workers as run at once (Osama et al., Stream-K,
// 2023). A tile of which no one worker has all blocks is a sum of parts; a worker has at most two such tiles, the first and the
// last of its share, which bounds the memory for parts without looking at lengths.
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

struct Problem {
  Requests requests;
  const void* query;  // [batch, tokens, heads, key.size]
  Side key, value;
  const float* sinks;      // [1 or batch, heads], null when absent
  const float* key_scale;  // [1 or batch, 1 or key_heads], null when absent
  const float* value_scale;
  int sinks_batch, key_scale_batch, key_scale_head, value_scale_batch, value_scale_head;  // strides
  int batch, heads, group;    // group: query heads of a key head
  int head_tiles, key_tiles;  // tiles of one key head's query heads, and tiles side by side for all key heads
  int together;               // key heads of a tile: 1, 2 or 4, and 1 unless Tile::kShares
  int window;                 // 0 for none
  float scale, soft_cap;      // soft_cap 0 for none
  bool causal;
  bool is_bf16;    // queries and results, else float16
  int block_bits;  // 2^block_bits keys are dealt out together

  constexpr int rows_of_head() const { return group < kRows ? group : kRows; }  // of a tile at most, of each key head
  __device__ bool fills_tiles() const { return group > kRows / 2; }             // more than half of some tile's rows
  constexpr int tiles_of_token() const { return key_tiles * head_tiles; }
  __device__ int all_requests() const { return batch * int(requests.requests); }
};

// A tile whose blocks several workers have, by the first of them.
struct Split {
  int row;    // the first query head under the first key head, among all tokens'
  int parts;  // that many workers from this one on; 0 where the last tile of its share is its own or began before
};

struct Results {
  void* out;        // [batch, tokens, heads, value.size]
  float* lse;       // [batch, tokens, heads], null when not asked for
  float* part;      // [workers, 2, together * kRows, value.size]: what is known of the first and the last tile of a share
  float* part_lse;  // [workers, 2, together * kRows], in units of log 2
  Split* splits;    // [workers]
};

// A request of any batch member, and the blocks of keys that any of its new tokens sees.
struct Request {
  int batch, member;  // index in the batch, and in the member's requests
  int begin, count;   // new tokens
  int keys;           // how many there are, and how many of them the table names
  int limit;
  int first_block, blocks;

  __device__ Request(const Problem& problem, int index) {
    const Requests& all = problem.requests;
    batch = problem.batch == 1 ? 0 : divide(index, int(all.requests), index), member = index;
    const int tokens = int(all.tokens);
    const int32_t* starts = all.starts + (all.one_starts ? 0 : batch * (all.requests + 1)) + member;
    begin = min(max(starts[0], 0), tokens);
    count = min(max(starts[1], begin), tokens) - begin;
    keys = max(all.lengths[(all.one_lengths ? 0 : batch * all.requests) + member], 0);
    limit = min(keys, int(all.table_width) * int(all.page_size));
    first_block = lowest(problem, 0) >> problem.block_bits;
    blocks = max(((limit + (1 << problem.block_bits) - 1) >> problem.block_bits) - first_block, 1);
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
    const Requests& all = problem.requests;
    const int64_t entries = (all.one_tables ? 1 : problem.batch) * all.requests * all.table_width;
    const int64_t at = (blockIdx.x * int64_t(kThreads) + threadIdx.x) * (kLine / int(sizeof(int32_t)));
    if (at < entries) fetch_ahead(all.tables + at);
  }

  __device__ const int32_t* table(const Problem& problem) const {
    const Requests& all = problem.requests;
    return all.tables + ((all.one_tables ? 0 : int64_t(batch) * all.requests) + member) * all.table_width;
  }
};

// One tile of a request.
struct TileOf {
  int token, local;              // in the member's tokens, and in the request's
  int key_head, in_group, rows;  // the first key head; of each one's query heads the first, and how many

  __device__ TileOf(const Problem& problem, const Request& request, int tile) {
    tile = divide(tile, problem.head_tiles, in_group);
    local = divide(tile, problem.key_tiles, key_head);
    in_group *= kRows, key_head *= problem.together;
    token = request.begin + local;
    rows = min(problem.group - in_group, kRows);
  }

  // The first query head under the `beside`-th key head, and its row among all tokens'.
  __device__ int head(const Problem& problem, int beside) const { return (key_head + beside) * problem.group + in_group; }
  __device__ int64_t row(const Problem& problem, const Request& request, int beside) const {
    return (request.batch * problem.requests.tokens + token) * problem.heads + head(problem, beside);
  }
};

// How blocks are dealt out: to the fewest workers of which none has more than it would have among all, which leaves the fewest
// parts. Every share has one at least, and the first `longer` shares have one more than the others.
struct Shares {
  int workers, each, longer;

  static __device__ Shares of(int total, int most) {
    if (total <= 0) return {0, 0, 0};
    int rest;
    const int longest = 1 + divide(total - 1, most, rest);
    Shares found{1 + divide(total - 1, longest, rest), 0, 0};
    found.each = divide(total, found.workers, found.longer);
    return found;
  }
  __device__ int begin(int worker) const { return worker * each + min(worker, longer); }
  // Whose share block `at` is in; some worker's even where starts do not ascend and sums mean nothing.
  __device__ int owner(int at) const {
    int rest;
    const int before = longer * (each + 1);
    const int found = at < before ? divide(max(at, 0), each + 1, rest) : longer + divide(at - before, each, rest);
    return min(found, workers - 1);
  }
};

// The shares, and where this worker's begins: the request, or one past the last, and blocks of all requests before it.
struct Start {
  Shares shares;
  int request, before;
};

// All threads of the block; `sums` and `found`, which stays there, lie in shared memory.
__device__ inline Start find_start(const Problem& problem, int most_workers, int* sums, Start& found) {
  const int requests = problem.all_requests(), each = (requests + kThreads - 1) / kThreads;
  const int first = min(int(threadIdx.x) * each, requests), end = min(first + each, requests);
  int mine = 0;
#pragma unroll 1
  for (int index = first; index < end; ++index) {
    const Request request(problem, index);
    mine += request.tiles(problem) * request.blocks;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int up_to = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_sync(kWarp, up_to, max(lane - step, 0));
    up_to += lane >= step ? other : 0;
  }
  if (lane == 31) sums[warp] = up_to;
  if (threadIdx.x == 0) found = {{}, requests, 0};
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    up_to += other < warp ? sums[other] : 0;
    total += sums[other];
  }
  const Shares shares = Shares::of(total, most_workers);
  const int wanted = int(blockIdx.x) < shares.workers ? shares.begin(blockIdx.x) : -1;
  int before = up_to - mine;
  if (before <= wanted && wanted < up_to) {
#pragma unroll 1
    for (int index = first; index < end; ++index) {
      const Request request(problem, index);
      const int next = before + request.tiles(problem) * request.blocks;
      if (before <= wanted && wanted < next) found.request = index, found.before = before;
      before = next;
    }
  }
  if (threadIdx.x == 0) found.shares = shares;
  __syncthreads();
  return found;
}

// The next request with new tokens after this one; every warp looks for itself.
__device__ inline int next_request(const Problem& problem, int index) {
  const int requests = problem.all_requests(), lane = threadIdx.x % 32;
  for (int base = index + 1; base < requests; base += 32) {
    const int other = base + lane;
    const unsigned some = __ballot_sync(kWarp, other < requests && Request(problem, min(other, requests - 1)).count > 0);
    if (some) return base + __ffs(int(some)) - 1;
  }
  return requests;
}

}  // namespace ejkernel::paged_attention
