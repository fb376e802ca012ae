// The kernel that writes into pages on a host.
#include "export_on_host.h"
#include "paged_cache_update/kernels.cuh"

using namespace ejkernel;

namespace {

using Untyped = paged_cache_update::PageWrite<void, void>;

struct Block {
  int64_t rows;
  unsigned x, y;
  int tokens;
};

template <typename From, typename To>
paged_cache_update::PageWrite<From, To> as(const Untyped& write) {
  return {static_cast<const From*>(write.from),
          static_cast<To*>(write.pages),
          write.scale,
          write.page_stride,
          write.token_stride,
          write.head_stride,
          write.batch_stride,
          write.scale_batch_stride,
          write.scale_head_stride,
          write.heads,
          write.size};
}

template <typename From, typename To>
void update(bool packed, const Block& block, const Requests& requests, const Untyped& first, const Untyped& second) {
  constexpr int N = 16 / sizeof(From);
  const auto one = as<From, To>(first), other = as<From, To>(second);
  host::launch(unsigned((block.rows + block.tokens - 1) / block.tokens), {block.x, block.y}, 1, [&] {
    if (packed) return paged_cache_update::update_pages<From, To, N>(requests, one, other, block.rows, block.tokens);
    paged_cache_update::update_pages<From, To, 1>(requests, one, other, block.rows, block.tokens);
  });
}

}  // namespace

// `to`: 0 float32, 1 bfloat16, 2 int8, 3 float8_e4m3fn, 4 float8_e5m2, 5 the bits of bfloat16.
EXPORT void update_pages(int kind, int to, bool packed, Block block, Requests requests, Untyped first, Untyped second) {
  using namespace paged_cache_update;
  const auto choose = [&]<typename From>() {
    switch (to) {
      case 0: return update<From, float>(packed, block, requests, first, second);
      case 1: return update<From, __nv_bfloat16>(packed, block, requests, first, second);
      case 2: return update<From, Int8>(packed, block, requests, first, second);
      case 3: return update<From, E4M3>(packed, block, requests, first, second);
      default: return update<From, E5M2>(packed, block, requests, first, second);
    }
  };
  if (to == 5) return update<Bits<2>, Bits<2>>(packed, block, requests, first, second);
  kind == 0 ? choose.template operator()<float>() : choose.template operator()<__nv_bfloat16>();
}
