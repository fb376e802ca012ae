// paged_attention as it is, run on a host; a library of its own, for it takes long to compile.
#include "paged_attention/kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::paged_attention;

namespace {

using Run = void(const Problem&, const Results&, int workers, int stages);

template <int WIDTH>
void run_merge(const Problem& problem, const Results& results, int workers) {
  const MergeShape shape = merge_shape(problem, WIDTH, workers);
  host::launch(unsigned(shape.tiles * shape.blocks), {unsigned(32 * shape.rows * shape.warps), 1}, 1, [&] {
    problem.is_bf16 ? merge<__nv_bfloat16, WIDTH>(problem, results, workers, shape)
                    : merge<__half, WIDTH>(problem, results, workers, shape);
  });
}

template <typename T, typename S, int BLOCK>
void run(const Problem& problem, const Results& results, int workers, int stages) {
  host::launch(
      unsigned(workers), {kThreads, 1}, 1, [&] { attend<T, S, BLOCK>(problem, results, workers, stages); },
      shared_bytes<S, BLOCK>(stages));
  problem.value.size <= 128 ? run_merge<128>(problem, results, workers) : run_merge<kWidest>(problem, results, workers);
}

// By room for 64, 128 and 256 elements of a head.
template <typename T, typename S>
constexpr Run* kSized[3] = {run<T, S, 64>, run<T, S, 128>, run<T, S, 256>};

}  // namespace

// Pages hold `stored`: 0 the queries' type, 1 int8, 2 float8_e4m3fn, 3 float8_e5m2.
EXPORT void paged_attention_forward(int stored, int width, const Problem& problem, const Results& results, int workers,
                                    int stages) {
  const auto choose = [&]() -> Run* const* {
    switch (stored) {
      case 0: return problem.is_bf16 ? kSized<__nv_bfloat16, __nv_bfloat16> : kSized<__half, __half>;
      case 1: return kSized<__half, Int8>;
      case 2: return kSized<__half, E4M3>;
      default: return kSized<__half, E5M2>;
    }
  };
  choose()[width](problem, results, workers, stages);
}
