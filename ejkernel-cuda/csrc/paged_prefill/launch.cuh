// Kernel arguments and grid size of a call.
#pragma once

#include <array>
#include <numeric>

#include "flash_attention/launch.cuh"
#include "paged_prefill/kernels.cuh"
#include "tensor_map_axis.h"

namespace ejkernel::paged_prefill {

constexpr int kMaxStages = 4;

// Pages of two-byte elements; strides in elements. Keys and values of all heads that are in use.
struct Pages {
  const void* data;
  int64_t page, token, head, batch, size;  // size: elements of a head
};

// query [batch, tokens, heads, size] with key.size rounded up to a multiple of 8, out [batch, tokens, heads, value_size] likewise,
// lse [batch, tokens, heads] or null, sinks [1 or batch, heads] or null. `pack` query heads share the rows of a block: a power of
// two up to 64 that divides heads / key_heads.
struct Call {
  Requests requests;
  Pages key, value;
  const void* query;
  void* out;
  float* lse;
  const float* sinks;
  int64_t sinks_stride, batch, heads, key_heads, size, value_size, window, pack;
  float scale, cap;
  bool causal, own_pages;
};

// The axes of pages after a row's own, in an order of rising strides that both arrays of pages have.
inline PageOrder order_of(const Pages& pages) {
  if (pages.head > pages.page) return PageOrder::kTokenPageHead;
  return pages.head > pages.token ? PageOrder::kTokenHeadPage : PageOrder::kHeadTokenPage;
}

inline std::array<TensorMapAxis, 5> tensor_map_axes(const Call& call, const Pages& pages, int box_tokens) {
  const TensorMapAxis row{pages.size, flash_attention::kAtomColumns, 2};
  const TensorMapAxis token{call.requests.page_size, box_tokens, pages.token * 2}, head{call.key_heads, 1, pages.head * 2};
  const TensorMapAxis page{call.requests.pages, 1, pages.page * 2};
  const int64_t all = std::max(call.requests.pages * pages.page, call.key_heads * pages.head);
  const TensorMapAxis batch{call.own_pages ? call.batch : 1, 1, (call.own_pages ? pages.batch : all) * 2};
  switch (order_of(pages)) {
    case PageOrder::kHeadTokenPage: return {row, head, token, page, batch};
    case PageOrder::kTokenHeadPage: return {row, token, head, page, batch};
    default: return {row, token, page, head, batch};
  }
}

// Tokens of a TMA box, all of one page and of one tile.
template <class S>
int box_tokens_of(const Call& call) {
  return int(std::gcd(call.requests.page_size, int64_t{S::kBlockK}));
}

// Blocks of a batch member: those that its requests fill, one for each that some request does not fill, and for the tokens before
// and after them.
template <class S>
int64_t blocks_of_member(const Call& call) {
  return call.requests.tokens / (S::kBlockQ / call.pack) + call.requests.requests + 2;
}

template <class S>
int64_t ctas_of_member(const Call& call) {
  return blocks_of_member<S>(call) * (call.heads / call.pack);
}

// `make_tensor_map` turns a TensorMapSpec into a TensorMap, `make_page_map` pages and their axes into a PageTensorMap.
template <class S, class MakeTensorMap, class MakePageMap>
Arguments arguments_of(const Call& call, MakeTensorMap make_tensor_map, MakePageMap make_page_map) {
  static_assert(S::kStages <= kMaxStages && S::kShared + kExtraShared <= flash_attention::kMaxShared);
  const int pack = int(call.pack), rows = flash_attention::kRows / pack, box_tokens = box_tokens_of<S>(call);
  const int64_t tokens = call.requests.tokens;
  const auto spec = [&](const void* data, int64_t size) {
    return flash_attention::TensorMapSpec{data, size, tokens, call.heads, call.batch, rows, pack};
  };
  Arguments arguments{};
  arguments.query = make_tensor_map(spec(call.query, call.size));
  arguments.out = make_tensor_map(spec(call.out, call.value_size));
  arguments.key = make_page_map(call.key, tensor_map_axes(call, call.key, box_tokens));
  arguments.value = make_page_map(call.value, tensor_map_axes(call, call.value, box_tokens));
  arguments.results = call.out, arguments.lse = call.lse, arguments.sinks = call.sinks;
  arguments.requests = call.requests;
  arguments.logits = flash_attention::logits_of(call.scale, call.cap);
  arguments.page_size = divisor(uint32_t(call.requests.page_size));
  arguments.sinks_stride = int(call.sinks_stride);
  while (1 << arguments.shift < pack) ++arguments.shift;
  arguments.group = int(call.heads / call.key_heads), arguments.heads = int(call.heads);
  arguments.value_size = int(call.value_size), arguments.window = int(call.window), arguments.box_tokens = box_tokens;
  arguments.ctas_of_member = int(ctas_of_member<S>(call));
  arguments.order = order_of(call.key), arguments.own_pages = call.own_pages, arguments.causal = call.causal;
  return arguments;
}

}  // namespace ejkernel::paged_prefill
