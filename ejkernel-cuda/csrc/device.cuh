// What kernels take from CUDA and from clusters of blocks. A host build replaces it (tests/host/device_on_host.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#ifdef EJKERNEL_ON_HOST
#include "device_on_host.h"
#else
#include <cuda_runtime.h>

// A block's shared memory of `size` elements.
#define EJKERNEL_SHARED(type, name, size) __shared__ type name[size]
// What the launch asked for beyond that.
#define EJKERNEL_SHARED_REST(type, name)                                \
  extern __shared__ __align__(16) unsigned char name##_of_the_launch[]; \
  type* name = reinterpret_cast<type*>(name##_of_the_launch)

namespace ejkernel {

// Clusters need machine code or PTX of 9.0 or newer; the host never launches them with an older one.
//
// A Mailbox in shared memory tells its block that as many bytes have come from the blocks of the cluster as it asked for. It
// orders nothing but those bytes: a barrier of the whole cluster would wait for the rows that are still on their way out.
using Mailbox = uint64_t;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
__device__ inline unsigned cluster_size() { return 1; }
__device__ inline unsigned cluster_rank() { return 0; }
__device__ inline unsigned cluster_index() { return blockIdx.x; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline void open_mailbox(Mailbox*) {}
__device__ inline void expect_bytes(Mailbox*, int) {}
__device__ inline void send_to_rank(float*, Mailbox*, unsigned, float) {}
__device__ inline void wait_for_mail(Mailbox*, unsigned) {}
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

// Along the grid's first axis.
__device__ inline unsigned cluster_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// All threads of all blocks of the cluster, then wait for all of them. Mailboxes that were opened before are open after; what was
// written otherwise is not visible: an arrival that releases it waits for all of memory, which took a quarter of the time of short
// blocks.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// By one thread, before a `cluster_arrive`.
__device__ inline void open_mailbox(Mailbox* box) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(box))
               : "memory");
}

// By one thread, once for each delivery, before or after its bytes come.
__device__ inline void expect_bytes(Mailbox* box, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(box)), "r"(bytes) : "memory");
}

// Store where block `rank` of the cluster has its `to`, and tell its mailbox.
__device__ inline void send_to_rank(float* to, Mailbox* box, unsigned rank, float value) {
  asm volatile(
      "{\n.reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [told];\n}" ::"r"(shared_address(to)),
      "r"(shared_address(box)), "r"(rank), "f"(value)
      : "memory");
}

// Until the delivery of this parity is complete; deliveries have parities 0, 1, 0, ...
__device__ inline void wait_for_mail(Mailbox* box, unsigned parity) {
  asm volatile(
      "{\n.reg .pred complete;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n@!complete bra again;\n}" ::"r"(
          shared_address(box)),
      "r"(parity)
      : "memory");
}
#endif

// A power of 2, wrong by 2^-22 or so.
__device__ inline float fast_exp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

// 1 / value, wrong by 2^-23 or so; 0 of infinity.
__device__ inline float fast_inverse(float value) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

// 8 or 16 bytes of global memory that nothing writes while the kernel runs, or zeros. What a branch reads the compiler also
// takes apart there, and so waits for it before the next one is asked for.
template <typename Words>
__device__ Words read_words(const void* from, bool there);
template <>
__device__ inline uint2 read_words<uint2>(const void* from, bool there) {
  uint2 words{};
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n@there ld.global.v2.b32 {%0, %1}, [%2];\n}"
               : "+r"(words.x), "+r"(words.y)
               : "l"(from), "r"(int(there)));
  return words;
}
template <>
__device__ inline uint4 read_words<uint4>(const void* from, bool there) {
  uint4 words{};
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n@there ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "l"(from), "r"(int(there)));
  return words;
}

// Store to global memory what the kernel does not read again, with one access, or nothing; without a branch: what follows is not
// held up until the compiler has brought branches together.
__device__ inline void store_words(void* to, uint2 words, bool wanted) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n@wanted st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to),
               "r"(words.x), "r"(words.y), "r"(int(wanted)));
}
__device__ inline void store_words(void* to, uint4 words, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(int(wanted)));
}

// Of all lanes; also what it does for the compiler, which then knows that lanes have the same number, and need not be ready for
// them to go different ways: that took a fifth of the code.
__device__ inline int sum_of_warp(int value) { return __reduce_add_sync(0xffffffffu, value); }
__device__ inline int known_of_lane(int value, int lane) {
  return __reduce_max_sync(0xffffffffu, int(threadIdx.x % 32) == lane ? value : int(0x80000000));
}

// All threads of two warps, which are the first or the second such pair of the block.
__device__ inline void meet_beside(int pair) {
  if (pair == 0) {  // a number that is not known would reserve all barriers there are
    asm volatile("barrier.sync.aligned 1, 64;" ::: "memory");
  } else {
    asm volatile("barrier.sync.aligned 2, 64;" ::: "memory");
  }
}

// From here on the next kernel of the stream may begin beside this one, where its launch allows it and all blocks have come so
// far or ended.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before has ended, beside which this one may have begun; what it wrote is visible.
__device__ inline void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What is to be read soon comes from memory to where all blocks find it.
__device__ inline void fetch_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// The pointer itself, which the compiler is to hold rather than to work out anew at every use in a loop.
__device__ inline const char* held(const char* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// The larger of each of two elements, of two numbers of which one is NaN the other.
template <typename T>
__device__ inline uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// Words that are to be taken apart anew from here on, rather than to be held as what they were taken apart into.
__device__ inline void hold(uint4& words) { asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)); }

// Begin to copy BYTES (4, 8 or 16) from global to shared memory, or zeros; in order with the thread's own reads before.
template <int BYTES>
__device__ inline void copy_bytes_ahead(void* to, const void* from, bool there) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = there ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
  }
}

// What the thread began to copy since the last time is a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the last `open` groups, up to 7, are under way; what the others copied is there for this thread.
__device__ inline void wait_for_copies(int open) {
  if (open == 1) {  // in rings of three; the others are found by a jump through a table
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
