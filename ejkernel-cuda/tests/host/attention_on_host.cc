// The unchanged attention kernel on a host, for float16 (kind 0) and bfloat16 (kind 1), and its scheduling functions.
#include "tensor_map_on_host.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::flash_attention;

namespace {

template <class S>
void run(const Call& call, int64_t sms) {
  const Arguments arguments = arguments_of<S>(call, sms, tensor_map_of);
  host::launch(unsigned(arguments.ctas), {S::kThreads, 1}, 1, [&] { attend<S>(arguments); }, S::kShared);
  if (!arguments.stream_k.blocks) return;
  auto* out = static_cast<typename S::T*>(call.out);
  host::launch(unsigned(combine_blocks<S>(arguments)), {kCombineThreads, 1}, 1,
               [&] { combine<S>(arguments, out, int(call.value_size)); });
}

}  // namespace

EXPORT void attention_forward(int kind, int64_t sms, Call call) {
  const auto choose = [&]<typename T>() {
    for_shape<T>(std::max(call.size, call.value_size), [&]<class S>() { run<S>(call, sms); });
  };
  kind ? choose.template operator()<__nv_bfloat16>() : choose.template operator()<__half>();
}

EXPORT Range attention_tiles(MaskParams mask, int first, int last, int block_k) {
  return visible_tiles(mask, first, last, block_k);
}

EXPORT Range attention_fully_visible(MaskParams mask, int first, int last, int block_k, bool full_only) {
  return mask.fully_visible_tiles(first, last, block_k, full_only);
}

EXPORT TileCoord attention_coord(TileScheduler scheduler, int work) { return scheduler.coord(work); }

EXPORT int attention_work(int cta, int ctas, int wave) { return work_of(cta, ctas, wave); }

EXPORT StreamK attention_stream_k(int64_t total_blocks, int64_t ctas, Range tiles) {
  return partition_stream_k(total_blocks, ctas, tiles);
}

EXPORT Segment attention_segment(StreamK stream_k, int cta, int index) { return stream_k.segment(cta, index); }

EXPORT int attention_owner(StreamK stream_k, int tile) { return stream_k.owner(tile); }

EXPORT int attention_segment_in(StreamK stream_k, int cta, int block) { return stream_k.segment_in(cta, block); }

EXPORT int64_t attention_l2_group(int64_t blocks, int64_t rows, int64_t group, int64_t kv_bytes, int64_t sms) {
  return l2_group_of(blocks, rows, group, kv_bytes, sms);
}
