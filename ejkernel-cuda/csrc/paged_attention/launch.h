// Launches by types, which are compiled on their own (bfloat16.cu, float16.cu, bytes.cu).
#pragma once

#include "check_pages.h"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

constexpr const char* kName = "paged_attention";

struct Boxes;

struct Knobs {
  int64_t stages, workers;
  const Boxes* boxes;  // how pages are copied, null where threads copy them
};

// Products are of T and pages hold S, T itself or a one-byte type, beside which T is float16. `workers` says how many there
// were.
template <typename T, typename S>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers);

}  // namespace ejkernel::paged_attention
