// Stand-ins for compute capability 9.0 on a host. Asynchronous operations complete as late as the kernel allows or, at random,
// at once; until the wait, their destinations hold NaN. A violation that hardware would not report aborts the program.
#pragma once

#include <array>
#include <functional>
#include <random>

#define EJKERNEL_INLINE inline

namespace ejkernel {

struct TensorMap {
  char* data;
  int64_t extent[4];  // columns, tokens, heads, batch
  int64_t stride[4];  // bytes
  int tokens, heads;  // of a box; it has the columns of a swizzle atom

  int rows() const { return tokens * heads; }
};

struct PageTensorMap {
  char* data;
  int64_t extent[4];  // of the axes after the row, which has 128 bytes
  int64_t stride[4];  // bytes
  int box[2];         // of the first two axes; 1 along the others
  int64_t columns;    // elements of two bytes of a row; loads of whole rows need none
};

using Mbarrier = uint64_t;
using CachePolicy = uint64_t;

namespace host {

inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct Phases {
  int32_t bytes;  // expected and not yet arrived
  uint8_t arrivals, missing, parity, open;

  void complete_phase() {
    if (missing || bytes) return;
    missing = arrivals;
    parity ^= 1;
    ++progress;
  }
};
static_assert(sizeof(Phases) == sizeof(Mbarrier));

inline Phases& phases(Mbarrier* barrier) {
  Phases& found = *reinterpret_cast<Phases*>(barrier);
  if (found.open != 1) fail("an mbarrier is used before its init");
  return found;
}

// This thread's accumulators of a wgmma.
struct WgmmaOp {
  float* to;
  int count, index;  // of accumulators; index of a register operand A, or -1
  bool add;
  uint64_t left, right;
  float (*element)(uint16_t);
};

struct Store {
  TensorMap map;
  const char* from;
  std::array<int, 4> at;
};

struct Thread {
  std::vector<WgmmaOp> issued;
  std::deque<std::vector<WgmmaOp>> groups;
  std::map<float*, std::vector<float>> in_flight;  // accumulators of wgmmas in flight
  std::map<float*, int> open;                      // number of wgmmas in flight per accumulator
  std::vector<std::array<uint32_t, 4>> rows;       // register operands A, by index
  std::vector<Store> stores;
};

struct Load {
  std::function<void()> copy;
  Mbarrier* barrier;
  int bytes;
};

struct NamedBarrier {
  Barrier barrier;
  int threads = 0;
  bool any = false;
};

struct Hopper {
  std::vector<Thread> threads = std::vector<Thread>(size_t(block_threads()));
  std::vector<Load> loads;
  std::map<int, NamedBarrier> named;
  std::mt19937 chance{block().index.x};
};

inline Hopper& hopper() {
  if (!block().more) block().more = std::make_shared<Hopper>();
  return *static_cast<Hopper*>(block().more.get());
}
inline Thread& thread() { return hopper().threads[current->linear]; }

inline char* memory() { return block().shared.begin()->second.data(); }  // one dynamic array

inline bool inside(const TensorMap& map, const std::array<int, 4>& at, int row, int column, char*& address) {
  const int64_t index[4] = {at[0] + column, at[1] + row / map.heads, at[2] + row % map.heads, at[3]};
  address = map.data;
  for (int axis = 0; axis < 4; ++axis) {
    if (index[axis] < 0 || index[axis] >= map.extent[axis]) return false;
    address += index[axis] * map.stride[axis];
  }
  return true;
}

template <typename Each>
void each_of_box(const TensorMap& map, const std::array<int, 4>& at, const char* shared, Each each) {
  if ((shared - memory()) % 1024) fail("a TMA box is not aligned to 1024 bytes");
  for (int row = 0; row < map.rows(); ++row) {
    for (int column = 0; column < 64; ++column) {
      char* address;
      const bool there = inside(map, at, row, column, address);
      each(swizzled_offset(row, column / 8) + column % 8 * 2, there ? address : nullptr);
    }
  }
}

// Whichever fiber completes a load, it happens after the arrivals that its mbarrier knows of, and before the waits on it.
inline void complete(const Load& load) {
  acquired(load.barrier);
  load.copy();
  released(load.barrier);
  Phases& at = phases(load.barrier);
  at.bytes -= load.bytes;
  at.complete_phase();
  ++progress;
}

inline void begin_load(char* to, int bytes, Mbarrier* barrier, std::function<void()> copy) {
  std::memset(to, 0xff, size_t(bytes));
  released(barrier);
  hopper().loads.push_back({std::move(copy), barrier, bytes});
}

// Complete one of the loads in flight at random.
inline void advance() {
  auto& loads = hopper().loads;
  if (loads.empty() || hopper().chance() % 64) return;
  const size_t which = hopper().chance() % loads.size();
  const Load load = loads[which];
  loads.erase(loads.begin() + long(which));
  complete(load);
}

inline float element_at(unsigned logical, float (*element)(uint16_t)) {
  const unsigned address = logical ^ ((logical >> 7 & 7) << 4);
  uint16_t bits;
  std::memcpy(&bits, memory() + address, 2);
  return element(bits);
}

struct SmemDescriptor {
  unsigned start, leading, stride;

  explicit SmemDescriptor(uint64_t at)
      : start(unsigned(at & 0x3fff) << 4), leading(unsigned(at >> 16 & 0x3fff) << 4), stride(unsigned(at >> 32 & 0x3fff) << 4) {
    if (at >> 62 != 1) fail("a descriptor has not the 128-byte swizzle");
  }
  // Address in a K-major operand.
  unsigned k_major(int row, int term) const {
    return start + unsigned(row / 8) * stride + unsigned(row % 8) * 128 + unsigned(term) * 2;
  }
  // Address in an MN-major operand.
  unsigned mn_major(int term, int column) const {
    return start + unsigned(column / 64) * leading + unsigned(term / 8) * stride + unsigned(term % 8) * 128 +
           unsigned(column % 64) * 2;
  }
};

constexpr uint32_t kPending = 0x7fc0dead;

inline void compute(const WgmmaOp& issue) {
  const int linear = int(current->linear), lane = linear % 32, warp = linear / 32 % 4;
  auto& sums = thread().in_flight.at(issue.to);
  const SmemDescriptor right(issue.right);
  float left[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int term = 0; term < 16; ++term) {
      if (issue.index < 0) {
        left[half][term] = element_at(SmemDescriptor(issue.left).k_major(16 * warp + lane / 4 + 8 * half, term), issue.element);
        continue;
      }
      const Thread& mate = hopper().threads[size_t(linear - lane % 4 + term % 8 / 2)];
      while (mate.rows.size() <= size_t(issue.index)) yield();
      left[half][term] =
          issue.element(uint16_t(mate.rows[size_t(issue.index)][size_t(term / 8 * 2 + half)] >> (term % 2 * 16)));
    }
  }
  for (int i = 0; i < issue.count; i += 4) {
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * i + 2 * (lane % 4) + odd;
      float total[2] = {};
      for (int term = 0; term < 16; ++term) {
        const unsigned at = issue.index < 0 ? right.k_major(column, term) : right.mn_major(term, column);
        const float element = element_at(at, issue.element);
        for (int half = 0; half < 2; ++half) total[half] += left[half][term] * element;
      }
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[size_t(i + 2 * half + odd)];
        sum = total[half] + (issue.add ? sum : 0.f);
      }
    }
  }
}

inline void issue(WgmmaOp given) {
  Thread& own = thread();
  if (own.open[given.to]++ == 0) {
    own.in_flight[given.to].assign(given.to, given.to + given.count);
    for (int i = 0; i < given.count; ++i) std::memcpy(given.to + i, &kPending, 4);
  }
  own.issued.push_back(given);
}

// Accumulators become valid when their last wgmma completes.
inline void retire(const WgmmaOp& issue) {
  Thread& own = thread();
  if (--own.open.at(issue.to)) return;
  for (int i = 0; i < issue.count; ++i) {
    if (std::memcmp(issue.to + i, &kPending, 4)) fail("accumulators were written while their wgmma is in flight");
    issue.to[i] = own.in_flight.at(issue.to)[size_t(i)];
  }
  own.in_flight.erase(issue.to);
}

inline float of_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float of_half(uint16_t bits) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

template <typename T>
constexpr float (*element_of)(uint16_t) = of_half;
template <>
inline constexpr float (*element_of<__nv_bfloat16>)(uint16_t) = of_bfloat16;

}  // namespace host

inline unsigned shared_address(const void* pointer) { return unsigned(static_cast<const char*>(pointer) - host::memory()); }

inline void mbarrier_init(Mbarrier* barrier, int arrivals) {
  *reinterpret_cast<host::Phases*>(barrier) = {0, uint8_t(arrivals), uint8_t(arrivals), 0, 1};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(Mbarrier* barrier) {
  host::released(barrier);
  auto& at = host::phases(barrier);
  if (!at.missing) host::fail("an mbarrier got more arrivals than its count");
  --at.missing;
  at.complete_phase();
}

inline void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes) {
  host::phases(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  while (host::phases(barrier).parity == parity) {
    host::advance();
    host::yield();
  }
  host::acquired(barrier);
}

inline void prefetch_tensor_map(const TensorMap&) {}

inline void tma_load(void* to, const TensorMap& map, Mbarrier* barrier, int column, int row, int head, int batch) {
  char* shared = static_cast<char*>(to);
  host::begin_load(shared, map.rows() * kAtomRowBytes, barrier, [=] {
    host::each_of_box(map, {column, row, head, batch}, shared, [&](int offset, const char* address) {
      address ? std::memcpy(shared + offset, address, 2) : std::memset(shared + offset, 0, 2);
    });
  });
}

inline CachePolicy evict_first_policy() { return 0; }

inline void tma_load_pages(void* to, const PageTensorMap& map, Mbarrier* barrier, CachePolicy, int second, int third,
                           int fourth, int fifth) {
  char* shared = static_cast<char*>(to);
  const std::array<int, 4> first{second, third, fourth, fifth};
  if ((shared - host::memory()) % 1024) host::fail("a TMA box is not aligned to 1024 bytes");
  host::begin_load(shared, map.box[0] * map.box[1] * kAtomRowBytes, barrier, [=] {
    for (int row = 0; row < map.box[0] * map.box[1]; ++row) {
      const char* from = map.data;
      for (int axis = 0; axis < 4; ++axis) {
        const int64_t at = first[axis] + (axis == 0 ? row % map.box[0] : axis == 1 ? row / map.box[0] : 0);
        if (at < 0 || at >= map.extent[axis]) host::fail("a TMA box passes the end of the pages");
        from += at * map.stride[axis];
      }
      for (int chunk = 0; chunk < kAtomRowBytes / 16; ++chunk)
        std::memcpy(shared + swizzled_offset(row, chunk), from + chunk * 16, 16);
    }
  });
}

inline void tma_load_pages(void* to, const PageTensorMap& map, Mbarrier* barrier, int column, int second, int third, int fourth,
                           int fifth) {
  char* shared = static_cast<char*>(to);
  const std::array<int, 4> first{second, third, fourth, fifth};
  const int rows = map.box[0] * map.box[1];
  if ((shared - host::memory()) % 1024) host::fail("a TMA box is not aligned to 1024 bytes");
  host::begin_load(shared, rows * kAtomRowBytes, barrier, [=] {
    for (int row = 0; row < rows; ++row) {
      const char* from = map.data;
      bool inside = true;
      for (int axis = 0; axis < 4; ++axis) {
        const int64_t at = first[axis] + (axis == 0 ? row % map.box[0] : axis == 1 ? row / map.box[0] : 0);
        inside &= at >= 0 && at < map.extent[axis];
        from += at * map.stride[axis];
      }
      for (int i = 0; i < kAtomRowBytes / 2; ++i) {
        char* const element = shared + swizzled_offset(row, i / 8) + i % 8 * 2;
        inside && column + i < map.columns ? std::memcpy(element, from + (column + i) * 2, 2) : std::memset(element, 0, 2);
      }
    }
  });
}

inline void tma_store(const TensorMap& map, const void* from, int column, int row, int head, int batch) {
  host::thread().stores.push_back({map, static_cast<const char*>(from), {column, row, head, batch}});
}
inline void tma_store_commit_group() {}

inline void tma_store_wait_group_read() {
  for (int i = 0; i < 40; ++i) host::yield();  // other fibers run on, and may overwrite what is not stored yet
  for (const auto& store : host::thread().stores) {
    host::each_of_box(store.map, store.at, store.from, [&](int offset, char* address) {
      if (address) std::memcpy(address, store.from + offset, 2);
    });
  }
  host::thread().stores.clear();
}

inline void fence_proxy_async() {}

inline host::NamedBarrier& named_barrier(int id, int threads) {
  auto& found = host::hopper().named[id];
  if (found.barrier.arrived && found.threads != threads) host::fail("a named barrier is used with two thread counts");
  found.threads = threads;
  return found;
}

inline void named_barrier_sync(int barrier, int threads) { host::wait(named_barrier(barrier, threads).barrier, threads); }

inline void named_barrier_arrive(int barrier, int threads) {
  auto& found = named_barrier(barrier, threads).barrier;
  if (++found.arrived < threads) return;
  found.arrived = 0;
  ++found.generation;
  ++host::progress;
}

inline bool named_barrier_sync_or(int barrier, int threads, bool here) {
  auto& found = named_barrier(barrier, threads);
  found.any |= here;
  named_barrier_sync(barrier, threads);
  const bool any = found.any;
  named_barrier_sync(barrier, threads);
  found.any = false;
  named_barrier_sync(barrier, threads);
  return any;
}

template <int COUNT>
inline void setmaxnreg_inc() {}
template <int COUNT>
inline void setmaxnreg_dec() {}

inline int warp_uniform(int value) { return value; }
inline bool elect_one() { return threadIdx.x % 32 == 0; }

inline void wgmma_fence() {}

inline void wgmma_commit_group() {
  auto& own = host::thread();
  own.groups.push_back(std::move(own.issued));
  own.issued.clear();
  if (own.groups.size() > 1 || host::hopper().chance() % 4) return;
  for (auto& issue : own.groups.back()) host::compute(issue), issue.element = nullptr;
}

template <int OPEN>
inline void wgmma_wait_group() {
  auto& own = host::thread();
  // Other fibers run on meanwhile, and may overwrite what is still to be read.
  if (own.groups.size() > OPEN && host::hopper().chance() % 4 == 0) {
    for (int i = 0; i < 6; ++i) host::yield();
  }
  for (; own.groups.size() > OPEN; own.groups.pop_front()) {
    for (const auto& issue : own.groups.front()) {
      if (issue.element) host::compute(issue);
      host::retire(issue);
    }
  }
  host::wait(host::block().warps[host::current->linear / 32].barrier, 32);  // wgmma waits are warp-wide
}

template <int COUNT>
inline void wgmma_fence_operand(float (&values)[COUNT]) {
  if (host::thread().in_flight.count(values)) host::fail("accumulators are read while their wgmma is in flight");
}

inline float fast_tanh(float value) { return std::tanh(value); }

template <typename T, int N>
struct WgmmaSS {
  static void run(float (&d)[N / 2], uint64_t left, uint64_t right, int add) {
    host::issue({d, N / 2, -1, add != 0, left, right, host::element_of<T>});
  }
};

template <typename T, int N>
struct WgmmaRS {
  static void run(float (&d)[N / 2], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint64_t right) {
    auto& own = host::thread();
    own.rows.push_back({a, b, c, e});
    host::issue({d, N / 2, int(own.rows.size()) - 1, true, 0, right, host::element_of<T>});
  }
};

}  // namespace ejkernel
