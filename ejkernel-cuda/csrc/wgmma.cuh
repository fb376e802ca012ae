// wgmma.mma_async of a warpgroup: 64 rows, K = 16, N columns, accumulated in float32.
//
// Of the accumulators `d`, thread t of the warpgroup has rows 16 (t / 32) + (t % 32) / 4, plus 8 for d[i] with i & 2, and
// columns 8 (i / 4) + 2 (t % 4) + i % 2. A register operand A has the same layout: two elements per register, columns below 8
// in the first two. Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "hopper.cuh"

#ifndef EJKERNEL_ON_HOST
namespace ejkernel {

template <typename T, int N>
struct WgmmaSS;  // A and B in shared memory, both K-major

template <typename T, int N>
struct WgmmaRS;  // A in registers, B in shared memory, MN-major; accumulates

#ifdef EJKERNEL_HOPPER
#define EJKERNEL_ACC8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define EJKERNEL_ACC32(d, i) EJKERNEL_ACC8(d, i), EJKERNEL_ACC8(d, i + 8), EJKERNEL_ACC8(d, i + 16), EJKERNEL_ACC8(d, i + 24)
#define EJKERNEL_ACC40(d) EJKERNEL_ACC32(d, 0), EJKERNEL_ACC8(d, 32)
#define EJKERNEL_ACC64(d) EJKERNEL_ACC32(d, 0), EJKERNEL_ACC32(d, 32)
#define EJKERNEL_ACC128(d) EJKERNEL_ACC64(d), EJKERNEL_ACC32(d, 64), EJKERNEL_ACC32(d, 96)

#define EJKERNEL_REGS32                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define EJKERNEL_REGS40 EJKERNEL_REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define EJKERNEL_REGS64                                                                                    \
  EJKERNEL_REGS40                                                                                          \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
#define EJKERNEL_REGS128                                                                         \
  EJKERNEL_REGS64                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The register numbers after the accumulators are those of the operands.
#define EJKERNEL_WGMMA_SS(T, TYPE, N, REGS, ACC, LEFT, RIGHT, ADD)                                                     \
  template <>                                                                                                          \
  struct WgmmaSS<T, N> {                                                                                               \
    static EJKERNEL_INLINE void run(float (&d)[N / 2], uint64_t left, uint64_t right, int add) {                       \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                                       \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, %" #LEFT ", %" #RIGHT \
                   ", add, 1, 1, 0, 0;\n}"                                                                             \
                   : ACC(d)                                                                                            \
                   : "l"(left), "l"(right), "r"(add));                                                                 \
    }                                                                                                                  \
  }

#define EJKERNEL_WGMMA_RS(T, TYPE, N, REGS, ACC, A, B, C, D, RIGHT)                                                       \
  template <>                                                                                                             \
  struct WgmmaRS<T, N> {                                                                                                  \
    static EJKERNEL_INLINE void run(float (&d)[N / 2], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint64_t right) {  \
      asm volatile(                                                                                                       \
          "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {%" #A ", %" #B ", %" #C ", %" #D \
          "}, %" #RIGHT ", add, 1, 1, 1;\n}"                                                                              \
          : ACC(d)                                                                                                        \
          : "r"(a), "r"(b), "r"(c), "r"(e), "l"(right));                                                                  \
    }                                                                                                                     \
  }

#define EJKERNEL_WGMMA(T, TYPE)                                                              \
  EJKERNEL_WGMMA_SS(T, TYPE, 80, EJKERNEL_REGS40, EJKERNEL_ACC40, 40, 41, 42);               \
  EJKERNEL_WGMMA_SS(T, TYPE, 128, EJKERNEL_REGS64, EJKERNEL_ACC64, 64, 65, 66);              \
  EJKERNEL_WGMMA_RS(T, TYPE, 64, EJKERNEL_REGS32, EJKERNEL_ACC32_FIRST, 32, 33, 34, 35, 36); \
  EJKERNEL_WGMMA_RS(T, TYPE, 128, EJKERNEL_REGS64, EJKERNEL_ACC64, 64, 65, 66, 67, 68);      \
  EJKERNEL_WGMMA_RS(T, TYPE, 256, EJKERNEL_REGS128, EJKERNEL_ACC128, 128, 129, 130, 131, 132)
#define EJKERNEL_ACC32_FIRST(d) EJKERNEL_ACC32(d, 0)

EJKERNEL_WGMMA(__nv_bfloat16, "bf16");
EJKERNEL_WGMMA(__half, "f16");
#endif

}  // namespace ejkernel
#endif
