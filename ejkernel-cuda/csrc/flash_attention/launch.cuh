// Kernel arguments and grid size of a call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attention/combine.cuh"

namespace ejkernel::flash_attention {

constexpr int kMaxHeadSize = 256;  // elements of a head
constexpr int64_t kMaxBlocks = int64_t{1} << 30;
constexpr int64_t kMaxTokens = int64_t{1} << 27;
constexpr int64_t kMaxOffset = int64_t{1} << 30;  // of `below` and `above`: sums with tokens fit into 32 bits

// query [batch, queries, heads, size], key [batch, keys, key_heads, size], value [batch, keys, key_heads, value_size], out
// [batch, queries, heads, value_size], lse [batch, queries, heads] or null. Query i sees keys i - below ... i + above. Logits
// are `scale * query . key`, then `cap * tanh(logits / cap)` if cap is not 0. `pack` query heads share the rows of a block: a
// power of two up to kRows that divides heads / key_heads. Up to `split_kv_ctas` CTAs split the blocks left after the last full
// wave; `partials` has room for their results.
struct Call {
  const void *query, *key, *value;
  void* out;
  float* lse;
  PartialResults partials;
  int64_t batch, queries, keys, heads, key_heads, size, value_size, below, above, pack, split_kv_ctas;
  float scale, cap;
  bool ping_pong, persistent;
};

// An array [batch, length, heads, size] of two-byte elements, and its TMA box: tokens, heads, and the columns of a swizzle
// atom.
struct TensorMapSpec {
  const void* data;
  int64_t size, length, heads, batch;
  int box_tokens, box_heads;
};

inline Logits logits_of(float scale, float cap) {
  if (cap != 0.f) return {LogitKind::kCapped, scale / cap, cap * kLog2E};
  if (scale > 0.f) return {LogitKind::kPlain, 1.f, scale * kLog2E};
  return {LogitKind::kScaled, scale, kLog2E};  // the row maximum of the logits is not that of the dot products
}

// Rows (heads of batch members) of an L2 group: as many neighbours that share keys as fill L2, but enough to keep the device
// busy.
inline int64_t l2_group_of(int64_t blocks, int64_t rows, int64_t group, int64_t kv_bytes, int64_t sms) {
  constexpr int64_t kCached = 24 << 20;
  const int64_t busy = (sms + blocks * group - 1) / (blocks * group);
  const int64_t groups = std::max(kCached / std::max<int64_t>(kv_bytes, 1), busy);
  return std::min(rows, groups * group);
}

// Stream-K partition of the blocks after the last full wave; `tiles` is what any of them visits. No CTA gets less than
// kMinTilesPerCta: its time would be below that of the combine step.
inline StreamK partition_stream_k(int64_t total_blocks, int64_t ctas, Range tiles) {
  constexpr int64_t kMinTilesPerCta = 4;
  const int64_t count = tiles.high - tiles.low, remainder = total_blocks % ctas, total_tiles = remainder * count;
  const int64_t split_kv_ctas = std::min(ctas, total_tiles / kMinTilesPerCta);
  if (split_kv_ctas <= remainder) return {int(total_blocks)};
  return {int(total_blocks - remainder),
          int(total_blocks / ctas),
          int(remainder),
          tiles.low,
          int(count),
          int(split_kv_ctas),
          int(total_tiles / split_kv_ctas),
          int(total_tiles % split_kv_ctas)};
}

// `make_tensor_map` turns a TensorMapSpec into a TensorMap.
template <class S, class MakeTensorMap>
Arguments arguments_of(const Call& call, int64_t sms, MakeTensorMap make_tensor_map) {
  const int64_t heads = call.heads / call.pack, group = call.heads / call.key_heads, tokens = S::kBlockQ / call.pack;
  const int64_t blocks = (call.queries + tokens - 1) / tokens, rows = heads * call.batch;
  const int64_t read = call.keys * (call.size + call.value_size) * 2;
  const int l2_group = int(l2_group_of(blocks, rows, group / call.pack, read, sms));
  // Later blocks see more keys under a causal mask without a narrow window.
  const bool reverse_blocks = call.above < call.keys && call.below >= call.queries;
  Arguments arguments{};
  const int pack = int(call.pack), box_tokens = kRows / pack;
  arguments.query =
      make_tensor_map(TensorMapSpec{call.query, call.size, call.queries, call.heads, call.batch, box_tokens, pack});
  arguments.key = make_tensor_map(TensorMapSpec{call.key, call.size, call.keys, call.key_heads, call.batch, S::kBlockK, 1});
  arguments.value =
      make_tensor_map(TensorMapSpec{call.value, call.value_size, call.keys, call.key_heads, call.batch, S::kBlockK, 1});
  arguments.out =
      make_tensor_map(TensorMapSpec{call.out, call.value_size, call.queries, call.heads, call.batch, box_tokens, pack});
  arguments.lse = call.lse;
  arguments.mask = {int(call.queries), int(call.keys), int(call.below), int(call.above)};
  arguments.partials = call.partials;
  arguments.scheduler = {int(blocks), int(heads), int(call.batch), l2_group, reverse_blocks};
  arguments.logits = logits_of(call.scale, call.cap);
  while (1 << arguments.shift < pack) ++arguments.shift;
  arguments.group = int(group);
  const int64_t total_blocks = blocks * rows, max_ctas = call.split_kv_ctas ? std::min(sms, call.split_kv_ctas) : sms;
  const Range tiles{visible_tiles(arguments.mask, 0, int(tokens) - 1, S::kBlockK).low,
                    visible_tiles(arguments.mask, int((blocks - 1) * tokens), int(blocks * tokens) - 1, S::kBlockK).high};
  arguments.stream_k =
      call.persistent && call.split_kv_ctas ? partition_stream_k(total_blocks, max_ctas, tiles) : StreamK{int(total_blocks)};
  arguments.ctas = int(call.persistent ? std::min<int64_t>(std::max<int64_t>(total_blocks, arguments.stream_k.ctas), max_ctas)
                                       : total_blocks);
  arguments.ping_pong = call.ping_pong;
  return arguments;
}

// Call `run.operator()<Shape>()` for heads of up to kMaxHeadSize elements. D64 has room for a third consumer; wide heads need
// shorter tiles. On an H200, tiles of 176 keys at D128 were no faster than those of 128.
template <typename T, typename Run>
auto for_shape(int64_t size, Run run) {
  if (size <= 64) return run.template operator()<Shape<T, 64, 128, 3, 4>>();
  if (size <= 128) return run.template operator()<Shape<T, 128, 128, 2, 2>>();
  return run.template operator()<Shape<T, kMaxHeadSize, 80, 2, 2>>();
}

}  // namespace ejkernel::flash_attention
