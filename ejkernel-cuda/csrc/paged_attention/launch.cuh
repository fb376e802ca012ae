// The two launches of a call: as many workers as run at once, then the merge.
#pragma once

#include "launch_rows.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/launch.h"

namespace ejkernel::paged_attention {

constexpr const char* kName = "paged_attention";

template <typename T, typename S, int BLOCK>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs) {
  auto kernel = attend<T, S, BLOCK>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kLeastStages && shared_bytes<S, BLOCK>(stages) > room) --stages;
  const int64_t shared = shared_bytes<S, BLOCK>(stages);
  if (shared > room) {
    return Invalid(kName, "heads of this size need " + std::to_string(shared) + " bytes of shared memory, the device has " +
                              std::to_string(room));
  }
  const int workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kThreads), shared, 1)));
  kernel<<<unsigned(workers), kThreads, size_t(shared), stream>>>(problem, results, workers, stages);
  EJKERNEL_TRY(CheckLaunch(kName, "keys"));
  const int64_t rows = problem.batch * problem.requests.tokens * problem.heads;
  merge<T><<<unsigned(rows), kThreads, 0, stream>>>(problem, results, workers);
  return CheckLaunch(kName, "merge");
}

template <typename T, typename S>
ffi::Error Sized(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs) {
  const int widest = std::max(problem.key.size, problem.value.size);
  if (widest <= 64) return Attend<T, S, 64>(stream, problem, results, knobs);
  if (widest <= 128) return Attend<T, S, 128>(stream, problem, results, knobs);
  return Attend<T, S, kWidest>(stream, problem, results, knobs);
}

template <typename T>
ffi::Error Run(cudaStream_t stream, ffi::DataType stored, const Problem& problem, const Results& results, Knobs knobs) {
  switch (stored) {
    case ffi::S8: return Sized<T, Int8>(stream, problem, results, knobs);
    case ffi::F8E4M3FN: return Sized<T, E4M3>(stream, problem, results, knobs);
    case ffi::F8E5M2: return Sized<T, E5M2>(stream, problem, results, knobs);
    default: return Sized<T, T>(stream, problem, results, knobs);
  }
}

}  // namespace ejkernel::paged_attention
