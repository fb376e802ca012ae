// Launches of the kernels of rows.cuh from a config's threads, cluster and stages.
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
constexpr int64_t kAnyWorkers = int64_t{1} << 40;
constexpr int64_t kMaxGridY = 65535;  // blocks along a grid's y axis

// Config knobs; stages = 0 for register rows.
struct Knobs {
  int64_t threads, cluster, stages;
};

// Threads of a block, blocks of a cluster, packs per thread, and stages in shared memory; items = 0 if a row is too wide.
struct Plan {
  int threads, cluster, items, stages;
};

// As many packs per thread, up to `most`, as the requested threads leave, then no more threads than those packs need. The
// threads of a cluster hold as many packs as they can.
inline Plan MakePlan(int64_t packs, Knobs knobs, int most = kMaxItems) {
  const int64_t share = (packs + knobs.cluster - 1) / knobs.cluster;
  int64_t items = knobs.cluster > 1 ? kMaxItems : 1;
  while (items < most && items * knobs.threads < share) items *= 2;
  int64_t threads = std::max<int64_t>((share + items - 1) / items, knobs.cluster > 1 ? kMinClusterThreads : 1);
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
    return Invalid(operation, "stages must be " + std::to_string(least_stages) + " ... 8, got " + std::to_string(knobs.stages));
  }
  return ffi::Error::Success();
}

inline int64_t DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Resident workers (blocks or clusters) of the device; for clusters 0 if the device or the loaded code has none. Queried once
// per device and launch; also raises the kernel's shared memory limit.
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
  if (shared_bytes) {  // without shared memory, all of it serves as L1
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
    cudaGetLastError();  // a cluster size that the device refuses must not fail the launch that follows
  }
  return at->second = found;
}

template <class Op, int ITEMS, int LANES, int FULL = 0>
ffi::Error LaunchRegisterRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups,
                              int threads) {
  constexpr int64_t kRows = kRowsPerBlock<ITEMS, LANES>;
  split.workers = (split.rows_per_group + kRows - 1) / kRows;
  dim3 grid(unsigned(split.workers), unsigned(groups));
  if (groups > kMaxGridY) std::swap(grid.x, grid.y);  // with at most kMaxRows rows there are few workers then
  register_rows<Op, ITEMS, LANES, FULL><<<grid, threads, 0, stream>>>(op, split);
  return CheckLaunch(operation, "register rows");
}

// If the call has such rows.
template <class Op, int ITEMS, int LANES>
ffi::Error LaunchPlainRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t packs, bool& done) {
  constexpr int64_t kRows = kRowsPerBlock<ITEMS, LANES>;
  if (done || packs != ITEMS * LANES || split.rows_per_group < kRows) return ffi::Error::Success();
  split.workers = (split.rows_per_group + kRows - 1) / kRows;
  plain_rows<Op, ITEMS, LANES><<<unsigned(split.workers), kRegisterBlock, 0, stream>>>(op, int(split.rows_per_group));
  done = true;
  return CheckLaunch(operation, "plain rows");
}

// With the kernels for plain calls.
template <class Op>
ffi::Error LaunchPlainRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t packs, bool& done) {
  EJKERNEL_TRY((LaunchPlainRows<Op, 1, 4>(operation, stream, op, split, packs, done)));
  EJKERNEL_TRY((LaunchPlainRows<Op, 1, 8>(operation, stream, op, split, packs, done)));
  EJKERNEL_TRY((LaunchPlainRows<Op, 1, 16>(operation, stream, op, split, packs, done)));
  EJKERNEL_TRY((LaunchPlainRows<Op, 1, 32>(operation, stream, op, split, packs, done)));
  if constexpr (Op::kFullRows) {
    EJKERNEL_TRY((LaunchPlainRows<Op, 2, 32>(operation, stream, op, split, packs, done)));
    EJKERNEL_TRY((LaunchPlainRows<Op, 4, 32>(operation, stream, op, split, packs, done)));
  }
  return ffi::Error::Success();
}

// As few threads per row as leave each kNarrowItems packs, or a whole warp; several warps for wider rows.
template <class Op>
ffi::Error LaunchRegisterRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups, Plan plan,
                              int64_t packs) {
  if constexpr (Op::kPlainRows) {
    bool done = false;
    if (groups == 1 && op.is_plain()) EJKERNEL_TRY(LaunchPlainRows(operation, stream, op.plain(), split, packs, done));
    if (done) return ffi::Error::Success();
  }
  const auto launch = [&]<int ITEMS, int LANES>() {
    const int threads = LANES ? kRegisterBlock : int((packs + 32 * ITEMS - 1) / (32 * ITEMS) * 32);
    return LaunchRegisterRows<Op, ITEMS, LANES>(operation, stream, op, split, groups, threads);
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
  if constexpr (Op::kFullRows) {
    const auto full = [&]<int EACH, int THREADS>() {
      return LaunchRegisterRows<Op, EACH, 0, THREADS>(operation, stream, op, split, groups, THREADS);
    };
    if (packs == plan.items * plan.threads) {
      if (packs == 8 * 512) return full.template operator()<8, 512>();
      if (packs == 4 * 512) return full.template operator()<4, 512>();
      if (packs == 4 * 256) return full.template operator()<4, 256>();
    }
  }
  if constexpr (Op::kMaxRegisterItems > kMaxItems) {
    if (plan.items > kMaxItems) return launch.template operator()<Op::kMaxRegisterItems, 0>();
  }
  return plan.items == 4 ? launch.template operator()<4, 0>() : launch.template operator()<2, 0>();
}

template <class Op, int ITEMS, bool CLUSTER = false, bool FULL = false>
ffi::Error LaunchPipelined(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups, Plan plan,
                           bool& done) {
  auto kernel = [] {
    if constexpr (CLUSTER)
      return cluster_rows<Op, ITEMS, FULL>;
    else
      return pipelined_rows<Op, ITEMS>;
  }();
  const dim3 block(plan.threads, plan.threads > 32 ? 1 : kSmallBlock / plan.threads);
  const int64_t stage = int64_t(sizeof(typename Op::T)) * Op::N * ITEMS * Op::kStreams * block.x * block.y;
  const int64_t room = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratchBytes;
  const int stages = int(std::clamp<int64_t>(room / stage, 1, std::max(plan.stages, CLUSTER ? 2 : 1)));
  const int64_t resident = ResidentWorkers(kernel, block, stages * stage, plan.cluster);
  if (resident == 0) return ffi::Error::Success();
  split.workers = std::min(split.workers, std::max<int64_t>(1, resident / groups));
  split.workers = std::min(split.workers, (split.rows_per_group + block.y - 1) / block.y);
  const int64_t blocks = groups * split.workers * plan.cluster;
  if (blocks > kMaxGrid) return Invalid(operation, std::to_string(blocks) + " blocks exceed the grid limit");
  Launch launch(stream, blocks, block, stages * stage, plan.cluster);
  cudaLaunchKernelEx(&launch.config, kernel, op, split, stages);
  done = true;
  return CheckLaunch(operation, "pipelined rows");
}

template <class Op>
ffi::Error LaunchClusterRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups, Plan plan,
                             bool& done) {
  if constexpr (Op::kFullRows) {
    if (op.width == int64_t{plan.cluster} * plan.threads * kMaxItems * Op::N)
      return LaunchPipelined<Op, kMaxItems, true, true>(operation, stream, op, split, groups, plan, done);
  }
  return LaunchPipelined<Op, kMaxItems, true>(operation, stream, op, split, groups, plan, done);
}

// With an Op that keeps parameters as stored, if it has such a form.
template <class Op>
ffi::Error LaunchClusters(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups, Plan plan,
                          bool& done) {
  if constexpr (requires { op.plain().kKeepsStored; }) {
    using Plain = decltype(op.plain());
    if constexpr (Plain::kKeepsStored) {
      if (op.is_plain()) return LaunchClusterRows<Plain>(operation, stream, op.plain(), split, groups, plan, done);
    }
  }
  return LaunchClusterRows(operation, stream, op, split, groups, plan, done);
}

// If this Op has a register kernel for a cluster of so many blocks per row.
template <class Op>
ffi::Error LaunchClusterRegisterRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups,
                                     int cluster, int64_t packs, bool& done) {
  constexpr int ITEMS = Op::kMaxClusterItems;
  const int64_t warps = (packs + 32 * ITEMS * cluster - 1) / (32 * ITEMS * cluster);
  const int threads = Op::kClusterThreads ? Op::kClusterThreads : std::max(int(warps) * 32, kMinClusterThreads);
  const bool fits = Op::kRaggedClusters ? warps <= kMaxWarps : packs == int64_t{threads} * ITEMS * cluster;
  if (!fits || !op.supports_cluster_registers()) return ffi::Error::Success();
  const auto kernel = cluster_register_rows<Op, ITEMS, Op::kClusterThreads>;
  const int64_t blocks = split.rows_per_group * cluster;
  if (groups > kMaxGridY || blocks > kMaxGrid || ResidentWorkers(kernel, dim3(threads), 0, cluster) == 0)
    return ffi::Error::Success();
  split.workers = split.rows_per_group;
  Launch launch(stream, blocks, dim3(threads), 0, cluster);
  launch.config.gridDim.y = unsigned(groups);
  cudaLaunchKernelEx(&launch.config, kernel, op, split);
  done = true;
  return CheckLaunch(operation, "cluster register rows");
}

inline ScalarType ScalarTypeOf(ffi::DataType type) {
  return type == ffi::F32 ? ScalarType::kFloat : type == ffi::F16 ? ScalarType::kHalf : ScalarType::kBfloat16;
}

// The reduction of `partials` partial sums into each row of `total`.
inline PartialSums PartialSumsOf(Floats partial, Array total, int64_t partials) {
  return {partial.typed_data(), total.untyped_data(), ScalarTypeOf(total.element_type()), total.dimensions()[0], partials};
}

template <int N>
ffi::Error LaunchSumOf(const char* operation, cudaStream_t stream, PartialSums first, PartialSums second, int64_t width) {
  const int lanes = sum_lanes<N>(std::max(first.partials, second.partials));
  const int64_t blocks = (first.groups + second.groups) * ((width + lanes * N - 1) / (lanes * N));
  if (blocks == 0) return ffi::Error::Success();
  if (blocks > kMaxGrid) return Invalid(operation, "too many parameters");
  sum_partials<N><<<unsigned(blocks), kSumThreads, 0, stream>>>(first, second, width, lanes);
  return CheckLaunch(operation, "reduction of partial sums");
}

inline ffi::Error LaunchSum(const char* operation, cudaStream_t stream, PartialSums first, PartialSums second, int64_t width) {
  const bool packed = width % 4 == 0 && Aligned(first.partial) && Aligned(second.partial);
  return packed ? LaunchSumOf<4>(operation, stream, first, second, width)
                : LaunchSumOf<1>(operation, stream, first, second, width);
}

// Run the Op over `groups` groups of rows with up to `split.workers` workers each, and return their number there.
// `multipass` is set if rows were too wide or too many, and `Op::multipass` ran.
template <class Op>
ffi::Error LaunchRows(const char* operation, cudaStream_t stream, const Op& op, Rows& split, int64_t groups, Knobs knobs,
                      bool& multipass) {
  const int64_t packs = (op.width + Op::N - 1) / Op::N;
  const bool countable = groups * split.rows_per_group <= kMaxRows;
  Plan plan = countable ? MakePlan(packs, knobs) : Plan{};
  bool done = false;
  if constexpr (Op::N > 1 && Op::kMaxClusterItems > 0) {
    if (countable && knobs.cluster > 1 && knobs.stages == 0)
      EJKERNEL_TRY(LaunchClusterRegisterRows(operation, stream, op, split, groups, int(knobs.cluster), packs, done));
  }
  if constexpr (Op::N > 1) {
    if (!done && plan.cluster > 1 && plan.items) EJKERNEL_TRY(LaunchClusters(operation, stream, op, split, groups, plan, done));
  }
  knobs.cluster = 1;
  if (!done && plan.cluster > 1) plan = MakePlan(packs, knobs);
  constexpr RowPath kPath = Op::N > 1 ? Op::kPath : RowPath::kPipelined;
  if constexpr (kPath != RowPath::kPipelined) {
    if (!done && countable && (knobs.stages == 0 || kPath == RowPath::kRegisters)) {
      const Plan direct = MakePlan(packs, knobs, op.max_register_items());
      if (direct.items) return LaunchRegisterRows(operation, stream, op, split, groups, direct, packs);
    }
  }
  if constexpr (kPath != RowPath::kRegisters) {
    if (!done && plan.items == 1) EJKERNEL_TRY((LaunchPipelined<Op, 1>(operation, stream, op, split, groups, plan, done)));
    if (!done && plan.items == 2) EJKERNEL_TRY((LaunchPipelined<Op, 2>(operation, stream, op, split, groups, plan, done)));
    if (!done && plan.items == 4) EJKERNEL_TRY((LaunchPipelined<Op, 4>(operation, stream, op, split, groups, plan, done)));
  }
  multipass = !done;
  if (done) return ffi::Error::Success();
  const int64_t rows = groups * split.rows_per_group;
  const int64_t blocks = std::min(rows, ResidentWorkers(multipass_rows<Op>, dim3(kMaxThreads), 0, 1));
  multipass_rows<Op><<<unsigned(blocks), kMaxThreads, 0, stream>>>(op, rows);
  return CheckLaunch(operation, "multi-pass rows");
}

}  // namespace ejkernel
