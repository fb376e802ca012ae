// The launch of as many workers as run at once.
#pragma once

#include "launch_rows.cuh"
#include "paged_attention/boxes.cuh"
#include "paged_attention/kernels.cuh"
#include "paged_attention/launch.h"

namespace ejkernel::paged_attention {

template <typename T, typename S, int BLOCK, bool TURNED = false>
ffi::Error AttendSized(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  if constexpr (!TURNED && turns(sizeof(S), BLOCK)) {
    if (!problem.fills_tiles()) return AttendSized<T, S, BLOCK, true>(stream, problem, results, knobs, workers);
  }
  auto kernel = attend<T, S, BLOCK, TURNED>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kLeastStages && shared_bytes<S, BLOCK>(stages) > room) --stages;
  const int64_t shared = shared_bytes<S, BLOCK>(stages);
  if (shared > room) {
    return Invalid(kName, "heads of this size need " + std::to_string(shared) + " bytes of shared memory, the device has " +
                              std::to_string(room));
  }
  workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kThreads), shared, 1)));
  Launch launch(stream, workers, dim3(kThreads), shared);
  launch.begin_early(kernel);
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, divisor(uint32_t(workers)), stages);
  return CheckLaunch(kName, "keys");
}

template <typename S>
ffi::Error AttendBoxes(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  auto kernel = attend_boxes<S>;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  int stages = int(knobs.stages);
  while (stages > kLeastStages && boxes_shared_bytes(stages) > room) --stages;
  const int64_t shared = boxes_shared_bytes(stages);
  if (shared > room)
    return Invalid(kName,
                   "boxes need " + std::to_string(shared) + " bytes of shared memory, the device has " + std::to_string(room));
  workers = int(std::min(knobs.workers, ResidentWorkers(kernel, dim3(kBoxThreads), shared, 1)));
  Launch launch(stream, workers, dim3(kBoxThreads), shared);
  if (!launch.begin_early(kernel))
    return Invalid(kName, "boxes need a device of compute capability 9.0 or 10.0 and a library built for it");
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, *knobs.boxes, divisor(uint32_t(workers)), stages);
  return CheckLaunch(kName, "keys in boxes");
}

template <typename T, typename S>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers) {
  if constexpr (sizeof(S) == 1) {
    if (knobs.boxes) return AttendBoxes<S>(stream, problem, results, knobs, workers);
  }
  switch (room_for(std::max(problem.key.size, problem.value.size))) {
    case 64: return AttendSized<T, S, 64>(stream, problem, results, knobs, workers);
    case 128: return AttendSized<T, S, 128>(stream, problem, results, knobs, workers);
    default: return AttendSized<T, S, kWidest>(stream, problem, results, knobs, workers);
  }
}

}  // namespace ejkernel::paged_attention
