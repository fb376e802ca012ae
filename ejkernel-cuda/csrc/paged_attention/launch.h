// Launches by type, compiled separately (bfloat16.cu, float16.cu, bytes.cu).
#pragma once

#include "check_pages.h"
#include "paged_attention/schedule.cuh"

namespace ejkernel::paged_attention {

constexpr const char* kName = "paged_attention";

struct TmaPages;

struct Knobs {
  int64_t stages, workers;
  const TmaPages* tma;  // tensor maps of the pages, null for cp.async loads
};

// MMA operands are T; pages hold S: T itself, or a one-byte type with T float16. Returns the number of workers in `workers`.
template <typename T, typename S>
ffi::Error Attend(cudaStream_t stream, const Problem& problem, const Results& results, Knobs knobs, int& workers);

}  // namespace ejkernel::paged_attention
