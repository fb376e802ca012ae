// XLA FFI handlers of the row normalisations: checks of shapes and dtypes, choice of the kernel, launch.
//
// Parameters are float or have x's type, both the same: [0, width] if absent, [1, width] if the batch shares them, [batch,
// width] per batch member. Arrays that a normalisation does not have are empty: the mean unless CENTRED; residual, sum and its
// gradient unless ADDED.
#pragma once

#include "launch_rows.cuh"
#include "norm/kernels.cuh"

namespace ejkernel::norm {

template <typename T>
Parameter<T> AsParameter(Array array) {
  const int64_t batch = array.dimensions()[0], bytes = array.dimensions()[1] * int64_t(ffi::ByteWidth(array.element_type()));
  return {batch ? array.untyped_data() : nullptr, batch > 1 ? bytes : 0, array.element_type() != ffi::F32};
}

template <bool CENTRED, bool ADDED = false>
struct Handlers {
  static_assert(!(CENTRED && ADDED));
  static constexpr const char* kName = ADDED ? "add_rms_norm" : CENTRED ? "layer_norm" : "rms_norm";

  static ffi::Error CheckX(Array x) {
    EJKERNEL_TRY(CheckFloat(kName, "x", x));
    if (x.dimensions().size() != 3) return Invalid(kName, "x must be [batch, rows, width], got " + Text(x.dimensions()));
    if (x.dimensions()[2] > kMaxWidth) return Invalid(kName, "width " + std::to_string(x.dimensions()[2]) + " is above 2^30");
    return ffi::Error::Success();
  }

  static ffi::Error CheckAdded(const char* name, Array array, Array x) {
    if (ADDED) return CheckLike(kName, name, array, "x", x);
    if (array.element_count() == 0) return ffi::Error::Success();
    return Invalid(kName, std::string(name) + " must be empty, got " + Text(array.dimensions()));
  }

  static ffi::Error CheckParameter(const char* name, Array array, Array x) {
    if (array.element_type() != ffi::F32 && array.element_type() != x.element_type())
      return Invalid(kName, std::string(name) + " must be float32 or have x's type");
    return CheckColumns(name, array, x);
  }

  // A parameter or its gradient.
  static ffi::Error CheckColumns(const char* name, Array array, Array x) {
    EJKERNEL_TRY(CheckFloat(kName, name, array));
    const Dims dims = array.dimensions(), like = x.dimensions();
    if (dims.size() == 2 && dims[1] == like[2] && (dims[0] == 0 || dims[0] == 1 || dims[0] == like[0]))
      return ffi::Error::Success();
    return Invalid(kName, std::string(name) + " must be [0, 1 or batch, width] of x " + Text(like) + ", got " + Text(dims));
  }

  static ffi::Error CheckStatistic(const char* name, Floats array, int64_t rows, bool needed, bool optional) {
    const int64_t count = array.element_count();
    if (needed ? count == rows || (optional && count == 0) : count == 0) return ffi::Error::Success();
    const char* wanted = !needed    ? " must be empty, got "
                         : optional ? " must have one value per row or none, got "
                                    : " must have one value per row, got ";
    return Invalid(kName, std::string(name) + wanted + Text(array.dimensions()));
  }

  static ffi::Error CheckForward(Array x, Array residual, Array scale, Array offset, float, float, int64_t threads,
                                 int64_t cluster, int64_t stages, ffi::Result<Array> out, ffi::Result<Array> sum,
                                 ffi::Result<Floats> mean, ffi::Result<Floats> rstd) {
    EJKERNEL_TRY(CheckX(x));
    EJKERNEL_TRY(CheckAdded("residual", residual, x));
    EJKERNEL_TRY(CheckAdded("sum", *sum, x));
    EJKERNEL_TRY(CheckParameter("scale", scale, x));
    EJKERNEL_TRY(CheckParameter("offset", offset, x));
    if (scale.element_type() != offset.element_type()) return Invalid(kName, "scale and offset must have one type");
    EJKERNEL_TRY(CheckLike(kName, "out", *out, "x", x));
    const int64_t rows = x.dimensions()[0] * x.dimensions()[1];
    EJKERNEL_TRY(CheckStatistic("rstd", *rstd, rows, true, true));
    EJKERNEL_TRY(CheckStatistic("mean", *mean, rstd->element_count(), CENTRED, false));
    return CheckKnobs(kName, {threads, cluster, stages}, 0);
  }

  static ffi::Error CheckBackward(Array x, Array scale, Floats mean, Floats rstd, Array grad, Array grad_sum, float,
                                  int64_t threads, int64_t cluster, int64_t stages, int64_t partials, ffi::Result<Array> d_x,
                                  ffi::Result<Array> d_scale, ffi::Result<Array> d_offset, ffi::Result<Floats> partial_scale,
                                  ffi::Result<Floats> partial_offset) {
    EJKERNEL_TRY(CheckX(x));
    EJKERNEL_TRY(CheckAdded("grad_sum", grad_sum, x));
    EJKERNEL_TRY(CheckParameter("scale", scale, x));
    EJKERNEL_TRY(CheckColumns("d_scale", *d_scale, x));
    EJKERNEL_TRY(CheckColumns("d_offset", *d_offset, x));
    EJKERNEL_TRY(CheckLike(kName, "grad", grad, "x", x));
    EJKERNEL_TRY(CheckLike(kName, "d_x", *d_x, "x", x));
    const Dims dims = x.dimensions();
    EJKERNEL_TRY(CheckStatistic("rstd", rstd, dims[0] * dims[1], true, false));
    EJKERNEL_TRY(CheckStatistic("mean", mean, dims[0] * dims[1], CENTRED, false));
    if (!Same(scale.dimensions(), d_scale->dimensions())) return Invalid(kName, "d_scale must be like scale");
    if (partials < 1) return Invalid(kName, "partials must be positive, got " + std::to_string(partials));
    const int64_t groups = Groups(x, *d_scale, *d_offset);
    const Array totals[] = {*d_scale, *d_offset};
    const Floats buffers[] = {*partial_scale, *partial_offset};
    for (int i = 0; i < 2; ++i) {
      const Dims got = buffers[i].dimensions();
      const int64_t wanted = totals[i].dimensions()[0] ? groups : 0;
      if (got.size() != 3 || got[0] != wanted || got[1] != partials || got[2] != dims[2]) {
        return Invalid(kName, "partial sums must be [" + std::to_string(wanted) + ", " + std::to_string(partials) +
                                  " partials, " + std::to_string(dims[2]) + "], got " + Text(got));
      }
    }
    return CheckKnobs(kName, {threads, cluster, stages}, 1);
  }

  // Batch members with parameters of their own.
  static int64_t Groups(Array x, Array d_scale, Array d_offset) {
    return std::max(d_scale.dimensions()[0], d_offset.dimensions()[0]) > 1 ? x.dimensions()[0] : 1;
  }

  static bool Packed(Array x) { return x.dimensions()[2] * int64_t(ffi::ByteWidth(x.element_type())) % 16 == 0; }

  static ffi::Error RunForward(cudaStream_t stream, Array x, Array residual, Array scale, Array offset, float epsilon,
                               float scale_offset, int64_t threads, int64_t cluster, int64_t stages, ffi::Result<Array> out,
                               ffi::Result<Array> sum, ffi::Result<Floats> mean, ffi::Result<Floats> rstd) {
    EJKERNEL_TRY(
        CheckForward(x, residual, scale, offset, epsilon, scale_offset, threads, cluster, stages, out, sum, mean, rstd));
    if (x.element_count() == 0) return ffi::Error::Success();
    const Dims dims = x.dimensions();
    const bool packed = Packed(x) && Aligned(x.untyped_data()) && Aligned(scale.untyped_data()) &&
                        Aligned(offset.untyped_data()) && Aligned(out->untyped_data()) &&
                        (!ADDED || (Aligned(residual.untyped_data()) && Aligned(sum->untyped_data())));
    const bool save = rstd->element_count() > 0;
    return ForFloat(x.element_type(), packed, [&]<typename T, int N>() {
      const float unit = square_unit<T>(epsilon);
      const Forward<T, N, CENTRED, ADDED> op{static_cast<const T*>(x.untyped_data()),
                                             ADDED ? static_cast<const T*>(residual.untyped_data()) : nullptr,
                                             AsParameter<T>(scale),
                                             AsParameter<T>(offset),
                                             static_cast<T*>(out->untyped_data()),
                                             ADDED ? static_cast<T*>(sum->untyped_data()) : nullptr,
                                             save && CENTRED ? mean->typed_data() : nullptr,
                                             save ? rstd->typed_data() : nullptr,
                                             dims[1],
                                             int(dims[2]),
                                             1.f / float(dims[2]),
                                             unit,
                                             epsilon * unit * unit,
                                             scale_offset};
      bool multipass = false;
      const int64_t groups = op.scale.stride || op.offset.stride ? dims[0] : 1;
      Rows split{dims[0] * dims[1] / groups, kAnyWorkers};
      return LaunchRows(kName, stream, op, split, groups, {threads, cluster, stages}, multipass);
    });
  }

  static ffi::Error RunBackward(cudaStream_t stream, Array x, Array scale, Floats mean, Floats rstd, Array grad, Array grad_sum,
                                float scale_offset, int64_t threads, int64_t cluster, int64_t stages, int64_t partials,
                                ffi::Result<Array> d_x, ffi::Result<Array> d_scale, ffi::Result<Array> d_offset,
                                ffi::Result<Floats> partial_scale, ffi::Result<Floats> partial_offset) {
    EJKERNEL_TRY(CheckBackward(x, scale, mean, rstd, grad, grad_sum, scale_offset, threads, cluster, stages, partials, d_x,
                               d_scale, d_offset, partial_scale, partial_offset));
    if (x.element_count() == 0) {
      for (Array total : {*d_scale, *d_offset}) {
        if (total.size_bytes()) cudaMemsetAsync(total.untyped_data(), 0, total.size_bytes(), stream);
      }
      return CheckLaunch(kName, "gradients of no rows");
    }
    const Dims dims = x.dimensions();
    float* to_scale = d_scale->dimensions()[0] ? partial_scale->typed_data() : nullptr;
    float* to_offset = d_offset->dimensions()[0] ? partial_offset->typed_data() : nullptr;
    const bool packed = Packed(x) && Aligned(x.untyped_data()) && Aligned(scale.untyped_data()) &&
                        Aligned(grad.untyped_data()) && Aligned(d_x->untyped_data()) &&
                        Aligned(partial_scale->untyped_data()) && Aligned(partial_offset->untyped_data()) &&
                        (!ADDED || Aligned(grad_sum.untyped_data()));
    const int64_t groups = Groups(x, *d_scale, *d_offset);
    Rows split{dims[0] * dims[1] / groups, partials};
    EJKERNEL_TRY(ForFloat(x.element_type(), packed, [&]<typename T, int N>() -> ffi::Error {
      const Backward<T, N, CENTRED, ADDED> op{static_cast<const T*>(x.untyped_data()),
                                              AsParameter<T>(scale),
                                              CENTRED ? mean.typed_data() : nullptr,
                                              rstd.typed_data(),
                                              static_cast<const T*>(grad.untyped_data()),
                                              ADDED ? static_cast<const T*>(grad_sum.untyped_data()) : nullptr,
                                              static_cast<T*>(d_x->untyped_data()),
                                              to_scale,
                                              to_offset,
                                              dims[1],
                                              int(dims[2]),
                                              1.f / float(dims[2]),
                                              scale_offset};
      bool multipass = false;
      EJKERNEL_TRY(LaunchRows(kName, stream, op, split, groups, {threads, cluster, stages}, multipass));
      if (!multipass || (!to_scale && !to_offset)) return ffi::Error::Success();
      const int64_t blocks = (dims[2] + kSmallBlock - 1) / kSmallBlock * groups * partials;
      if (blocks > kMaxGrid) return Invalid(kName, "too many partial sums");
      column_sums<T, CENTRED>
          <<<unsigned(blocks), kSmallBlock, 0, stream>>>(op.x, op.mean, op.rstd, op.grad, to_scale, to_offset, split, op.width);
      return CheckLaunch(kName, "partial sums of columns");
    }));
    const auto partials_of = [&](Floats partial, Array total) {
      const int64_t members = std::max<int64_t>(1, total.dimensions()[0]);
      return PartialSumsOf(partial, total, groups * split.workers / members);
    };
    return LaunchSum(kName, stream, partials_of(*partial_scale, *d_scale), partials_of(*partial_offset, *d_offset), dims[2]);
  }

  template <typename Binding>
  static auto BindForward(Binding binding) {
    return std::move(binding)
        .template Arg<Array>()
        .template Arg<Array>()
        .template Arg<Array>()
        .template Arg<Array>()
        .template Attr<float>("epsilon")
        .template Attr<float>("scale_offset")
        .template Attr<int64_t>("threads")
        .template Attr<int64_t>("cluster")
        .template Attr<int64_t>("stages")
        .template Ret<Array>()
        .template Ret<Array>()
        .template Ret<Floats>()
        .template Ret<Floats>();
  }

  template <typename Binding>
  static auto BindBackward(Binding binding) {
    return std::move(binding)
        .template Arg<Array>()
        .template Arg<Array>()
        .template Arg<Floats>()
        .template Arg<Floats>()
        .template Arg<Array>()
        .template Arg<Array>()
        .template Attr<float>("scale_offset")
        .template Attr<int64_t>("threads")
        .template Attr<int64_t>("cluster")
        .template Attr<int64_t>("stages")
        .template Attr<int64_t>("partials")
        .template Ret<Array>()
        .template Ret<Array>()
        .template Ret<Array>()
        .template Ret<Floats>()
        .template Ret<Floats>();
  }
};

}  // namespace ejkernel::norm
