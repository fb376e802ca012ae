// The unchanged kernels on a host, for float32 (kind 0) and bfloat16 (kind 1), with launch shapes that tests choose.
#include "norm/kernels.cuh"
#include "paged_cache_update/kernels.cuh"
#include "qk_norm_rope/kernels.cuh"
#include "rope/kernels.cuh"
#include "softmax/kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace ejkernel;

namespace {

struct Shape {
  int64_t rows_per_group, groups, workers;
  int threads, items, cluster, stages;  // items 0: multi-pass rows
};

// norm::Parameter of any type.
struct Stored {
  const void* data;
  int64_t stride;  // in elements
  bool narrow;

  template <typename T>
  norm::Parameter<T> as() const {
    return {data, stride * int64_t(narrow ? sizeof(T) : sizeof(float)), narrow};
  }
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

// `which`: 0 rms_norm, 1 layer_norm, 2 add_rms_norm.
template <typename Run>
void norm_typed(int kind, bool packed, int which, Run run) {
  typed(kind, packed, [&]<typename T, int N>() {
    switch (which) {
      case 0: return run.template operator()<T, N, false, false>();
      case 1: return run.template operator()<T, N, true, false>();
      default: return run.template operator()<T, N, false, true>();
    }
  });
}

// The reduction of partial sums, as launched.
template <int N>
void sum_of(const PartialSums& first, const PartialSums& second, int64_t width) {
  const int lanes = sum_lanes<N>(std::max(first.partials, second.partials)), columns = lanes * N;
  host::launch(unsigned((first.groups + second.groups) * ((width + columns - 1) / columns)), {kSumThreads, 1}, 1,
               [&] { sum_partials<N>(first, second, width, lanes); });
}

void sum(const PartialSums& first, const PartialSums& second, int64_t width) {
  width % 4 ? sum_of<1>(first, second, width) : sum_of<4>(first, second, width);
}

}  // namespace

EXPORT void norm_forward(int kind, bool packed, int which, Shape shape, const void* x, const void* residual, Stored scale,
                         Stored offset, void* out, void* sum, float* mean, float* rstd, int64_t rows_per_batch, int width,
                         float epsilon, float scale_offset) {
  norm_typed(kind, packed, which, [&]<typename T, int N, bool CENTRED, bool ADDED>() {
    using Op = norm::Forward<T, N, CENTRED, ADDED>;
    const float unit = square_unit<T>(epsilon);
    const Op op{static_cast<const T*>(x),
                static_cast<const T*>(residual),
                scale.as<T>(),
                offset.as<T>(),
                static_cast<T*>(out),
                static_cast<T*>(sum),
                mean,
                rstd,
                rows_per_batch,
                width,
                1.f / width,
                unit,
                epsilon * unit * unit,
                scale_offset};
    rows(op, shape);
  });
}

EXPORT void norm_backward(int kind, bool packed, int which, Shape shape, const void* x, Stored scale, const float* mean,
                          const float* rstd, const void* grad, const void* grad_sum, void* d_x, void* d_scale, void* d_offset,
                          int scalar_type, float* partial_scale, float* partial_offset, int64_t rows_per_batch, int width,
                          float scale_offset) {
  norm_typed(kind, packed, which, [&]<typename T, int N, bool CENTRED, bool ADDED>() {
    using Op = norm::Backward<T, N, CENTRED, ADDED>;
    const Op op{static_cast<const T*>(x),
                scale.as<T>(),
                mean,
                rstd,
                static_cast<const T*>(grad),
                static_cast<const T*>(grad_sum),
                static_cast<T*>(d_x),
                partial_scale,
                partial_offset,
                rows_per_batch,
                width,
                1.f / width,
                scale_offset};
    rows(op, shape);
    const Rows split{shape.rows_per_group, shape.workers};
    if (shape.items == 0) {
      const unsigned tiles = unsigned((width + 63) / 64);
      host::launch(unsigned(tiles * shape.groups * shape.workers), {64, 1}, 1, [&] {
        norm::column_sums<T, CENTRED>(op.x, op.mean, op.rstd, op.grad, partial_scale, partial_offset, split, width);
      });
    }
  });
  const auto partials_of = [&](const float* partial, void* total) {
    return PartialSums{partial, total, ScalarType(scalar_type), total ? shape.groups : 0, shape.workers};
  };
  sum(partials_of(partial_scale, d_scale), partials_of(partial_offset, d_offset), width);
}

EXPORT void softmax_forward(int kind, bool packed, Shape shape, const void* x, softmax::Mask mask, void* out, int width,
                            float scale) {
  typed(kind, packed, [&]<typename T, int N>() {
    using Op = softmax::Forward<T, N>;
    rows(Op{static_cast<const T*>(x), mask, static_cast<T*>(out), width, scale}, shape);
  });
}

EXPORT void softmax_backward(int kind, bool packed, Shape shape, const void* out, const void* grad, softmax::Mask mask,
                             void* d_x, int width, float scale) {
  typed(kind, packed, [&]<typename T, int N>() {
    using Op = softmax::Backward<T, N>;
    rows(Op{static_cast<const T*>(out), static_cast<const T*>(grad), mask, static_cast<T*>(d_x), width, scale}, shape);
  });
}

namespace {

template <typename Run>
void heads_typed(int kind, bool interleaved, bool packed, Run run) {
  const auto choose = [&]<typename T>() {
    if (interleaved) return packed ? run.template operator()<T, true, true>() : run.template operator()<T, true, false>();
    return packed ? run.template operator()<T, false, true>() : run.template operator()<T, false, false>();
  };
  kind == 0 ? choose.template operator()<float>() : choose.template operator()<__nv_bfloat16>();
}

}  // namespace

namespace {

// `run.operator()<PER_PAIR, SPAN>()`.
template <int... SPANS, typename Run>
void spanned(bool per_pair, int span, Run run) {
  const auto choose = [&]<int SPAN>() {
    if (span != SPAN) return;
    per_pair ? run.template operator()<true, SPAN>() : run.template operator()<false, SPAN>();
  };
  (choose.template operator()<SPANS>(), ...);
}

// Partition the operands of a launch into spans; the number of blocks.
template <class Operand>
unsigned cut(rope::Operands<Operand>& operands, int span, unsigned rows) {
  unsigned blocks = 0;
  for (Operand& operand : operands.of) {
    operand.spans = rope::spans_of(operand.heads, span);
    blocks += (operand.spans.count + rows - 1) / rows;
    if (&operand == operands.of) operands.blocks = blocks;
  }
  return blocks;
}

struct Rotated {
  const void* x;
  void* out;
  rope::Heads heads;
};

struct Normalised {
  const void* x;
  qk_norm_rope::Parameter scale;
  void* out;
  float* rstd;
  rope::Heads heads;
};

}  // namespace

EXPORT uint32_t divided(uint32_t scalar_type, uint32_t by) { return divisor(by).divide(scalar_type); }

EXPORT void rope_rotate(int kind, bool interleaved, bool packed, unsigned lanes, unsigned threads, Rotated first,
                        Rotated second, rope::Angles angles, int span, bool inverse) {
  heads_typed(kind, interleaved, packed, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    rope::Operands<rope::Operand<T>> operands{};
    for (int i = 0; i < 2; ++i) {
      const Rotated& one = i ? second : first;
      operands.of[i] = {static_cast<const T*>(one.x), static_cast<T*>(one.out), one.heads};
    }
    const unsigned rows = threads / lanes, blocks = cut(operands, span, rows);
    spanned<1, 2, 4>(angles.per_pair, span, [&]<bool PER_PAIR, int SPAN>() {
      host::launch(blocks, {lanes, rows}, 1,
                   [&] { rope::rotate<T, INTERLEAVED, PACKED, PER_PAIR, SPAN>(operands, angles, inverse); });
    });
  });
}

EXPORT void rope_angle_gradients(int kind, bool interleaved, bool packed, unsigned lanes, const void* x, const void* grad,
                                 float* d_cos, float* d_sin, rope::Heads heads, bool shared, bool per_pair, bool add) {
  heads_typed(kind, interleaved, packed, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const unsigned y = unsigned(rope::kThreads) / lanes;
    host::launch(unsigned((shared ? 1 : heads.batch) * heads.length), {lanes, y}, 1, [&] {
      rope::angle_gradients<T, INTERLEAVED, PACKED>(static_cast<const T*>(x), static_cast<const T*>(grad), d_cos, d_sin, heads,
                                                    shared, per_pair, add, rope::Identity{});
    });
  });
}

EXPORT void qk_norm_rope_forward(int kind, bool interleaved, bool packed, unsigned lanes, unsigned threads, Normalised first,
                                 Normalised second, rope::Angles angles, int span, float epsilon, float scale_offset) {
  heads_typed(kind, interleaved, packed, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    rope::Operands<qk_norm_rope::Operand<T>> operands{};
    for (int i = 0; i < 2; ++i) {
      const Normalised& one = i ? second : first;
      operands.of[i] = {static_cast<const T*>(one.x), one.scale, static_cast<T*>(one.out), one.rstd, one.heads};
    }
    const unsigned rows = threads / lanes, blocks = cut(operands, span, rows);
    spanned<4, 8>(angles.per_pair, span, [&]<bool PER_PAIR, int SPAN>() {
      host::launch(blocks, {lanes, rows}, 1, [&] {
        qk_norm_rope::norm_rotate<T, INTERLEAVED, PACKED, PER_PAIR, SPAN>(operands, angles, epsilon, scale_offset);
      });
    });
  });
}

EXPORT void qk_norm_rope_backward(int kind, bool interleaved, bool packed, unsigned lanes, const void* x, const float* rstd,
                                  const void* grad, qk_norm_rope::Parameter scale, void* d_x, float* partial, void* total,
                                  int scalar_type, rope::Angles angles, rope::Heads heads, int span, int64_t groups,
                                  int64_t partials, float scale_offset) {
  heads_typed(kind, interleaved, packed, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const rope::Spans spans = rope::spans_of(heads, span);
    host::launch(unsigned(groups * partials), {lanes, unsigned(rope::kThreads) / lanes}, 1, [&] {
      qk_norm_rope::gradients<T, INTERLEAVED, PACKED>(static_cast<const T*>(x), rstd, static_cast<const T*>(grad), scale,
                                                      static_cast<T*>(d_x), partial, angles, heads, spans,
                                                      unsigned(spans.count / groups), unsigned(partials), scale_offset);
    });
  });
  if (!total) return;
  sum({partial, total, ScalarType(scalar_type), groups, partials}, {}, heads.width);
}

EXPORT void qk_norm_rope_angle_gradients(int kind, bool interleaved, bool packed, unsigned lanes, const void* x,
                                         const float* rstd, const void* grad, qk_norm_rope::Parameter scale, float* d_cos,
                                         float* d_sin, rope::Heads heads, bool shared, bool per_pair, bool add,
                                         float scale_offset) {
  heads_typed(kind, interleaved, packed, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const qk_norm_rope::Normalised transform{rstd, scale, scale_offset};
    host::launch(unsigned((shared ? 1 : heads.batch) * heads.length), {lanes, unsigned(rope::kThreads) / lanes}, 1, [&] {
      rope::angle_gradients<T, INTERLEAVED, PACKED>(static_cast<const T*>(x), static_cast<const T*>(grad), d_cos, d_sin, heads,
                                                    shared, per_pair, add, transform);
    });
  });
}

namespace {

using Untyped = paged_cache_update::PageWrite<void, void>;

struct Block {
  int64_t rows;
  unsigned x, y;
  int tokens;
};

template <typename From, typename To>
paged_cache_update::PageWrite<From, To> as(const Untyped& write) {
  return {static_cast<const From*>(write.from),
          static_cast<To*>(write.pages),
          write.scale,
          write.page_stride,
          write.token_stride,
          write.head_stride,
          write.batch_stride,
          write.scale_batch_stride,
          write.scale_head_stride,
          write.heads,
          write.size};
}

template <typename From, typename To>
void update(bool packed, const Block& block, const Requests& requests, const Untyped& first, const Untyped& second) {
  constexpr int N = 16 / sizeof(From);
  const auto one = as<From, To>(first), other = as<From, To>(second);
  host::launch(unsigned((block.rows + block.tokens - 1) / block.tokens), {block.x, block.y}, 1, [&] {
    if (packed) return paged_cache_update::update_pages<From, To, N>(requests, one, other, block.rows, block.tokens);
    paged_cache_update::update_pages<From, To, 1>(requests, one, other, block.rows, block.tokens);
  });
}

}  // namespace

// `to`: 0 float32, 1 bfloat16, 2 int8, 3 float8_e4m3fn, 4 float8_e5m2, 5 the bits of bfloat16.
EXPORT void update_pages(int kind, int to, bool packed, Block block, Requests requests, Untyped first, Untyped second) {
  using namespace paged_cache_update;
  const auto choose = [&]<typename From>() {
    switch (to) {
      case 0: return update<From, float>(packed, block, requests, first, second);
      case 1: return update<From, __nv_bfloat16>(packed, block, requests, first, second);
      case 2: return update<From, Int8>(packed, block, requests, first, second);
      case 3: return update<From, E4M3>(packed, block, requests, first, second);
      default: return update<From, E5M2>(packed, block, requests, first, second);
    }
  };
  if (to == 5) return update<Bits<2>, Bits<2>>(packed, block, requests, first, second);
  kind == 0 ? choose.template operator()<float>() : choose.template operator()<__nv_bfloat16>();
}
