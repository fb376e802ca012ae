// Stand-ins for CUDA on a host: every thread of a block, or of a cluster, is a fiber; a barrier yields to the next fiber.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __device__
#define __device__
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__
#undef __maxnreg__
#define __maxnreg__(...)
#undef __forceinline__
#define __forceinline__ inline
#undef __grid_constant__
#define __grid_constant__

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace ejkernel::host {

// With -fsanitize=thread every fiber is a thread to ThreadSanitizer, and only barriers and mbarriers order their accesses: it
// reports the races that compute-sanitizer's racecheck reports, and those in global memory. Shuffles and votes order nothing.
struct Strand {
#ifdef __SANITIZE_THREAD__
  void* self = __tsan_create_fiber(0);
  Strand() = default;
  Strand(const Strand&) = delete;
  ~Strand() { __tsan_destroy_fiber(self); }
#endif
};
#ifdef __SANITIZE_THREAD__
inline void* scheduler_strand;
inline void released(void* what) { __tsan_release(what); }
inline void acquired(void* what) { __tsan_acquire(what); }
#else
inline void released(void*) {}
inline void acquired(void*) {}
#endif

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

struct Warp {
  union {
    float slots[32];
    uint64_t words[32];
    uint32_t fragments[32][6];
  };
  Barrier barrier;
};

struct Block {
  Index index;
  std::map<const void*, std::vector<char>> shared;
  std::vector<Warp> warps;
  Barrier barrier;
  std::map<int, Barrier> pairs;  // of warps, for named barriers
  int count = 0, counted = 0;
  std::shared_ptr<void> more;  // state of other headers
};

// An asynchronous copy into shared memory; it completes as late as the thread allows.
struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  Index thread;
  unsigned rank, linear;
  std::vector<Copy> begun;
  std::deque<std::vector<Copy>> groups;
  long arrived_at = 0;  // the cluster's barrier
  bool started = false, done = false;
  Strand strand;
};

inline std::vector<std::unique_ptr<Block>> blocks;  // of the running cluster
inline Barrier cluster_barrier;
inline std::function<void()> body;
inline Fiber* current;
inline ucontext_t scheduler;
inline jmp_buf scheduler_jump;
inline Index grid_dim, block_dim;
inline size_t shared_rest;  // bytes of dynamic shared memory
inline long progress;
constexpr size_t kStack = 64 * 1024;
inline std::vector<std::unique_ptr<char[]>> stacks;  // reused between launches

inline Block& block() { return *blocks[current->rank]; }
inline Warp& warp() { return block().warps[current->linear / 32]; }
inline int lane() { return int(current->linear % 32); }
inline int block_threads() { return int(block_dim.x * block_dim.y); }

#ifdef __SANITIZE_THREAD__
inline void yield() {
  Fiber& fiber = *current;
  __tsan_switch_to_fiber(scheduler_strand, fiber.done ? 0 : __tsan_switch_to_fiber_no_sync);
  swapcontext(&fiber.context, &scheduler);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  scheduler_strand = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.strand.self, fiber.started ? __tsan_switch_to_fiber_no_sync : 0);
  fiber.started = true;
  swapcontext(&scheduler, &fiber.context);
}
#else
// Contexts only start a fiber: a context switch costs two system calls, a jump none.
inline void yield() {
  if (!_setjmp(current->jump)) _longjmp(scheduler_jump, 1);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler_jump)) return;
  if (fiber.started) _longjmp(fiber.jump, 1);
  fiber.started = true;
  swapcontext(&scheduler, &fiber.context);
}
#endif

inline void arrive(Barrier& barrier, int threads, bool orders = true) {
  if (orders) released(&barrier);
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
  ++progress;
}

inline void wait_beyond(Barrier& barrier, long generation, bool orders = true) {
  while (barrier.generation == generation) yield();
  if (orders) acquired(&barrier);
}

inline void wait(Barrier& barrier, int threads, bool orders = true) {
  const long generation = barrier.generation;
  arrive(barrier, threads, orders);
  wait_beyond(barrier, generation, orders);
}

// Synchronise a warp for a shuffle or vote.
inline void sync_lanes() { wait(warp().barrier, 32, false); }

// Fresh shared memory holds NaN, so that reads of unwritten memory show.
inline void* shared(const void* key, size_t bytes) {
  std::vector<char>& memory = block().shared[key];
  if (memory.empty()) memory.assign(bytes, char(0xff));
  return memory.data();
}

inline void enter() {
  body();
  current->done = true;
  ++progress;
  yield();
}

// Warps drift apart: one in four sleeps, for long enough that others complete a reduction, then other warps do.
constexpr long kNap = 48;
inline bool asleep(const Fiber& fiber, long round) {
  if (round < kNap && fiber.rank % 2) return true;  // blocks of a cluster start at different times
  const unsigned long warp = fiber.rank * 64 + fiber.linear / 32;
  const unsigned long seed = (unsigned long)(round / kNap) * 0x9e3779b97f4a7c15ul + warp * 0xbf58476d1ce4e5b9ul;
  return (seed ^ seed >> 31) * 0x94d049bb133111ebul >> 62 == 0;
}

inline void run_cluster(unsigned first_block, unsigned cluster) {
  blocks.clear();
  cluster_barrier = {};
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (unsigned rank = 0; rank < cluster; ++rank) {
    blocks.push_back(std::make_unique<Block>());
    blocks.back()->index = {(first_block + rank) % grid_dim.x, (first_block + rank) / grid_dim.x};
    blocks.back()->warps.resize((block_threads() + 31) / 32);
    for (int linear = 0; linear < block_threads(); ++linear) {
      auto fiber = std::make_unique<Fiber>();
      if (stacks.size() == fibers.size()) stacks.emplace_back(new char[kStack]);
      fiber->thread = {unsigned(linear) % block_dim.x, unsigned(linear) / block_dim.x};
      fiber->rank = rank;
      fiber->linear = unsigned(linear);
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = stacks[fibers.size()].get();
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = &scheduler;
      makecontext(&fiber->context, enter, 0);
      fibers.push_back(std::move(fiber));
    }
  }
  long idle = 0;
  for (long round = 0, left = 1; left; ++round) {
    left = 0;
    const long before = progress;
    for (auto& fiber : fibers) {
      if (fiber->done) continue;
      left = 1;
      if (!asleep(*fiber, round)) resume(*fiber);
    }
    idle = progress == before ? idle + 1 : 0;
    if (left && idle > 16 * kNap) {
      std::fprintf(stderr, "deadlock: all threads wait\n");
      std::abort();
    }
  }
}

inline void launch(Index grid, Index block, unsigned cluster, std::function<void()> kernel, size_t rest = 0) {
  shared_rest = rest;
  grid_dim = {grid.x, grid.y, 1};
  block_dim = {block.x, block.y, 1};
  body = std::move(kernel);
  for (unsigned first = 0; first < grid.x * grid.y; first += cluster) run_cluster(first, cluster);
}

inline void launch(unsigned grid, Index block, unsigned cluster, std::function<void()> kernel, size_t rest = 0) {
  launch(Index{grid, 1, 1}, block, cluster, std::move(kernel), rest);
}

}  // namespace ejkernel::host

#define threadIdx (ejkernel::host::current->thread)
#define blockIdx (ejkernel::host::block().index)
#define blockDim (ejkernel::host::block_dim)
#define gridDim (ejkernel::host::grid_dim)
#define EJKERNEL_SHARED(type, name, size) \
  static char name##_key;                 \
  type* name = static_cast<type*>(ejkernel::host::shared(&name##_key, sizeof(type) * (size)))

#define EJKERNEL_DYNAMIC_SHARED(type, name) \
  static char name##_key;                   \
  type* name = static_cast<type*>(ejkernel::host::shared(&name##_key, ejkernel::host::shared_rest))

inline void __syncthreads() { ejkernel::host::wait(ejkernel::host::block().barrier, ejkernel::host::block_threads()); }

inline int __syncthreads_count(bool here) {
  auto& block = ejkernel::host::block();
  block.count += here;
  __syncthreads();
  const int count = block.count;
  __syncthreads();
  block.count = 0;
  __syncthreads();
  return count;
}

inline float __shfl_xor_sync(unsigned, float value, int step) {
  auto& warp = ejkernel::host::block().warps[ejkernel::host::current->linear / 32];
  const unsigned lane = ejkernel::host::current->linear % 32;
  warp.slots[lane] = value;
  ejkernel::host::sync_lanes();
  const float other = warp.slots[lane ^ unsigned(step)];
  ejkernel::host::sync_lanes();
  return other;
}

inline void __syncwarp() { ejkernel::host::wait(ejkernel::host::warp().barrier, 32); }

// The value of lane `lane`.
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  auto& warp = ejkernel::host::warp();
  std::memcpy(&warp.words[ejkernel::host::lane()], &value, sizeof(T));
  ejkernel::host::sync_lanes();
  std::memcpy(&value, &warp.words[lane], sizeof(T));
  ejkernel::host::sync_lanes();
  return value;
}

inline unsigned __ballot_sync(unsigned, bool here) {
  auto& warp = ejkernel::host::warp();
  warp.words[ejkernel::host::lane()] = here;
  ejkernel::host::sync_lanes();
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(warp.words[lane]) << lane;
  ejkernel::host::sync_lanes();
  return bits;
}

inline bool __any_sync(unsigned mask, bool here) { return __ballot_sync(mask, here) != 0; }

inline int __ffs(int value) { return __builtin_ffs(value); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }

// Select bytes of both words; each digit of the selector names one of eight.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) picked |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

inline float rsqrtf(float value) { return 1.f / std::sqrt(value); }

inline int __float2int_rn(float value) { return int(std::nearbyint(value)); }

namespace ejkernel {

constexpr bool kHasClusters = true;
inline unsigned cluster_size() { return unsigned(host::blocks.size()); }
inline unsigned cluster_rank() { return host::current->rank; }
inline unsigned cluster_index() { return host::block().index.x / cluster_size(); }
inline void cluster_arrive() {
  host::current->arrived_at = host::cluster_barrier.generation;
  host::arrive(host::cluster_barrier, host::block_threads() * int(host::blocks.size()));
}
inline void cluster_wait() { host::wait_beyond(host::cluster_barrier, host::current->arrived_at); }

inline float fast_exp2(float value) { return std::exp2(value); }
inline float fast_reciprocal(float value) { return 1.f / value; }

template <typename Words>
Words load_predicated(const void* from, bool valid) {
  Words words{};
  if (valid) std::memcpy(&words, from, sizeof(words));
  return words;
}

template <typename Words>
inline void store_predicated(void* to, Words words, bool valid) {
  if (valid) std::memcpy(to, &words, sizeof(words));
}

// The destination of a copy in flight holds NaN until the wait.
template <int BYTES>
inline void cp_async(void* to, const void* from, bool valid) {
  std::memset(to, 0xff, BYTES);
  host::current->begun.push_back({to, from, BYTES, valid});
}

inline const char* opaque_pointer(const char* pointer) { return pointer; }

inline void make_opaque(uint4&) {}

template <typename T>
inline uint32_t packed_max(uint32_t a, uint32_t b) {
  struct Pair {
    T data[2];
  };
  Pair larger = __builtin_bit_cast(Pair, a);
  const Pair other = __builtin_bit_cast(Pair, b);
  for (int i = 0; i < 2; ++i) {
    const float here = float(larger.data[i]), valid = float(other.data[i]);
    if (valid > here || here != here) larger.data[i] = other.data[i];
  }
  return __builtin_bit_cast(uint32_t, larger);
}

inline void prefetch_l2(const void*) {}

inline int warp_broadcast(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
inline int warp_sum(int value) {
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += __shfl_sync(0xffffffffu, value, lane);
  return sum;
}

inline void warp_pair_sync(int pair) { host::wait(host::block().pairs[pair], 64); }

// Kernels run one after the other.
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

inline void cp_async_commit_group() {
  host::current->groups.push_back(std::move(host::current->begun));
  host::current->begun.clear();
}

inline void cp_async_wait_group(int open) {
  auto& groups = host::current->groups;
  for (; int(groups.size()) > open; groups.pop_front()) {
    for (const host::Copy& copy : groups.front()) {
      copy.valid ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
    }
  }
}

// The corresponding address in another block's shared memory.
inline void* mapa(void* here, unsigned rank) {
  for (auto& [key, memory] : host::block().shared) {
    const char* at = reinterpret_cast<char*>(here);
    if (at < memory.data() || at >= memory.data() + memory.size()) continue;
    return host::blocks[rank]->shared.at(key).data() + (at - memory.data());
  }
  std::fprintf(stderr, "not in shared memory\n");
  std::abort();
}

using ClusterMbarrier = uint64_t;
struct ClusterPhase {
  int32_t missing;  // bytes
  bool expected;
  uint8_t parity;

  void complete_phase() {
    if (!expected || missing) return;
    expected = false;
    parity ^= 1;
    ++host::progress;
  }
};
static_assert(sizeof(ClusterPhase) == sizeof(ClusterMbarrier));
inline ClusterPhase& cluster_phase(ClusterMbarrier* barrier) { return *reinterpret_cast<ClusterPhase*>(barrier); }

inline void cluster_mbarrier_init(ClusterMbarrier* barrier) { cluster_phase(barrier) = {}; }

inline void cluster_mbarrier_expect_tx(ClusterMbarrier* barrier, int bytes) {
  cluster_phase(barrier).missing += bytes;
  cluster_phase(barrier).expected = true;
  cluster_phase(barrier).complete_phase();
}

inline void st_async(float* to, ClusterMbarrier* barrier, unsigned rank, float value) {
  *static_cast<float*>(mapa(to, rank)) = value;
  ClusterPhase& valid = cluster_phase(static_cast<ClusterMbarrier*>(mapa(barrier, rank)));
  valid.missing -= sizeof(value);
  host::released(&valid);
  valid.complete_phase();
}

inline void cluster_mbarrier_wait(ClusterMbarrier* barrier, unsigned parity) {
  while (cluster_phase(barrier).parity == parity) host::yield();
  host::acquired(&cluster_phase(barrier));
}

}  // namespace ejkernel
