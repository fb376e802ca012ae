// Words of compute capability 9.0 for a host. What runs beside the threads is done as late as they allow, or, by chance, at
// once; until it is waited for, its place holds NaN. What the hardware would do wrong without a word ends the program here.
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
  int tokens, heads;  // of a box; it has the columns of a panel

  int rows() const { return tokens * heads; }
};

struct RowMap {
  char* data;
  int64_t extent[4];  // of the axes after that of a row, which has 128 bytes
  int64_t stride[4];  // bytes
  int box[2];         // of the first two of them; of the others a box has one
};

using Arrivals = uint64_t;
using CachePolicy = uint64_t;

namespace host {

inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

struct Phases {
  int32_t bytes;  // announced and not yet here
  uint8_t arrivals, missing, parity, open;

  void settle() {
    if (missing || bytes) return;
    missing = arrivals;
    parity ^= 1;
    ++progress;
  }
};
static_assert(sizeof(Phases) == sizeof(Arrivals));

inline Phases& phases(Arrivals* barrier) {
  Phases& found = *reinterpret_cast<Phases*>(barrier);
  if (found.open != 1) fail("a barrier is used that nobody opened");
  return found;
}

// A product of this thread's part of the sums.
struct Issue {
  float* to;
  int count, number;  // of sums; among those with rows in registers, or -1
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
  std::vector<Issue> issued;
  std::deque<std::vector<Issue>> groups;
  std::map<float*, std::vector<float>> flying;  // sums of products under way
  std::map<float*, int> open;                   // how many products of theirs
  std::vector<std::array<uint32_t, 4>> rows;    // those in registers, by number
  std::vector<Store> stores;
};

struct Load {
  std::function<void()> copy;
  Arrivals* barrier;
  int bytes;
};

struct Named {
  Barrier barrier;
  int threads = 0;
  bool any = false;
};

struct Hopper {
  std::vector<Thread> threads = std::vector<Thread>(size_t(block_threads()));
  std::vector<Load> loads;
  std::map<int, Named> named;
  std::mt19937 chance{block().index.x};
};

inline Hopper& hopper() {
  if (!block().more) block().more = std::make_shared<Hopper>();
  return *static_cast<Hopper*>(block().more.get());
}
inline Thread& thread() { return hopper().threads[current->linear]; }

inline char* memory() { return block().shared.begin()->second.data(); }  // all of it is one array

inline bool inside(const TensorMap& map, const std::array<int, 4>& at, int row, int column, char*& place) {
  const int64_t index[4] = {at[0] + column, at[1] + row / map.heads, at[2] + row % map.heads, at[3]};
  place = map.data;
  for (int axis = 0; axis < 4; ++axis) {
    if (index[axis] < 0 || index[axis] >= map.extent[axis]) return false;
    place += index[axis] * map.stride[axis];
  }
  return true;
}

template <typename Each>
void each_of_box(const TensorMap& map, const std::array<int, 4>& at, const char* shared, Each each) {
  if ((shared - memory()) % 1024) fail("a box does not begin on 1024 bytes");
  for (int row = 0; row < map.rows(); ++row) {
    for (int column = 0; column < 64; ++column) {
      char* place;
      const bool there = inside(map, at, row, column, place);
      each(swizzled(row, column / 8) + column % 8 * 2, there ? place : nullptr);
    }
  }
}

// Whoever lets a copy be done, it comes after what its barrier knows of, and before whoever waits there.
inline void land(const Load& load) {
  acquired(load.barrier);
  load.copy();
  released(load.barrier);
  Phases& at = phases(load.barrier);
  at.bytes -= load.bytes;
  at.settle();
  ++progress;
}

inline void begin_load(char* to, int bytes, Arrivals* barrier, std::function<void()> copy) {
  std::memset(to, 0xff, size_t(bytes));
  released(barrier);
  hopper().loads.push_back({std::move(copy), barrier, bytes});
}

// By chance, one of the copies under way is done.
inline void advance() {
  auto& loads = hopper().loads;
  if (loads.empty() || hopper().chance() % 64) return;
  const size_t which = hopper().chance() % loads.size();
  const Load load = loads[which];
  loads.erase(loads.begin() + long(which));
  land(load);
}

inline float element_at(unsigned logical, float (*element)(uint16_t)) {
  const unsigned address = logical ^ ((logical >> 7 & 7) << 4);
  uint16_t bits;
  std::memcpy(&bits, memory() + address, 2);
  return element(bits);
}

struct Matrix {
  unsigned start, leading, stride;

  explicit Matrix(uint64_t at)
      : start(unsigned(at & 0x3fff) << 4), leading(unsigned(at >> 16 & 0x3fff) << 4), stride(unsigned(at >> 32 & 0x3fff) << 4) {
    if (at >> 62 != 1) fail("a matrix is not swizzled by 128 bytes");
  }
  // Of a row whose terms follow each other.
  unsigned along(int row, int term) const {
    return start + unsigned(row / 8) * stride + unsigned(row % 8) * 128 + unsigned(term) * 2;
  }
  // Of a term whose columns follow each other.
  unsigned across(int term, int column) const {
    return start + unsigned(column / 64) * leading + unsigned(term / 8) * stride + unsigned(term % 8) * 128 +
           unsigned(column % 64) * 2;
  }
};

constexpr uint32_t kPoison = 0x7fc0dead;

inline void compute(const Issue& issue) {
  const int linear = int(current->linear), lane = linear % 32, warp = linear / 32 % 4;
  auto& sums = thread().flying.at(issue.to);
  const Matrix right(issue.right);
  float left[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int term = 0; term < 16; ++term) {
      if (issue.number < 0) {
        left[half][term] = element_at(Matrix(issue.left).along(16 * warp + lane / 4 + 8 * half, term), issue.element);
        continue;
      }
      const Thread& mate = hopper().threads[size_t(linear - lane % 4 + term % 8 / 2)];
      while (mate.rows.size() <= size_t(issue.number)) yield();
      left[half][term] =
          issue.element(uint16_t(mate.rows[size_t(issue.number)][size_t(term / 8 * 2 + half)] >> (term % 2 * 16)));
    }
  }
  for (int i = 0; i < issue.count; i += 4) {
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * i + 2 * (lane % 4) + odd;
      float total[2] = {};
      for (int term = 0; term < 16; ++term) {
        const unsigned at = issue.number < 0 ? right.along(column, term) : right.across(term, column);
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

inline void issue(Issue given) {
  Thread& own = thread();
  if (own.open[given.to]++ == 0) {
    own.flying[given.to].assign(given.to, given.to + given.count);
    for (int i = 0; i < given.count; ++i) std::memcpy(given.to + i, &kPoison, 4);
  }
  own.issued.push_back(given);
}

// Sums come back when the last of their products is done.
inline void retire(const Issue& issue) {
  Thread& own = thread();
  if (--own.open.at(issue.to)) return;
  for (int i = 0; i < issue.count; ++i) {
    if (std::memcmp(issue.to + i, &kPoison, 4)) fail("sums of a product were written before it was done");
    issue.to[i] = own.flying.at(issue.to)[size_t(i)];
  }
  own.flying.erase(issue.to);
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

inline void open_barrier(Arrivals* barrier, int arrivals) {
  *reinterpret_cast<host::Phases*>(barrier) = {0, uint8_t(arrivals), uint8_t(arrivals), 0, 1};
}
inline void publish_barriers() {}

inline void arrive(Arrivals* barrier) {
  host::released(barrier);
  auto& at = host::phases(barrier);
  if (!at.missing) host::fail("more arrive at a barrier than it was opened for");
  --at.missing;
  at.settle();
}

inline void arrive_expecting(Arrivals* barrier, int bytes) {
  host::phases(barrier).bytes += bytes;
  arrive(barrier);
}

inline void await(Arrivals* barrier, unsigned parity) {
  while (host::phases(barrier).parity == parity) {
    host::advance();
    host::yield();
  }
  host::acquired(barrier);
}

inline void prefetch_map(const TensorMap&) {}

inline void load_box(void* to, const TensorMap& map, Arrivals* barrier, int column, int row, int head, int batch) {
  char* shared = static_cast<char*>(to);
  host::begin_load(shared, map.rows() * kPanelBytes, barrier, [=] {
    host::each_of_box(map, {column, row, head, batch}, shared, [&](int offset, const char* place) {
      place ? std::memcpy(shared + offset, place, 2) : std::memset(shared + offset, 0, 2);
    });
  });
}

inline CachePolicy read_once() { return 0; }

inline void load_rows(void* to, const RowMap& map, Arrivals* barrier, CachePolicy, int second, int third, int fourth,
                      int fifth) {
  char* shared = static_cast<char*>(to);
  const std::array<int, 4> first{second, third, fourth, fifth};
  if ((shared - host::memory()) % 1024) host::fail("a box does not begin on 1024 bytes");
  host::begin_load(shared, map.box[0] * map.box[1] * kPanelBytes, barrier, [=] {
    for (int row = 0; row < map.box[0] * map.box[1]; ++row) {
      const char* from = map.data;
      for (int axis = 0; axis < 4; ++axis) {
        const int64_t at = first[axis] + (axis == 0 ? row % map.box[0] : axis == 1 ? row / map.box[0] : 0);
        if (at < 0 || at >= map.extent[axis]) host::fail("a box of whole rows passes the end of the array");
        from += at * map.stride[axis];
      }
      for (int chunk = 0; chunk < kPanelBytes / 16; ++chunk) std::memcpy(shared + swizzled(row, chunk), from + chunk * 16, 16);
    }
  });
}

inline void store_box(const TensorMap& map, const void* from, int column, int row, int head, int batch) {
  host::thread().stores.push_back({map, static_cast<const char*>(from), {column, row, head, batch}});
}
inline void commit_stores() {}

inline void await_stores_read() {
  for (int i = 0; i < 40; ++i) host::yield();  // others run on, over what is not yet stored if they may
  for (const auto& store : host::thread().stores) {
    host::each_of_box(store.map, store.at, store.from, [&](int offset, char* place) {
      if (place) std::memcpy(place, store.from + offset, 2);
    });
  }
  host::thread().stores.clear();
}

inline void show_to_async() {}

inline host::Named& named_barrier(int number, int threads) {
  auto& found = host::hopper().named[number];
  if (found.barrier.arrived && found.threads != threads) host::fail("a barrier is used for two numbers of threads");
  found.threads = threads;
  return found;
}

inline void meet(int barrier, int threads) { host::wait(named_barrier(barrier, threads).barrier, threads); }

inline void signal(int barrier, int threads) {
  auto& found = named_barrier(barrier, threads).barrier;
  if (++found.arrived < threads) return;
  found.arrived = 0;
  ++found.generation;
  ++host::progress;
}

inline bool meet_any(int barrier, int threads, bool here) {
  auto& found = named_barrier(barrier, threads);
  found.any |= here;
  meet(barrier, threads);
  const bool any = found.any;
  meet(barrier, threads);
  found.any = false;
  meet(barrier, threads);
  return any;
}

template <int COUNT>
inline void more_registers() {}
template <int COUNT>
inline void fewer_registers() {}

inline int same_in_warp(int value) { return value; }
inline bool one_of_warp() { return threadIdx.x % 32 == 0; }

inline void begin_products() {}

inline void commit_products() {
  auto& own = host::thread();
  own.groups.push_back(std::move(own.issued));
  own.issued.clear();
  if (own.groups.size() > 1 || host::hopper().chance() % 4) return;
  for (auto& issue : own.groups.back()) host::compute(issue), issue.element = nullptr;
}

template <int OPEN>
inline void await_products() {
  auto& own = host::thread();
  // Others run on meanwhile, over what is still to be read if they may.
  if (own.groups.size() > OPEN && host::hopper().chance() % 4 == 0) {
    for (int i = 0; i < 6; ++i) host::yield();
  }
  for (; own.groups.size() > OPEN; own.groups.pop_front()) {
    for (const auto& issue : own.groups.front()) {
      if (issue.element) host::compute(issue);
      host::retire(issue);
    }
  }
  host::wait(host::block().warps[host::current->linear / 32].barrier, 32);  // a warp is done as one
}

template <int COUNT>
inline void settle(float (&values)[COUNT]) {
  if (host::thread().flying.count(values)) host::fail("sums of a product are read before it is done");
}

inline float rough_tanh(float value) { return std::tanh(value); }

template <typename T, int N>
struct Product {
  static void run(float (&d)[N / 2], uint64_t left, uint64_t right, int add) {
    host::issue({d, N / 2, -1, add != 0, left, right, host::element_of<T>});
  }
};

template <typename T, int N>
struct Weighted {
  static void run(float (&d)[N / 2], uint32_t a, uint32_t b, uint32_t c, uint32_t e, uint64_t right) {
    auto& own = host::thread();
    own.rows.push_back({a, b, c, e});
    host::issue({d, N / 2, int(own.rows.size()) - 1, true, 0, right, host::element_of<T>});
  }
};

}  // namespace ejkernel
