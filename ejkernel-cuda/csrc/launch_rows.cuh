// From a wish for threads and blocks per row to a launch of the kernels of rows.cuh.
#pragma once

#include <bit>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "launch.h"
#include "rows.cuh"

namespace ejkernel {

constexpr int64_t kMaxWidth = int64_t{1} << 30;
constexpr int64_t kAnyParts = int64_t{1} << 40;
constexpr int64_t kMaxAcross = 65535;  // blocks along a grid's second axis

// What a config asks for; no stages, for rows that go straight to registers.
struct Knobs {
  int64_t threads, cluster, stages;
};

// Threads of a block and blocks that share a row, packs per thread, and rows in shared memory; items = 0 when a row is
// too wide.
struct Plan {
  int threads, cluster, items, stages;
};

// As many packs per thread, `most` at most, as the wish for threads leaves to it, then no more threads than those packs need. A
// cluster's threads hold all packs they can.
inline Plan MakePlan(int64_t packs, Knobs knobs, int most = kMaxItems) {
  const int64_t share = (packs + knobs.cluster - 1) / knobs.cluster;
  int64_t items = knobs.cluster > 1 ? kMaxItems : 1;
  while (items < most && items * knobs.threads < share) items *= 2;
  int64_t threads = std::max<int64_t>((share + items - 1) / items, knobs.cluster > 1 ? kLeastShared : 1);
  threads = threads > 32 ? (threads + 31) / 32 * 32 : std::bit_ceil(uint64_t(threads));
  return {int(threads), int(knobs.cluster), threads > kMaxThreads ? 0 : int(items), int(knobs.stages)};
}

inline bool IsPowerUpTo(int64_t value, int64_t most) { return value >= 1 && value <= most && (value & (value - 1)) == 0; }

inline ffi::Error CheckKnobs(const char* operation, Knobs knobs, int64_t least_stages) {
  if (!IsPowerUpTo(knobs.threads, kMaxThreads))
    return Invalid(operation, "threads must be a power of two up to 512, got " + std::to_string(knobs.threads));
  if (!IsPowerUpTo(knobs.cluster, kMaxCluster))
    return Invalid(operation, "cluster must be a power of two up to 16, got " + std::to_string(knobs.cluster));
  if (knobs.stages < least_stages || knobs.stages > kMaxStages) {
    return Invalid(operation,
                   "stages must be " + std::to_string(least_stages) + " ... 8, got " + std::to_string(knobs.stages));
  }
  return ffi::Error::Success();
}

inline int64_t DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// How many workers, blocks or clusters of them, the device runs at once; for clusters 0 where it, or the code that was loaded
// for it, has none. Asked once for each device and launch; allows the kernel so much shared memory, too.
template <typename Kernel>
int64_t ResidentWorkers(Kernel kernel, dim3 block, int64_t shared_bytes, int cluster) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, unsigned, int64_t, int>, int64_t> answers;
  int device = 0;
  cudaGetDevice(&device);
  const void* function = reinterpret_cast<const void*>(kernel);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = answers.try_emplace({function, device, block.x * block.y, shared_bytes, cluster}, 0);
  if (!is_new) return at->second;
  if (shared_bytes) {  // else all of it is cache, where what threads ask for arrives
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         int(DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes));
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  int found = 0;
  if (cluster == 1) {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, int(block.x * block.y), size_t(shared_bytes));
    return at->second = std::max(1, found) * std::max<int64_t>(1, DeviceAttribute(cudaDevAttrMultiProcessorCount));
  }
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    Launch launch(nullptr, cluster, block, shared_bytes, cluster);
    if (cudaOccupancyMaxActiveClusters(&found, kernel, &launch.config) != cudaSuccess) found = 0;
    cudaGetLastError();  // a size that the device refuses is no error of the launch that follows
  }
  return at->second = found;
}

template <class Op, int ITEMS, int LANES, int WHOLE = 0>
ffi::Error LaunchDirect(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, int threads) {
  constexpr int64_t kRows = kRowsOfBlock<ITEMS, LANES>;
  walk.parts = (walk.rows_per_group + kRows - 1) / kRows;
  dim3 grid(unsigned(walk.parts), unsigned(groups));
  if (groups > kMaxAcross) std::swap(grid.x, grid.y);  // of no more than kMaxRows rows, parts are few then
  direct_rows<Op, ITEMS, LANES, WHOLE><<<grid, threads, 0, stream>>>(op, walk);
  return CheckLaunch(operation, "rows through registers");
}

// Where a call has such rows.
template <class Op, int ITEMS, int LANES>
ffi::Error LaunchPlain(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t packs, bool& done) {
  constexpr int64_t kRows = kRowsOfBlock<ITEMS, LANES>;
  if (done || packs != ITEMS * LANES || walk.rows_per_group < kRows) return ffi::Error::Success();
  walk.parts = (walk.rows_per_group + kRows - 1) / kRows;
  plain_rows<Op, ITEMS, LANES><<<unsigned(walk.parts), kDirectBlock, 0, stream>>>(op, int(walk.rows_per_group));
  done = true;
  return CheckLaunch(operation, "plain rows");
}

// By kernels that there are for plain calls.
template <class Op>
ffi::Error LaunchPlain(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t packs, bool& done) {
  EJKERNEL_TRY((LaunchPlain<Op, 1, 4>(operation, stream, op, walk, packs, done)));
  EJKERNEL_TRY((LaunchPlain<Op, 1, 8>(operation, stream, op, walk, packs, done)));
  EJKERNEL_TRY((LaunchPlain<Op, 1, 16>(operation, stream, op, walk, packs, done)));
  EJKERNEL_TRY((LaunchPlain<Op, 1, 32>(operation, stream, op, walk, packs, done)));
  if constexpr (Op::kWhole) {
    EJKERNEL_TRY((LaunchPlain<Op, 2, 32>(operation, stream, op, walk, packs, done)));
    EJKERNEL_TRY((LaunchPlain<Op, 4, 32>(operation, stream, op, walk, packs, done)));
  }
  return ffi::Error::Success();
}

// By as few threads as leave each kNarrowItems packs of a row, or by all of a warp; wider rows by several warps.
template <class Op>
ffi::Error LaunchDirect(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, Plan plan,
                        int64_t packs) {
  if constexpr (Op::kPlainRows) {
    bool done = false;
    if (groups == 1 && op.is_plain()) EJKERNEL_TRY(LaunchPlain(operation, stream, op.plain(), walk, packs, done));
    if (done) return ffi::Error::Success();
  }
  const auto launch = [&]<int ITEMS, int LANES>() {
    const int threads = LANES ? kDirectBlock : int((packs + 32 * ITEMS - 1) / (32 * ITEMS) * 32);
    return LaunchDirect<Op, ITEMS, LANES>(operation, stream, op, walk, groups, threads);
  };
  constexpr int ITEMS = Op::kNarrowItems;
  if (packs <= ITEMS) return launch.template operator()<ITEMS, 1>();
  if (packs <= ITEMS * 2) return launch.template operator()<ITEMS, 2>();
  if (packs <= ITEMS * 4) return launch.template operator()<ITEMS, 4>();
  if (packs <= ITEMS * 8) return launch.template operator()<ITEMS, 8>();
  if (packs <= ITEMS * 16) return launch.template operator()<ITEMS, 16>();
  if (packs <= ITEMS * 32) return launch.template operator()<ITEMS, 32>();
  if constexpr (ITEMS < 2) {
    if (packs <= 64) return launch.template operator()<2, 32>();
  }
  if constexpr (ITEMS < 4) {
    if (packs <= 128) return launch.template operator()<4, 32>();
  }
  if constexpr (Op::kWhole) {
    const auto whole = [&]<int EACH, int THREADS>() {
      return LaunchDirect<Op, EACH, 0, THREADS>(operation, stream, op, walk, groups, THREADS);
    };
    if (packs == plan.items * plan.threads) {
      if (packs == 8 * 512) return whole.template operator()<8, 512>();
      if (packs == 4 * 512) return whole.template operator()<4, 512>();
      if (packs == 4 * 256) return whole.template operator()<4, 256>();
    }
  }
  if constexpr (Op::kMostDirect > kMaxItems) {
    if (plan.items > kMaxItems) return launch.template operator()<Op::kMostDirect, 0>();
  }
  return plan.items == 4 ? launch.template operator()<4, 0>() : launch.template operator()<2, 0>();
}

template <class Op, int ITEMS, bool CLUSTER = false, bool WHOLE = false>
ffi::Error LaunchStreamed(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, Plan plan,
                          bool& done) {
  auto kernel = [] {
    if constexpr (CLUSTER) return shared_rows<Op, ITEMS, WHOLE>;
    else return streamed_rows<Op, ITEMS>;
  }();
  const dim3 block(plan.threads, plan.threads > 32 ? 1 : kSmallBlock / plan.threads);
  const int64_t stage = int64_t(sizeof(typename Op::T)) * Op::N * ITEMS * Op::kStreams * block.x * block.y;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  const int stages = int(std::clamp<int64_t>(room / stage, 1, std::max(plan.stages, CLUSTER ? 2 : 1)));
  const int64_t resident = ResidentWorkers(kernel, block, stages * stage, plan.cluster);
  if (resident == 0) return ffi::Error::Success();
  walk.parts = std::min(walk.parts, std::max<int64_t>(1, resident / groups));
  walk.parts = std::min(walk.parts, (walk.rows_per_group + block.y - 1) / block.y);
  const int64_t blocks = groups * walk.parts * plan.cluster;
  if (blocks > kMaxGrid) return Invalid(operation, std::to_string(blocks) + " blocks are more than a grid has");
  Launch launch(stream, blocks, block, stages * stage, plan.cluster);
  cudaLaunchKernelEx(&launch.config, kernel, op, walk, stages);
  done = true;
  return CheckLaunch(operation, "rows through shared memory");
}

template <class Op>
ffi::Error LaunchShared(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, Plan plan,
                        bool& done) {
  if constexpr (Op::kWhole) {
    if (op.width == int64_t{plan.cluster} * plan.threads * kMaxItems * Op::N)
      return LaunchStreamed<Op, kMaxItems, true, true>(operation, stream, op, walk, groups, plan, done);
  }
  return LaunchStreamed<Op, kMaxItems, true>(operation, stream, op, walk, groups, plan, done);
}

// By an Op that keeps parameters as they are stored, where it has such a form.
template <class Op>
ffi::Error LaunchClusters(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, Plan plan,
                          bool& done) {
  if constexpr (requires { op.plain().kKeepsStored; }) {
    using Plain = decltype(op.plain());
    if constexpr (Plain::kKeepsStored) {
      if (op.is_plain()) return LaunchShared<Plain>(operation, stream, op.plain(), walk, groups, plan, done);
    }
  }
  return LaunchShared(operation, stream, op, walk, groups, plan, done);
}

// Where a row leaves the threads of so many blocks what this Op has such a kernel for.
template <class Op>
ffi::Error LaunchDirectClusters(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, int cluster,
                                int64_t packs, bool& done) {
  constexpr int ITEMS = Op::kMostShared;
  const int64_t warps = (packs + 32 * ITEMS * cluster - 1) / (32 * ITEMS * cluster);
  const int threads = Op::kSharedThreads ? Op::kSharedThreads : std::max(int(warps) * 32, kLeastShared);
  const bool fits = Op::kSharesParts ? warps <= kMaxWarps : packs == int64_t{threads} * ITEMS * cluster;
  if (!fits || !op.shares_direct()) return ffi::Error::Success();
  const auto kernel = direct_shared_rows<Op, ITEMS, Op::kSharedThreads>;
  const int64_t blocks = walk.rows_per_group * cluster;
  if (groups > kMaxAcross || blocks > kMaxGrid || ResidentWorkers(kernel, dim3(threads), 0, cluster) == 0)
    return ffi::Error::Success();
  walk.parts = walk.rows_per_group;
  Launch launch(stream, blocks, dim3(threads), 0, cluster);
  launch.config.gridDim.y = unsigned(groups);
  cudaLaunchKernelEx(&launch.config, kernel, op, walk);
  done = true;
  return CheckLaunch(operation, "rows through registers of a cluster");
}

inline Number NumberOf(ffi::DataType type) {
  return type == ffi::F32 ? Number::kFloat : type == ffi::F16 ? Number::kHalf : Number::kBfloat16;
}

// Of `parts` partial sums for each row of `total`.
inline Parts PartsOf(Floats partial, Array total, int64_t parts) {
  return {partial.typed_data(), total.untyped_data(), NumberOf(total.element_type()), total.dimensions()[0], parts};
}

template <int N>
ffi::Error LaunchSumOf(const char* operation, cudaStream_t stream, Parts first, Parts second, int64_t width) {
  const int lanes = lanes_of_sum<N>(std::max(first.parts, second.parts));
  const int64_t blocks = (first.groups + second.groups) * ((width + lanes * N - 1) / (lanes * N));
  if (blocks == 0) return ffi::Error::Success();
  if (blocks > kMaxGrid) return Invalid(operation, "too many parameters");
  sum_parts<N><<<unsigned(blocks), kSumThreads, 0, stream>>>(first, second, width, lanes);
  return CheckLaunch(operation, "sum of partial gradients");
}

inline ffi::Error LaunchSum(const char* operation, cudaStream_t stream, Parts first, Parts second, int64_t width) {
  const bool packed = width % 4 == 0 && Aligned(first.partial) && Aligned(second.partial);
  return packed ? LaunchSumOf<4>(operation, stream, first, second, width)
                : LaunchSumOf<1>(operation, stream, first, second, width);
}

// Run the Op over `groups` groups of rows by up to `walk.parts` workers each; afterwards that is how many there were. `walked`
// says that rows were too wide, or too many, and `Op::walk` ran.
template <class Op>
ffi::Error LaunchRows(const char* operation, cudaStream_t stream, const Op& op, Walk& walk, int64_t groups, Knobs knobs,
                      bool& walked) {
  const int64_t packs = (op.width + Op::N - 1) / Op::N;
  const bool countable = groups * walk.rows_per_group <= kMaxRows;
  Plan plan = countable ? MakePlan(packs, knobs) : Plan{};
  bool done = false;
  if constexpr (Op::N > 1 && Op::kMostShared > 0) {
    if (countable && knobs.cluster > 1 && knobs.stages == 0)
      EJKERNEL_TRY(LaunchDirectClusters(operation, stream, op, walk, groups, int(knobs.cluster), packs, done));
  }
  if constexpr (Op::N > 1) {
    if (!done && plan.cluster > 1 && plan.items) EJKERNEL_TRY(LaunchClusters(operation, stream, op, walk, groups, plan, done));
  }
  knobs.cluster = 1;
  if (!done && plan.cluster > 1) plan = MakePlan(packs, knobs);
  constexpr Ways kWays = Op::N > 1 ? Op::kWays : Ways::kStreamed;
  if constexpr (kWays != Ways::kStreamed) {
    if (!done && countable && (knobs.stages == 0 || kWays == Ways::kDirect)) {
      const Plan direct = MakePlan(packs, knobs, op.most_direct());
      if (direct.items) return LaunchDirect(operation, stream, op, walk, groups, direct, packs);
    }
  }
  if constexpr (kWays != Ways::kDirect) {
    if (!done && plan.items == 1) EJKERNEL_TRY((LaunchStreamed<Op, 1>(operation, stream, op, walk, groups, plan, done)));
    if (!done && plan.items == 2) EJKERNEL_TRY((LaunchStreamed<Op, 2>(operation, stream, op, walk, groups, plan, done)));
    if (!done && plan.items == 4) EJKERNEL_TRY((LaunchStreamed<Op, 4>(operation, stream, op, walk, groups, plan, done)));
  }
  walked = !done;
  if (done) return ffi::Error::Success();
  const int64_t rows = groups * walk.rows_per_group;
  const int64_t blocks = std::min(rows, ResidentWorkers(walked_rows<Op>, dim3(kMaxThreads), 0, 1));
  walked_rows<Op><<<unsigned(blocks), kMaxThreads, 0, stream>>>(op, rows);
  return CheckLaunch(operation, "wide rows");
}

}  // namespace ejkernel
