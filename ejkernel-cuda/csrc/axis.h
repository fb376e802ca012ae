// What a description of an array for the tensor memory accelerator is made of.
#pragma once

#include <cstdint>

namespace ejkernel {

// An axis of an array, of a box of it, and the bytes from one index to the next.
struct Axis {
  int64_t extent, box, stride;
};

}  // namespace ejkernel
