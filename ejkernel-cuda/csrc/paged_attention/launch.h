// Launches by type of queries, each type's kernels compiled on their own (bfloat16.cu, float16.cu).
#pragma once

#include "check_pages.h"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

struct Knobs {
  int64_t stages, workers;
};

// Pages hold `stored`: T itself or a one-byte type.
template <typename T>
ffi::Error Run(cudaStream_t stream, ffi::DataType stored, const Problem& problem, const Results& results, Knobs knobs);

}  // namespace ejkernel::paged_attention
