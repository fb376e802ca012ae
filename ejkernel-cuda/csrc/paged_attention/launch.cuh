// Launch as many workers as are resident.
#pragma once

#include "launch_rows.cuh"
#include "paged_attention/tma_pages.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/launch.h"

namespace ejkernel::paged_attention {

template <typename T, typename S, int BLOCK, bool SWAP_AB = false>
ffi::Error AttendSized(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  if constexpr (!SWAP_AB && swaps_ab(sizeof(S), BLOCK)) {
    if (!problem.fills_tiles()) return AttendSized<T, S, BLOCK, true>(stream, problem, results, knobs, workers);
  }
  auto kernel = attend<T, S, BLOCK, SWAP_AB>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kMinStages && shared_bytes<S, BLOCK>(stages) > room) --stages;
  const int64_t shared = shared_bytes<S, BLOCK>(stages);
  if (shared > room) {
    return Invalid(kName, "heads of this size need " + std::to_string(shared) + " bytes of shared memory, the device has " +
                              std::to_string(room));
  }
  workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kThreads), shared, 1)));
  Launch launch(stream, workers, dim3(kThreads), shared);
  launch.enable_programmatic_launch(kernel);
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, divisor(uint32_t(workers)), stages);
  return CheckLaunch(kName, "attention");
}

template <typename S>
ffi::Error AttendTma(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  auto kernel = attend_tma<S>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kMinStages && tma_shared_bytes(stages) > room) --stages;
  const int64_t shared = tma_shared_bytes(stages);
  if (shared > room)
    return Invalid(
        kName, "TMA stages need " + std::to_string(shared) + " bytes of shared memory, the device has " + std::to_string(room));
  workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kTmaThreads), shared, 1)));
  Launch launch(stream, workers, dim3(kTmaThreads), shared);
  if (!launch.enable_programmatic_launch(kernel))
    return Invalid(kName, "TMA needs a device of compute capability 9.0 or 10.0 and a library built for it");
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, *knobs.tma, divisor(uint32_t(workers)), stages);
  return CheckLaunch(kName, "attention with TMA loads");
}

template <typename T, typename S>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  if constexpr (sizeof(S) == 1) {
    if (knobs.tma) return AttendTma<S>(stream, problem, results, knobs, workers);
  }
  switch (padded_head_size(std::max(problem.key.size, problem.value.size))) {
    case 64: return AttendSized<T, S, 64>(stream, problem, results, knobs, workers);
    case 128: return AttendSized<T, S, 128>(stream, problem, results, knobs, workers);
    default: return AttendSized<T, S, kMaxHeadSize>(stream, problem, results, knobs, workers);
  }
}

}  // namespace ejkernel::paged_attention
