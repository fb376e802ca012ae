// An axis of a tensor map.
#pragma once

#include <cstdint>

namespace ejkernel {

// Extent of the array and of a TMA box, and the stride in bytes.
struct TensorMapAxis {
  int64_t extent, box, stride;
};

}  // namespace ejkernel
