// The two launches of a call: as many workers as run at once, then the merge.
#pragma once

#include "launch_rows.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/launch.h"

namespace ejkernel::paged_attention {

template <typename T, typename S, int BLOCK>
ffi::Error AttendSized(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  auto kernel = attend<T, S, BLOCK>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kLeastStages && shared_bytes<S, BLOCK>(stages) > room) --stages;
  const int64_t shared = shared_bytes<S, BLOCK>(stages);
  if (shared > room) {
    return Invalid(kName, "heads of this size need " + std::to_string(shared) + " bytes of shared memory, the device has " +
                              std::to_string(room));
  }
  workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kThreads), shared, 1)));
  kernel<<<unsigned(workers), kThreads, size_t(shared), stream>>>(problem, results, workers, stages);
  return CheckLaunch(kName, "keys");
}

template <typename T, typename S>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  const int widest = std::max(problem.key.size, problem.value.size);
  if (widest <= 64) return AttendSized<T, S, 64>(stream, problem, results, knobs, workers);
  if (widest <= 128) return AttendSized<T, S, 128>(stream, problem, results, knobs, workers);
  return AttendSized<T, S, kWidest>(stream, problem, results, knobs, workers);
}

template <typename T>
ffi::Error Merge(cudaStream_t stream, const Problem& problem, const Results& results, int workers) {
  const int64_t rows = problem.batch * problem.requests.tokens * problem.heads;
  if (merge_warps(problem, workers) == kMergeWarps) {
    merge<T, kMergeWarps><<<unsigned(rows), 32 * kMergeWarps, 0, stream>>>(problem, results, workers);
  } else {
    merge<T, kMostMergeWarps><<<unsigned(rows), 32 * kMostMergeWarps, 0, stream>>>(problem, results, workers);
  }
  return CheckLaunch(kName, "merge");
}

}  // namespace ejkernel::paged_attention
