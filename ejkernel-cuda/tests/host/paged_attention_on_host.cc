// paged_attention as it is, run on a host; a library of its own, for it takes long to compile.
#include "paged_attention/kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;
using namespace ejkernel::paged_attention;

namespace {

using Decode = void(const Problem&, const Results&, int workers, int stages);

template <typename T, typename S, int BLOCK>
void decode(const Problem& problem, const Results& results, int workers, int stages) {
  host::launch(
      unsigned(workers), {kThreads, 1}, 1, [&] { attend<T, S, BLOCK>(problem, results, workers, stages); },
      shared_bytes<S, BLOCK>(stages));
  host::launch(unsigned(problem.batch * problem.requests.tokens * problem.heads), {kThreads, 1}, 1,
               [&] { merge<T>(problem, results, workers); });
}

// Queries of T, pages of the same and of each one-byte type, by room for 64, 128 and 256 elements of a head; not all of those
// that a device has.
using Bf16 = __nv_bfloat16;
using Fp16 = __half;
constexpr Decode* kDecode[2][4][3] = {
    {{decode<Bf16, Bf16, 64>, decode<Bf16, Bf16, 128>, decode<Bf16, Bf16, 256>},
     {decode<Bf16, Int8, 64>, decode<Bf16, Int8, 128>},
     {decode<Bf16, E4M3, 64>, nullptr, decode<Bf16, E4M3, 256>},
     {decode<Bf16, E5M2, 64>}},
    {{decode<Fp16, Fp16, 64>}, {decode<Fp16, Int8, 64>}, {decode<Fp16, E4M3, 64>}, {decode<Fp16, E5M2, 64>}}};

}  // namespace

// Whether there is such a kernel here; it has run then.
EXPORT bool paged_attention_forward(int type, int stored, int width, const Problem& problem, const Results& results,
                                    int workers, int stages) {
  const auto kernel = kDecode[type][stored][width];
  if (kernel) kernel(problem, results, workers, stages);
  return kernel != nullptr;
}
