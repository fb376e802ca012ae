// What only compute capability 9.0 has: barriers in shared memory that count bytes, copies of boxes by the tensor memory
// accelerator, products of warpgroups. A host build replaces it (tests/host/hopper_on_host.h). Plain PTX rather than CuTe: so
// the same kernels run on a host, with every rule of these instructions that a host can watch.
//
// Kernels that need it have a body only where EJKERNEL_HOPPER is defined, or EJKERNEL_BOXES where they need no more than
// barriers and copies, which newer devices have, too; others never launch them.
#pragma once

#include "device.cuh"

#ifdef __CUDACC__
#define EJKERNEL_BOTH __host__ __device__
#else
#define EJKERNEL_BOTH
#endif

#if defined(EJKERNEL_ON_HOST) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define EJKERNEL_HOPPER
#endif
#if defined(EJKERNEL_ON_HOST) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define EJKERNEL_BOXES
#endif

namespace ejkernel {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kPanelBytes = 128;    // of a row of a panel: 64 elements of two bytes, whose 16-byte chunks are swizzled

// Where a product finds a matrix in shared memory: rows of 128 bytes whose chunks are swizzled, in groups of eight rows.
// `stride` bytes lie between groups, `leading` between panels where the rows are what is summed over.
EJKERNEL_BOTH constexpr uint64_t matrix_at(unsigned address, int leading, int stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t{1} << 62;
}

// The same, so many bytes further. The address is in the lower half, from which nothing is carried.
EJKERNEL_BOTH constexpr uint64_t moved(uint64_t matrix, int bytes) {
  return (matrix & ~uint64_t{0xffffffff}) | (uint32_t(matrix) + uint32_t(bytes >> 4));
}

// Where a chunk of 16 bytes of a row of a panel lies; panels begin on 1024 bytes.
EJKERNEL_BOTH constexpr int swizzled(int row, int chunk) { return row * kPanelBytes + ((chunk ^ (row & 7)) << 4); }

}  // namespace ejkernel

#ifdef EJKERNEL_ON_HOST
#include "hopper_on_host.h"
#else
#include <cuda.h>

namespace ejkernel {

using TensorMap = CUtensorMap;  // how boxes of an array are copied
using RowMap = CUtensorMap;     // the same, of boxes of whole rows of 128 bytes
using CachePolicy = uint64_t;
using Arrivals = uint64_t;  // a barrier in shared memory: so many arrivals, and the bytes that they announced

#ifdef EJKERNEL_BOXES
#define EJKERNEL_INLINE __device__ __forceinline__

// By one thread, for as many arrivals as complete each phase; then `publish_barriers`, then a barrier of the block.
EJKERNEL_INLINE void open_barrier(Arrivals* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

EJKERNEL_INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

EJKERNEL_INLINE void arrive(Arrivals* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and announce bytes that copies will bring.
EJKERNEL_INLINE void arrive_expecting(Arrivals* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the phase of this parity is complete; phases have parities 0, 1, 0, ... and the one before the first counts as
// complete.
EJKERNEL_INLINE void await(Arrivals* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred complete;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n@!complete bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

EJKERNEL_INLINE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Begin to copy a box to shared memory, zeros where it passes the end of the array; its bytes, all of them, go to the barrier.
EJKERNEL_INLINE void load_box(void* to, const TensorMap& map, Arrivals* barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %5, %4, %6}], [%2];" ::
          "r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// What the cache may forget first: what is read once leaves room for what others come back to.
EJKERNEL_INLINE CachePolicy read_once() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Begin to copy a box of whole rows of 128 bytes, whose chunks are swizzled; its bytes go to the barrier. The four numbers say
// where the first row lies, along axes after its own.
EJKERNEL_INLINE void load_rows(void* to, const RowMap& map, Arrivals* barrier, CachePolicy policy, int second, int third,
                               int fourth, int fifth) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "l"(policy), "r"(0), "r"(second), "r"(third),
      "r"(fourth), "r"(fifth)
      : "memory");
}

// Begin to copy a box from shared memory; what passes the end of the array is dropped.
EJKERNEL_INLINE void store_box(const TensorMap& map, const void* from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %4, %3, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

EJKERNEL_INLINE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all stores of this thread have read what they store.
EJKERNEL_INLINE void await_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// What this thread wrote to shared memory is seen by copies and products that begin after a barrier that follows.
EJKERNEL_INLINE void show_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers by number, for some warps of the block. 0 is that of the block.
EJKERNEL_INLINE void meet(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

EJKERNEL_INLINE void signal(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether any of the threads says so.
EJKERNEL_INLINE bool meet_any(int barrier, int threads, bool here) {
  int found;
  asm volatile(
      "{\n.reg .pred here, found;\nsetp.ne.b32 here, %1, 0;\n"
      "barrier.cta.red.or.pred found, %2, %3, here;\nselp.b32 %0, 1, 0, found;\n}"
      : "=r"(found)
      : "r"(int(here)), "r"(barrier), "r"(threads)
      : "memory");
  return found;
}

// What is the same in all threads of a warp. The compiler then knows that it is, and keeps what follows from it, such as where
// matrices lie, in registers of the warp, which products and copies of boxes read it from.
EJKERNEL_INLINE int same_in_warp(int value) { return __shfl_sync(~0u, value, 0); }

// One thread of a warp says so, always the same; the compiler then knows that what follows runs once.
EJKERNEL_INLINE bool one_of_warp() {
  int found;
  asm volatile("{\n.reg .pred found;\nelect.sync _|found, -1;\nselp.b32 %0, 1, 0, found;\n}" : "=r"(found));
  return found;
}

#endif

#ifdef EJKERNEL_HOPPER
template <int COUNT>
EJKERNEL_INLINE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
EJKERNEL_INLINE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Before products that read or add to registers that were written otherwise.
EJKERNEL_INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

EJKERNEL_INLINE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many groups of products are under way.
template <int OPEN>
EJKERNEL_INLINE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}

// Nothing is done with these registers before this place that stands after it: the compiler knows nothing of products under
// way.
template <int COUNT>
EJKERNEL_INLINE void settle(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Wrong by 2^-11 or so.
EJKERNEL_INLINE float rough_tanh(float value) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
#endif

}  // namespace ejkernel
#endif
