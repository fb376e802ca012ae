// mma.m16n8k16: [16, 16] x [16, 8] of one warp on tensor cores, and ldmatrix (PTX ISA, "Matrix fragments for mma.m16n8k16" and
// "ldmatrix"). Lane l holds of
//   a: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next; then the same 8 columns further: 4 pairs
//   b: rows 2 (l % 4) and the next, and 8 further, of column l / 4: 2 pairs
//   acc: row l / 4, columns 2 (l % 4) and the next; then row l / 4 + 8
#pragma once

#include <type_traits>

#include "device.cuh"

#ifdef EJKERNEL_ON_HOST
#include "mma_on_host.h"
#else
namespace ejkernel {

// ldmatrix: four 8x8 matrices. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of each matrix, the two 16-bit
// elements from column 2 (l % 4) of row l / 4.
__device__ inline void ldmatrix_x4(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The same, transposed: rows 2 (l % 4) and the next of column l / 4.
__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Transpose an 8x8 matrix of 16-bit elements, of which lane l has two from column 2 (l % 4) of row l / 4.
__device__ inline uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// acc += a b, of bfloat16 or float16, in float.
template <typename T>
__device__ inline void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  }
}

}  // namespace ejkernel
#endif
