// Primitives of compute capability 9.0: mbarriers with transaction counts, TMA loads and stores, wgmma. A host build replaces
// this file (tests/host/hopper_on_host.h). Plain PTX instead of CuTe, so that the same kernels run on a host with checks of the
// instructions' rules.
//
// A kernel has a body only if EJKERNEL_HOPPER is defined, or EJKERNEL_TMA if it needs only mbarriers and TMA, which newer
// devices have, too; others never launch it.
#pragma once

#include "device.cuh"

#ifdef __CUDACC__
#define EJKERNEL_HOST_DEVICE __host__ __device__
#else
#define EJKERNEL_HOST_DEVICE
#endif

#if defined(EJKERNEL_ON_HOST) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EJKERNEL_HOPPER
#endif
#if defined(EJKERNEL_ON_HOST) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define EJKERNEL_TMA
#endif

namespace ejkernel {

constexpr int kWarpgroupThreads = 128;  // of a warpgroup
constexpr int kAtomRowBytes =
    128;  // bytes of a row of a swizzle atom: 64 elements of two bytes, in swizzled chunks of 16 bytes

// Shared-memory descriptor of a wgmma operand with 128-byte swizzle, in atoms of eight rows of 128 bytes. `stride` bytes lie
// between atoms along the rows, `leading` between atoms along the columns of an MN-major operand.
EJKERNEL_HOST_DEVICE constexpr uint64_t smem_descriptor(unsigned address, int leading, int stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t{1} << 62;
}

// The same descriptor, `bytes` further. The address is in the lower half and cannot overflow.
EJKERNEL_HOST_DEVICE constexpr uint64_t advance_descriptor(uint64_t matrix, int bytes) {
  return (matrix & ~uint64_t{0xffffffff}) | (uint32_t(matrix) + uint32_t(bytes >> 4));
}

// Offset of a 16-byte chunk of a row; swizzle atoms are aligned to 1024 bytes.
EJKERNEL_HOST_DEVICE constexpr int swizzled_offset(int row, int chunk) {
  return row * kAtomRowBytes + ((chunk ^ (row & 7)) << 4);
}

}  // namespace ejkernel

#ifdef EJKERNEL_ON_HOST
#include "hopper_on_host.h"
#else
#include <cuda.h>

namespace ejkernel {

using TensorMap = CUtensorMap;      // for TMA boxes of an array
using PageTensorMap = CUtensorMap;  // for TMA boxes of KV pages, in rows of 128 bytes
using CachePolicy = uint64_t;
using Mbarrier = uint64_t;  // a barrier in shared memory: so many arrivals, and the bytes that they announced

#ifdef EJKERNEL_TMA
#define EJKERNEL_INLINE __device__ __forceinline__

// One thread initialises the mbarrier with its arrival count per phase; then `fence_mbarrier_init`, then a block barrier.
EJKERNEL_INLINE void mbarrier_init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

EJKERNEL_INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

EJKERNEL_INLINE void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and add bytes to the transaction count.
EJKERNEL_INLINE void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Wait until the phase with this parity completes; phases have parities 0, 1, 0, ..., and the phase before the first counts as
// complete.
EJKERNEL_INLINE void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred complete;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n@!complete bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

EJKERNEL_INLINE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// TMA load of a box into shared memory, with zeros outside of the array; completes all bytes of the box on the mbarrier.
EJKERNEL_INLINE void tma_load(void* to, const TensorMap& map, Mbarrier* barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %5, %4, %6}], [%2];" ::
          "r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// L2 evicts these lines first: data that is read once leaves room for data that is read again.
EJKERNEL_INLINE CachePolicy evict_first_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// TMA load of a box of KV pages: whole rows of 128 bytes, with swizzled chunks; completes its bytes on the mbarrier. The four
// coordinates follow the row's own axis.
EJKERNEL_INLINE void tma_load_pages(void* to, const PageTensorMap& map, Mbarrier* barrier, CachePolicy policy, int second,
                                    int third, int fourth, int fifth) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "l"(policy), "r"(0), "r"(second), "r"(third),
      "r"(fourth), "r"(fifth)
      : "memory");
}

// The same from `column` on, an element of the row; zeros outside of the array, and L2 keeps what is read again.
EJKERNEL_INLINE void tma_load_pages(void* to, const PageTensorMap& map, Mbarrier* barrier, int column, int second, int third,
                                    int fourth, int fifth) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::
          "r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(second), "r"(third), "r"(fourth),
      "r"(fifth)
      : "memory");
}

// TMA store of a box from shared memory; elements outside of the array are dropped.
EJKERNEL_INLINE void tma_store(const TensorMap& map, const void* from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %4, %3, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

EJKERNEL_INLINE void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until this thread's TMA stores have read their shared memory.
EJKERNEL_INLINE void tma_store_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Make this thread's writes to shared memory visible to the async proxy (TMA, wgmma) after a barrier that follows.
EJKERNEL_INLINE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers of some warps of the block; 0 is __syncthreads.
EJKERNEL_INLINE void named_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

EJKERNEL_INLINE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether `here` is true in any thread.
EJKERNEL_INLINE bool named_barrier_sync_or(int barrier, int threads, bool here) {
  int found;
  asm volatile(
      "{\n.reg .pred here, found;\nsetp.ne.b32 here, %1, 0;\n"
      "barrier.cta.red.or.pred found, %2, %3, here;\nselp.b32 %0, 1, 0, found;\n}"
      : "=r"(found)
      : "r"(int(here)), "r"(barrier), "r"(threads)
      : "memory");
  return found;
}

// Broadcast a warp-uniform value. The compiler then knows that it is uniform, and keeps derived values such as descriptors in
// uniform registers, which wgmma and TMA read.
EJKERNEL_INLINE int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }

// True in one thread of the warp, always the same. The compiler then knows that the code runs once.
EJKERNEL_INLINE bool elect_one() {
  int found;
  asm volatile("{\n.reg .pred found;\nelect.sync _|found, -1;\nselp.b32 %0, 1, 0, found;\n}" : "=r"(found));
  return found;
}

#endif

#ifdef EJKERNEL_HOPPER
template <int COUNT>
EJKERNEL_INLINE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
EJKERNEL_INLINE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Needed before a wgmma that reads or accumulates registers that other instructions wrote.
EJKERNEL_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

EJKERNEL_INLINE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most OPEN groups are in flight.
template <int OPEN>
EJKERNEL_INLINE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}

// Fence of accumulator registers: keeps the compiler, which does not know of wgmmas in flight, from moving accesses to them
// across this point.
template <int COUNT>
EJKERNEL_INLINE void wgmma_fence_operand(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Absolute error 2^-11.
EJKERNEL_INLINE float fast_tanh(float value) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
#endif

}  // namespace ejkernel
#endif
