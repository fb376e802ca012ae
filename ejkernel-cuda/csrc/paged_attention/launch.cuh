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

// The merge begins while the last workers write what they found, where the code that was loaded waits for them: that of 9.0 and
// newer. For both to be on a multiprocessor at once its memory must be divided as workers want it.
template <typename T, int WIDTH>
ffi::Error MergeSized(cudaStream_t stream, const Problem& problem, const Results& results, int workers) {
  auto kernel = merge<T, WIDTH>;
  const MergeShape shape = merge_shape(problem, WIDTH, workers);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  cudaFuncAttributes attributes;
  const bool waits = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  Launch launch(stream, int64_t(shape.tiles) * shape.blocks, dim3(unsigned(32 * shape.rows * shape.warps)), 0, 1);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch.config.attrs = &early;
  launch.config.numAttrs = waits ? 1 : 0;
  cudaLaunchKernelEx(&launch.config, kernel, problem, results, workers, shape);
  return CheckLaunch(kName, "merge");
}

template <typename T>
ffi::Error Merge(cudaStream_t stream, const Problem& problem, const Results& results, int workers) {
  if (problem.value.size <= 128) return MergeSized<T, 128>(stream, problem, results, workers);
  return MergeSized<T, kWidest>(stream, problem, results, workers);
}

}  // namespace ejkernel::paged_attention
