// Device primitives of CUDA and of thread block clusters. A host build replaces this file (tests/host/device_on_host.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#ifdef EJKERNEL_ON_HOST
#include "device_on_host.h"
#else
#include <cuda_runtime.h>

// Static shared memory of `size` elements.
#define EJKERNEL_SHARED(type, name, size) __shared__ type name[size]
// The dynamic shared memory of the launch.
#define EJKERNEL_DYNAMIC_SHARED(type, name)                       \
  extern __shared__ __align__(16) unsigned char name##_dynamic[]; \
  type* name = reinterpret_cast<type*>(name##_dynamic)

namespace ejkernel {

// Clusters need machine code or PTX of 9.0 or newer; the host never launches them with older code.
//
// A ClusterMbarrier is an mbarrier in shared memory that counts the bytes which `st_async` brings from the blocks of the
// cluster. It orders only those bytes: a barrier of the whole cluster would also wait for global stores in flight.
using ClusterMbarrier = uint64_t;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
__device__ inline unsigned cluster_size() { return 1; }
__device__ inline unsigned cluster_rank() { return 0; }
__device__ inline unsigned cluster_index() { return blockIdx.x; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline void cluster_mbarrier_init(ClusterMbarrier*) {}
__device__ inline void cluster_mbarrier_expect_tx(ClusterMbarrier*, int) {}
__device__ inline void st_async(float*, ClusterMbarrier*, unsigned, float) {}
__device__ inline void cluster_mbarrier_wait(ClusterMbarrier*, unsigned) {}
#else
constexpr bool kHasClusters = true;

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline unsigned cluster_size() {
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Along the grid's x axis.
__device__ inline unsigned cluster_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// Cluster barrier of all threads. It makes initialised mbarriers visible to the cluster, but no other writes: an arrive with
// release semantics waits for all memory operations, which took a quarter of the time of short blocks.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// One thread calls this before `cluster_arrive`.
__device__ inline void cluster_mbarrier_init(ClusterMbarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
               : "memory");
}

// One thread calls this once per phase, before or after the bytes arrive.
__device__ inline void cluster_mbarrier_expect_tx(ClusterMbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Store to `to` in the shared memory of block `rank`, and complete its bytes on that block's mbarrier.
__device__ inline void st_async(float* to, ClusterMbarrier* barrier, unsigned rank, float value) {
  asm volatile(
      "{\n.reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [told];\n}" ::"r"(shared_address(to)),
      "r"(shared_address(barrier)), "r"(rank), "f"(value)
      : "memory");
}

// Wait until the phase with this parity completes; phases have parities 0, 1, 0, ...
__device__ inline void cluster_mbarrier_wait(ClusterMbarrier* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred complete;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n@!complete bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}
#endif

// 2 ** value; relative error 2^-22.
__device__ inline float fast_exp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

// 1 / value; relative error 2^-23; 0 for infinity.
__device__ inline float fast_reciprocal(float value) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

// Load 8 or 16 bytes of global memory that nothing writes during the kernel, or return zeros. A predicated load: the compiler
// unpacks a load inside a branch there, and so waits for it before it issues the next one.
template <typename Words>
__device__ Words load_predicated(const void* from, bool valid);
template <>
__device__ inline uint2 load_predicated<uint2>(const void* from, bool valid) {
  uint2 words{};
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n@there ld.global.v2.b32 {%0, %1}, [%2];\n}"
               : "+r"(words.x), "+r"(words.y)
               : "l"(from), "r"(int(valid)));
  return words;
}
template <>
__device__ inline uint4 load_predicated<uint4>(const void* from, bool valid) {
  uint4 words{};
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n@there ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
               : "l"(from), "r"(int(valid)));
  return words;
}

// Store to global memory with one access, or do nothing. The kernel does not read the data again. A predicated store: a branch
// would delay what follows until it reconverges.
__device__ inline void store_predicated(void* to, uint2 words, bool valid) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n@wanted st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to),
               "r"(words.x), "r"(words.y), "r"(int(valid)));
}
__device__ inline void store_predicated(void* to, uint4 words, bool valid) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(int(valid)));
}

// Warp-wide sum and broadcast. The compiler also learns that the result is warp-uniform and generates no code for divergence,
// which took a fifth of the code.
__device__ inline int warp_sum(int value) { return __reduce_add_sync(0xffffffffu, value); }
__device__ inline int warp_broadcast(int value, int lane) {
  return __reduce_max_sync(0xffffffffu, int(threadIdx.x % 32) == lane ? value : int(0x80000000));
}

// Named barrier of two warps; `pair` is the first or second pair of the block.
__device__ inline void warp_pair_sync(int pair) {
  if (pair == 0) {  // a barrier number in a register would reserve all barriers
    asm volatile("barrier.sync.aligned 1, 64;" ::: "memory");
  } else {
    asm volatile("barrier.sync.aligned 2, 64;" ::: "memory");
  }
}

// Programmatic dependent launch: the next kernel of the stream may start once all blocks have called this or exited, if its
// launch allows it.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the prerequisite kernel, which this one may overlap, has ended and its writes are visible.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetch a cache line into L2.
__device__ inline void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Return the pointer, opaque to the compiler, so that it stays in a register and is not recomputed at every use in a loop.
__device__ inline const char* opaque_pointer(const char* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Maximum of each of two packed elements; of a NaN and a number, the number.
template <typename T>
__device__ inline uint32_t packed_max(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// Make the words opaque to the compiler, so that it unpacks them again from here on instead of keeping the unpacked values.
__device__ inline void make_opaque(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// Copy BYTES (4, 8 or 16) from global to shared memory asynchronously, or write zeros; ordered after the thread's own earlier
// reads.
template <int BYTES>
__device__ inline void cp_async(void* to, const void* from, bool valid) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
  }
}

// Commit the thread's cp.async operations since the last commit as a group.
__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most the last `open` groups (up to 7) are in flight; older copies are then visible to this thread.
__device__ inline void cp_async_wait_group(int open) {
  if (open == 1) {  // the depth of three-stage rings; other depths go through a jump table
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    return;
  }
  switch (open) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
  }
}

}  // namespace ejkernel
#endif
