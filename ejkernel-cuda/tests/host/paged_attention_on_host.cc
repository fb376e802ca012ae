// The unchanged paged_attention on a host; a separate library, as it compiles slowly.
#include "paged_attention/tma_pages.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/combine.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::paged_attention;

namespace {

using Run = void(const Problem&, const Results&, int workers, int stages, bool tma);

template <int LANES>
void run_combine(const Problem& problem, const Results& results, int workers, int partials) {
  const CombineShape shape(problem,
                           padded_head_size(problem.key.size > problem.value.size ? problem.key.size : problem.value.size),
                           workers, LANES, partials);
  host::launch(unsigned(shape.tiles * shape.blocks), {kCombineThreads, 1}, 1,
               [&] { combine<LANES>(problem, results, divisor(uint32_t(workers)), shape); });
}

template <typename T, typename S, int BLOCK, bool SWAP_AB>
void run_attend(const Problem& problem, const Results& results, int workers, int stages) {
  host::launch(
      unsigned(workers), {kThreads, 1}, 1,
      [&] { attend<T, S, BLOCK, SWAP_AB>(problem, results, divisor(uint32_t(workers)), stages); },
      shared_bytes<S, BLOCK>(stages));
}

PageTensorMap tensor_map_of(const Problem& problem, const KvArray& kv) {
  const auto axes = tensor_map_axes(problem, kv);
  PageTensorMap map{const_cast<char*>(kv.data)};
  for (int i = 0; i < 4; ++i) map.extent[i] = axes[i + 1].extent, map.stride[i] = axes[i + 1].stride;
  for (int i = 0; i < 2; ++i) map.box[i] = int(axes[i + 1].box);
  return map;
}

template <typename S>
void run_tma(const Problem& problem, const Results& results, int workers, int stages) {
  const TmaPages tma{tensor_map_of(problem, problem.key), tensor_map_of(problem, problem.value),
                     box_tokens_for(problem.requests.page_size)};
  host::launch(
      unsigned(workers), {kTmaThreads, 1}, 1, [&] { attend_tma<S>(problem, results, tma, divisor(uint32_t(workers)), stages); },
      tma_shared_bytes(stages));
}

template <typename T, typename S, int BLOCK>
void run(const Problem& problem, const Results& results, int workers, int stages, bool tma) {
  constexpr bool kMaySwap = swaps_ab(sizeof(S), BLOCK);
  if (tma) {
    if constexpr (kMaySwap) run_tma<S>(problem, results, workers, stages);  // handlers refuse other types
  } else {
    kMaySwap && !problem.fills_tiles() ? run_attend<T, S, BLOCK, kMaySwap>(problem, results, workers, stages)
                                       : run_attend<T, S, BLOCK, false>(problem, results, workers, stages);
  }
  const int partials = partials_per_block(sizeof(S), BLOCK, problem.group, problem.tile_key_heads);
  lanes_per_partial(problem, workers) == 32 ? run_combine<32>(problem, results, workers, partials)
                                            : run_combine<8>(problem, results, workers, partials);
}

// For padded heads of 64, 128 and 256 elements.
template <typename T, typename S>
constexpr Run* kSized[3] = {run<T, S, 64>, run<T, S, 128>, run<T, S, 256>};

}  // namespace

// Pages hold `stored`: 0 the queries' type, 1 int8, 2 float8_e4m3fn, 3 float8_e5m2.
EXPORT void paged_attention_forward(int stored, int width, const Call& call, const Results& results, int workers, int stages,
                                    bool tma) {
  const Problem problem(call);
  const auto choose = [&]() -> Run* const* {
    switch (stored) {
      case 0: return problem.is_bf16 ? kSized<__nv_bfloat16, __nv_bfloat16> : kSized<__half, __half>;
      case 1: return kSized<__half, Int8>;
      case 2: return kSized<__half, E4M3>;
      default: return kSized<__half, E5M2>;
    }
  };
  choose()[width](problem, results, workers, stages, tma);
}
