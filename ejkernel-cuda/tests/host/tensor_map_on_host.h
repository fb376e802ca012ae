// The tensor map of an array on a host, for kernels that load queries as flash_attention does.
#pragma once

#include "flash_attention/launch.cuh"

namespace ejkernel {

inline TensorMap tensor_map_of(const flash_attention::TensorMapSpec& spec) {
  const int64_t column = 2, head = spec.size * column, row = spec.heads * head;
  return {static_cast<char*>(const_cast<void*>(spec.data)),
          {spec.size, spec.length, spec.heads, spec.batch},
          {column, row, head, spec.length * row},
          spec.box_tokens,
          spec.box_heads};
}

}  // namespace ejkernel
