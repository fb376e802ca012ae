// Kernels that rotate heads on a host, for float32 (kind 0) and bfloat16 (kind 1).
#include "export_on_host.h"
#include "qk_norm_rope/kernels.cuh"
#include "rope/kernels.cuh"
#include "sums_on_host.h"

namespace {

template <typename Run>
void heads_typed(int kind, bool interleaved, bool packed, Run run) {
  const auto choose = [&]<typename T>() {
    if (interleaved) return packed ? run.template operator()<T, true, true>() : run.template operator()<T, true, false>();
    return packed ? run.template operator()<T, false, true>() : run.template operator()<T, false, false>();
  };
  kind == 0 ? choose.template operator()<float>() : choose.template operator()<__nv_bfloat16>();
}

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
