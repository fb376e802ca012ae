// What kernels over paged caches share: the requests that own pages, and pages as bytes that mean int8 or float8.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace ejkernel {

struct Int8 {
  uint8_t bits;
};
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

struct Requests {
  const int32_t* starts;                     // [1 or batch, requests + 1]
  const int32_t* lengths;                    // [1 or batch, requests]
  const int32_t* tables;                     // [1 or batch, requests, table_width]
  bool one_starts, one_lengths, one_tables;  // shared by the batch
  int64_t tokens, requests, table_width, pages, page_size;
};

}  // namespace ejkernel
