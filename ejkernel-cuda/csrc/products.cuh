// Products of a warpgroup: 64 rows times 16 terms times N columns, summed in float32.
//
// Of the sums `d`, thread t of the warpgroup has rows 16 (t / 32) + (t % 32) / 4, plus 8 for d[i] with i & 2, and columns
// 8 (i / 4) + 2 (t % 4) + i % 2. A left operand in registers lies likewise: two elements to a register, of columns below 8 in
// the first two. Sources: PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "hopper.cuh"

#ifndef EJKERNEL_ON_HOST
namespace ejkernel {

template <typename T, int N>
struct Product;  // of rows in shared memory with columns there, both as rows of what is summed over

template <typename T, int N>
struct Weighted;  // of rows in registers with columns in shared memory, as rows of columns; added to the sums

#ifdef EJKERNEL_HOPPER
#define EJKERNEL_OUT8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define EJKERNEL_OUT32(d, i) EJKERNEL_OUT8(d, i), EJKERNEL_OUT8(d, i + 8), EJKERNEL_OUT8(d, i + 16), EJKERNEL_OUT8(d, i + 24)
#define EJKERNEL_OUT40(d) EJKERNEL_OUT32(d, 0), EJKERNEL_OUT8(d, 32)
#define EJKERNEL_OUT64(d) EJKERNEL_OUT32(d, 0), EJKERNEL_OUT32(d, 32)
#define EJKERNEL_OUT128(d) EJKERNEL_OUT64(d), EJKERNEL_OUT32(d, 64), EJKERNEL_OUT32(d, 96)

#define EJKERNEL_NAMES32                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define EJKERNEL_NAMES40 EJKERNEL_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define EJKERNEL_NAMES64                                                                                       \
  EJKERNEL_NAMES40                                                                                             \
      ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
      "%60, %61, %62, %63"
#define EJKERNEL_NAMES128 \
  EJKERNEL_NAMES64 \
      ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
      ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
      ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
      ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The numbers after the sums' are those of the operands.
#define EJKERNEL_PRODUCT(T, TYPE, N, NAMES, OUT, LEFT, RIGHT, ADD)                                                      \
  template <>                                                                                                           \
  struct Product<T, N> {                                                                                                \
    static EJKERNEL_INLINE void run(float (&d)[N / 2], uint64_t left, uint64_t right, int add) {                        \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                                        \
                   ", 0;\n"                                                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, %" #LEFT ", %" #RIGHT \
                   ", add, 1, 1, 0, 0;\n}"                                                                              \
                   : OUT(d)                                                                                             \
                   : "l"(left), "l"(right), "r"(add));                                                                  \
    }                                                                                                                   \
  }

#define EJKERNEL_WEIGHTED(T, TYPE, N, NAMES, OUT, A, B, C, D, RIGHT)                                                       \
  template <>                                                                                                              \
  struct Weighted<T, N> {                                                                                                  \
    static EJKERNEL_INLINE void run(float (&d)[N / 2], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint64_t right) {   \
      asm volatile(                                                                                                        \
          "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                                   \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {%" #A ", %" #B ", %" #C ", %" #D \
          "}, %" #RIGHT ", add, 1, 1, 1;\n}"                                                                               \
          : OUT(d)                                                                                                         \
          : "r"(a), "r"(b), "r"(c), "r"(e), "l"(right));                                                                   \
    }                                                                                                                      \
  }

#define EJKERNEL_PRODUCTS(T, TYPE)                                                            \
  EJKERNEL_PRODUCT(T, TYPE, 80, EJKERNEL_NAMES40, EJKERNEL_OUT40, 40, 41, 42);                \
  EJKERNEL_PRODUCT(T, TYPE, 128, EJKERNEL_NAMES64, EJKERNEL_OUT64, 64, 65, 66);               \
  EJKERNEL_WEIGHTED(T, TYPE, 64, EJKERNEL_NAMES32, EJKERNEL_OUT32_FIRST, 32, 33, 34, 35, 36); \
  EJKERNEL_WEIGHTED(T, TYPE, 128, EJKERNEL_NAMES64, EJKERNEL_OUT64, 64, 65, 66, 67, 68);      \
  EJKERNEL_WEIGHTED(T, TYPE, 256, EJKERNEL_NAMES128, EJKERNEL_OUT128, 128, 129, 130, 131, 132)
#define EJKERNEL_OUT32_FIRST(d) EJKERNEL_OUT32(d, 0)

EJKERNEL_PRODUCTS(__nv_bfloat16, "bf16");
EJKERNEL_PRODUCTS(__half, "f16");
#endif

}  // namespace ejkernel
#endif
