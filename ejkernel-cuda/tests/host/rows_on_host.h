// Rows of any operation on a host, for float32 (kind 0) and bfloat16 (kind 1), with launch shapes that tests choose.
#pragma once

#include "export_on_host.h"
#include "rows.cuh"

using namespace ejkernel;

namespace {

struct Shape {
  int64_t rows_per_group, groups, workers;
  int threads, items, cluster, stages;  // items 0: multi-pass rows
};

template <class Op, int ITEMS, bool CLUSTER = false>
void streamed(const Op& op, const Shape& shape) {
  const unsigned y = shape.threads > 32 ? 1 : unsigned(kSmallBlock / shape.threads);
  const Rows split{shape.rows_per_group, shape.workers};
  const int stages = CLUSTER ? std::max(shape.stages, 2) : shape.stages;
  const size_t stage = sizeof(typename Op::T) * Op::N * ITEMS * Op::kStreams * shape.threads * y;
  host::launch(
      unsigned(shape.groups * shape.workers * shape.cluster), {unsigned(shape.threads), y}, unsigned(shape.cluster),
      [&] {
        if (!CLUSTER) return pipelined_rows<Op, ITEMS>(op, split, stages);
        if constexpr (Op::kFullRows) {
          if (op.width == shape.cluster * shape.threads * ITEMS * Op::N)
            return cluster_rows<Op, ITEMS, true>(op, split, stages);
        }
        cluster_rows<Op, ITEMS, false>(op, split, stages);
      },
      stages * stage);
}

// Run the kernel for plain rows that so many threads hold whole, if there is one; whether there is.
template <class Op, int ITEMS, int LANES>
bool plain(const Op& op, const Shape& shape) {
  if constexpr (Op::kPlainRows && LANES >= 4 && (ITEMS == 1 || (Op::kFullRows && LANES == 32))) {
    constexpr int64_t kRows = kRowsPerBlock<ITEMS, LANES>;
    const bool full = op.width == ITEMS * LANES * Op::N && shape.groups == 1 && shape.rows_per_group >= kRows;
    if (!full || !op.is_plain()) return false;
    const int rows = int(shape.rows_per_group);
    host::launch(unsigned((rows + kRows - 1) / kRows), {kRegisterBlock, 1}, 1,
                 [&] { plain_rows<decltype(op.plain()), ITEMS, LANES>(op.plain(), rows); });
    return true;
  }
  return false;
}

template <class Op, int ITEMS, int LANES, int FULL = 0>
void direct(const Op& op, const Shape& shape) {
  if constexpr (Op::kPath != RowPath::kPipelined) {
    if (plain<Op, ITEMS, LANES>(op, shape)) return;
    if constexpr (Op::kFullRows && LANES == 0 && FULL == 0) {
      constexpr int kThreads = 64;
      if (shape.threads == kThreads && op.width == ITEMS * kThreads * Op::N)
        return direct<Op, ITEMS, LANES, kThreads>(op, shape);
    }
    constexpr int64_t kRows = kRowsPerBlock<ITEMS, LANES>;
    const Rows split{shape.rows_per_group, (shape.rows_per_group + kRows - 1) / kRows};
    const unsigned threads = unsigned(LANES ? kRegisterBlock : shape.threads);
    host::Index grid{unsigned(split.workers), unsigned(shape.groups)};
    if (shape.workers % 2) std::swap(grid.x, grid.y);  // workers have no other meaning here
    host::launch(grid, {threads, 1}, 1, [&] { register_rows<Op, ITEMS, LANES, FULL>(op, split); });
  }
}

// Cluster register rows.
template <class Op>
void direct_shared(const Op& op, const Shape& shape) {
  constexpr int kThreads = Op::kClusterThreads ? 64 : 0;  // fewer than on a GPU: a fiber each
  const Rows split{shape.rows_per_group, shape.rows_per_group};
  host::launch(host::Index{unsigned(shape.rows_per_group * shape.cluster), unsigned(shape.groups)},
               {unsigned(shape.threads), 1}, unsigned(shape.cluster),
               [&] { cluster_register_rows<Op, Op::kMaxClusterItems, kThreads>(op, split); });
}

// Register rows of a warp.
template <class Op, int ITEMS>
void narrow(const Op& op, const Shape& shape) {
  switch (shape.threads) {
    case 1: return direct<Op, ITEMS, 1>(op, shape);
    case 2: return direct<Op, ITEMS, 2>(op, shape);
    case 4: return direct<Op, ITEMS, 4>(op, shape);
    case 8: return direct<Op, ITEMS, 8>(op, shape);
    case 16: return direct<Op, ITEMS, 16>(op, shape);
    case 32: return direct<Op, ITEMS, 32>(op, shape);
    default: return direct<Op, ITEMS, 0>(op, shape);
  }
}

template <class Op>
void rows(const Op& op, const Shape& shape) {
  if (shape.items == 0) {
    host::launch(unsigned(shape.workers), {unsigned(shape.threads), 1}, 1,
                 [&] { multipass_rows<Op>(op, shape.rows_per_group * shape.groups); });
  } else if (Op::kMaxClusterItems > 0 && shape.cluster > 1 && shape.items == Op::kMaxClusterItems) {
    if constexpr (Op::kMaxClusterItems > 0 && Op::N > 1) direct_shared(op, shape);
  } else if (shape.cluster > 1) {
    if constexpr (requires { op.plain().kKeepsStored; }) {
      if constexpr (decltype(op.plain())::kKeepsStored) {
        if (op.is_plain()) return streamed<decltype(op.plain()), kMaxItems, true>(op.plain(), shape);
      }
    }
    streamed<Op, kMaxItems, true>(op, shape);
  } else if (Op::N > 1 && Op::kPath != RowPath::kPipelined && (shape.stages == 0 || Op::kPath == RowPath::kRegisters)) {
    if constexpr (Op::N > 1 && Op::kPath != RowPath::kPipelined) {
      if constexpr (Op::kFullRows || Op::kMaxRegisterItems > kMaxItems) {
        if (shape.items > kMaxItems) return direct<Op, 8, 0>(op, shape);
      }
      shape.items == 1 ? narrow<Op, 1>(op, shape) : shape.items == 2 ? narrow<Op, 2>(op, shape) : narrow<Op, 4>(op, shape);
    }
  } else if (shape.items == 1) {
    streamed<Op, 1>(op, shape);
  } else if (shape.items == 2) {
    streamed<Op, 2>(op, shape);
  } else {
    streamed<Op, 4>(op, shape);
  }
}

template <typename Run>
void typed(int kind, bool packed, Run run) {
  if (kind == 0) return packed ? run.template operator()<float, 4>() : run.template operator()<float, 1>();
  return packed ? run.template operator()<__nv_bfloat16, 8>() : run.template operator()<__nv_bfloat16, 1>();
}

}  // namespace
