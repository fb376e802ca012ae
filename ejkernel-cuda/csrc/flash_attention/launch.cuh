// From the facts of a call to what the kernel is given and how many programs there are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attention/merge.cuh"

namespace ejkernel::flash_attention {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int kWidest = 256;  // elements of a head
constexpr int64_t kMostBlocks = int64_t{1} << 30;
constexpr int64_t kMostTokens = int64_t{1} << 27;
constexpr int64_t kFarthest = int64_t{1} << 30;  // of `below` and `above`: sums with tokens stay within 32 bits

// query [batch, queries, heads, size], key [batch, keys, key_heads, size], value [batch, keys, key_heads, value_size],
// out [batch, queries, heads, value_size], lse [batch, queries, heads] or null. Query i sees keys i - below ... i + above.
// Logits are `scale * query . key`, then `cap * tanh(logits / cap)` where cap is not 0. `pack` query heads are rows of a block
// side by side: a power of two up to kRows that divides heads / key_heads. Up to `sharers` programs share blocks that are left
// after whole rounds of them; `parts` has room for what they leave.
struct Call {
  const void *query, *key, *value;
  void* out;
  float* lse;
  Parts parts;
  int64_t batch, queries, keys, heads, key_heads, size, value_size, below, above, pack, sharers;
  float scale, cap;
  bool take_turns, persistent;
};

// An array [batch, length, heads, size] of elements of two bytes that is copied in boxes of so many tokens and heads and a
// panel's columns.
struct Boxes {
  const void* data;
  int64_t size, length, heads, batch;
  int tokens, heads_of_box;
};

inline Logits logits_of(float scale, float cap) {
  if (cap != 0.f) return {Form::kCapped, scale / cap, cap * kLog2E};
  if (scale > 0.f) return {Form::kPlain, 1.f, scale * kLog2E};
  return {Form::kScaled, scale, kLog2E};  // the largest logit is not that of the largest product
}

// Rows of a section: of neighbours that share keys, so many that these fill the cache, but no fewer than keep the device busy.
inline int64_t section_of(int64_t blocks, int64_t rows, int64_t group, int64_t bytes_of_keys, int64_t processors) {
  constexpr int64_t kCached = 24 << 20;
  const int64_t busy = (processors + blocks * group - 1) / (blocks * group);
  const int64_t shares = std::max(kCached / std::max<int64_t>(bytes_of_keys, 1), busy);
  return std::min(rows, shares * group);
}

// Of `total` blocks, none of which visits other tiles than these. No share is less than kLeastTiles: each takes less time than
// what is left for the merge.
inline Shares shares_of(int64_t total, int64_t programs, Range tiles) {
  constexpr int64_t kLeastTiles = 4;
  const int64_t count = tiles.high - tiles.low, left = total % programs, all = left * count;
  const int64_t sharers = std::min(programs, all / kLeastTiles);
  if (sharers <= left) return {int(total)};
  return {int(total - left), int(total / programs), int(left),          tiles.low,
          int(count),        int(sharers),          int(all / sharers), int(all % sharers)};
}

// `make_map` turns Boxes into a TensorMap.
template <class S, class MakeMap>
Arguments arguments_of(const Call& call, int64_t processors, MakeMap make_map) {
  const int64_t heads = call.heads / call.pack, group = call.heads / call.key_heads, tokens = S::kBlockQ / call.pack;
  const int64_t blocks = (call.queries + tokens - 1) / tokens, rows = heads * call.batch;
  const int64_t read = call.keys * (call.size + call.value_size) * 2;
  const int section = int(section_of(blocks, rows, group / call.pack, read, processors));
  // Later blocks see more keys where keys end at the query's position and do not begin near it.
  const bool last_first = call.above < call.keys && call.below >= call.queries;
  Arguments arguments{};
  const int pack = int(call.pack), tokens_of_box = kRows / pack;
  arguments.query = make_map(Boxes{call.query, call.size, call.queries, call.heads, call.batch, tokens_of_box, pack});
  arguments.key = make_map(Boxes{call.key, call.size, call.keys, call.key_heads, call.batch, S::kBlockK, 1});
  arguments.value = make_map(Boxes{call.value, call.value_size, call.keys, call.key_heads, call.batch, S::kBlockK, 1});
  arguments.out = make_map(Boxes{call.out, call.value_size, call.queries, call.heads, call.batch, tokens_of_box, pack});
  arguments.lse = call.lse;
  arguments.rules = {int(call.queries), int(call.keys), int(call.below), int(call.above)};
  arguments.parts = call.parts;
  arguments.order = {int(blocks), int(heads), int(call.batch), section, last_first};
  arguments.logits = logits_of(call.scale, call.cap);
  while (1 << arguments.shift < pack) ++arguments.shift;
  arguments.group = int(group);
  const int64_t total = blocks * rows, most = call.sharers ? std::min(processors, call.sharers) : processors;
  const Range tiles{tiles_of(arguments.rules, 0, int(tokens) - 1, S::kBlockK).low,
                    tiles_of(arguments.rules, int((blocks - 1) * tokens), int(blocks * tokens) - 1, S::kBlockK).high};
  arguments.shares = call.persistent && call.sharers ? shares_of(total, most, tiles) : Shares{int(total)};
  arguments.programs =
      int(call.persistent ? std::min<int64_t>(std::max<int64_t>(total, arguments.shares.programs), most) : total);
  arguments.take_turns = call.take_turns;
  return arguments;
}

// `run.operator()<Shape>()` for heads of up to kWidest elements. D64 leaves room for a third consumer, and wide heads for
// shorter tiles only. On an H200, tiles of 176 keys at D128 were no faster than those of 128.
template <typename T, typename Run>
auto for_shape(int64_t size, Run run) {
  if (size <= 64) return run.template operator()<Shape<T, 64, 128, 3, 4>>();
  if (size <= 128) return run.template operator()<Shape<T, 128, 128, 2, 2>>();
  return run.template operator()<Shape<T, kWidest, 80, 2, 2>>();
}

}  // namespace ejkernel::flash_attention
