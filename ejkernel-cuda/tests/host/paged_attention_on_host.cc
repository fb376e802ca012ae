// paged_attention as it is, run on a host; a library of its own, for it takes long to compile.
#include "paged_attention/boxes.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/merge.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::paged_attention;

namespace {

using Run = void(const Problem&, const Results&, int workers, int stages, bool boxes);

template <int LANES>
void run_merge(const Problem& problem, const Results& results, int workers, int parts) {
  const MergeShape shape(problem, room_for(problem.key.size > problem.value.size ? problem.key.size : problem.value.size),
                         workers, LANES, parts);
  host::launch(unsigned(shape.tiles * shape.blocks), {kMergeThreads, 1}, 1,
               [&] { merge<LANES>(problem, results, divisor(uint32_t(workers)), shape); });
}

template <typename T, typename S, int BLOCK, bool TURNED>
void run_attend(const Problem& problem, const Results& results, int workers, int stages) {
  host::launch(
      unsigned(workers), {kThreads, 1}, 1,
      [&] { attend<T, S, BLOCK, TURNED>(problem, results, divisor(uint32_t(workers)), stages); },
      shared_bytes<S, BLOCK>(stages));
}

RowMap map_of(const Problem& problem, const Side& side) {
  const auto axes = axes_of(problem, side);
  RowMap map{const_cast<char*>(side.data)};
  for (int i = 0; i < 4; ++i) map.extent[i] = axes[i + 1].extent, map.stride[i] = axes[i + 1].stride;
  for (int i = 0; i < 2; ++i) map.box[i] = int(axes[i + 1].box);
  return map;
}

template <typename S>
void run_boxes(const Problem& problem, const Results& results, int workers, int stages) {
  const Boxes boxes{map_of(problem, problem.key), map_of(problem, problem.value), tokens_of_box(problem.requests.page_size)};
  host::launch(
      unsigned(workers), {kBoxThreads, 1}, 1,
      [&] { attend_boxes<S>(problem, results, boxes, divisor(uint32_t(workers)), stages); }, boxes_shared_bytes(stages));
}

template <typename T, typename S, int BLOCK>
void run(const Problem& problem, const Results& results, int workers, int stages, bool boxes) {
  constexpr bool kMayTurn = turns(sizeof(S), BLOCK);
  if (boxes) {
    if constexpr (kMayTurn) run_boxes<S>(problem, results, workers, stages);  // handlers admit no others
  } else {
    kMayTurn && !problem.fills_tiles() ? run_attend<T, S, BLOCK, kMayTurn>(problem, results, workers, stages)
                                       : run_attend<T, S, BLOCK, false>(problem, results, workers, stages);
  }
  const int parts = parts_of_block(sizeof(S), BLOCK, problem.group, problem.together);
  lanes_of_part(problem, workers) == 32 ? run_merge<32>(problem, results, workers, parts)
                                        : run_merge<8>(problem, results, workers, parts);
}

// By room for 64, 128 and 256 elements of a head.
template <typename T, typename S>
constexpr Run* kSized[3] = {run<T, S, 64>, run<T, S, 128>, run<T, S, 256>};

}  // namespace

// Pages hold `stored`: 0 the queries' type, 1 int8, 2 float8_e4m3fn, 3 float8_e5m2.
EXPORT void paged_attention_forward(int stored, int width, const Call& call, const Results& results, int workers, int stages,
                                    bool boxes) {
  const Problem problem(call);
  const auto choose = [&]() -> Run* const* {
    switch (stored) {
      case 0: return problem.is_bf16 ? kSized<__nv_bfloat16, __nv_bfloat16> : kSized<__half, __half>;
      case 1: return kSized<__half, Int8>;
      case 2: return kSized<__half, E4M3>;
      default: return kSized<__half, E5M2>;
    }
  };
  choose()[width](problem, results, workers, stages, boxes);
}
