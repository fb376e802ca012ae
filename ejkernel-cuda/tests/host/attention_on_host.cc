// The attention kernel as it is, run on a host for float16 (kind 0) and bfloat16 (kind 1), and the functions that say what it
// does.
#include "flash_attention/launch.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::flash_attention;

namespace {

TensorMap map_of(const Boxes& boxes) {
  const int64_t column = 2, head = boxes.size * column, row = boxes.heads * head;
  return {static_cast<char*>(const_cast<void*>(boxes.data)),
          {boxes.size, boxes.length, boxes.heads, boxes.batch},
          {column, row, head, boxes.length * row},
          boxes.tokens,
          boxes.heads_of_box};
}

template <class S>
void run(const Call& call, int64_t processors) {
  const Arguments arguments = arguments_of<S>(call, processors, map_of);
  host::launch(unsigned(arguments.programs), {S::kThreads, 1}, 1, [&] { attend<S>(arguments); }, S::kShared);
  if (!arguments.shares.blocks) return;
  auto* out = static_cast<typename S::T*>(call.out);
  host::launch(unsigned(merge_blocks<S>(arguments)), {kMergeThreads, 1}, 1,
               [&] { merge<S>(arguments, out, int(call.value_size)); });
}

}  // namespace

EXPORT void attention_forward(int kind, int64_t processors, Call call) {
  const auto choose = [&]<typename T>() {
    for_shape<T>(std::max(call.size, call.value_size), [&]<class S>() { run<S>(call, processors); });
  };
  kind ? choose.template operator()<__nv_bfloat16>() : choose.template operator()<__half>();
}

EXPORT Range attention_tiles(Rules rules, int first, int last, int block_k) { return tiles_of(rules, first, last, block_k); }

EXPORT Range attention_seen_by_all(Rules rules, int first, int last, int block_k, bool whole) {
  return rules.seen_by_all(first, last, block_k, whole);
}

EXPORT Place attention_place(Order order, int work) { return order.place(work); }

EXPORT int attention_work(int program, int programs, int round) { return work_of(program, programs, round); }

EXPORT Shares attention_shares(int64_t total, int64_t programs, Range tiles) { return shares_of(total, programs, tiles); }

EXPORT Piece attention_piece(Shares shares, int program, int number) { return shares.piece(program, number); }

EXPORT int attention_owner(Shares shares, int tile) { return shares.owner(tile); }

EXPORT int attention_number_in(Shares shares, int program, int block) { return shares.number_in(program, block); }

EXPORT int64_t attention_section(int64_t blocks, int64_t rows, int64_t group, int64_t bytes_of_keys, int64_t processors) {
  return section_of(blocks, rows, group, bytes_of_keys, processors);
}
