// Kernels of one norm on a host.
#include "norm/kernels.cuh"
#include "rows_on_host.h"
#include "sums_on_host.h"

namespace {

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

// NORM: 0 rms_norm, 1 layer_norm, 2 add_rms_norm; a library for each, which is compiled where that norm is tested.
template <typename Run>
void norm_typed(int kind, bool packed, Run run) {
  typed(kind, packed, [&]<typename T, int N>() { run.template operator()<T, N, NORM == 1, NORM == 2>(); });
}

}  // namespace

EXPORT void norm_forward(int kind, bool packed, Shape shape, const void* x, const void* residual, Stored scale,
                         Stored offset, void* out, void* sum, float* mean, float* rstd, int64_t rows_per_batch, int width,
                         float epsilon, float scale_offset) {
  norm_typed(kind, packed, [&]<typename T, int N, bool CENTRED, bool ADDED>() {
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

EXPORT void norm_backward(int kind, bool packed, Shape shape, const void* x, Stored scale, const float* mean,
                          const float* rstd, const void* grad, const void* grad_sum, void* d_x, void* d_scale, void* d_offset,
                          int scalar_type, float* partial_scale, float* partial_offset, int64_t rows_per_batch, int width,
                          float scale_offset) {
  norm_typed(kind, packed, [&]<typename T, int N, bool CENTRED, bool ADDED>() {
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
