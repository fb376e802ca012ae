// XLA FFI handlers of softmax: checks of shapes and dtypes, choice of the kernel, launch.
//
// x is [rows, width]; `where` is [its rows, 1 or width], or [0, 1] if absent; `sizes` and `strides` map a row of x to its row
// of `where`: by the axes that form the rows of x, strides in rows of `where`.
#include "launch_rows.cuh"
#include "softmax/kernels.cuh"

namespace ejkernel::softmax {
namespace {

constexpr const char* kName = "softmax";
using Mark = ffi::Buffer<ffi::PRED>;
using Axes = ffi::Span<const int64_t>;

ffi::Error CheckRows(Array x, Mark where, Axes sizes, Axes strides, int64_t threads, int64_t cluster, int64_t stages) {
  EJKERNEL_TRY(CheckFloat(kName, "x", x));
  const Dims dims = x.dimensions(), marks = where.dimensions();
  if (dims.size() != 2) return Invalid(kName, "x must be [rows, width], got " + Text(dims));
  if (dims[1] > kMaxWidth) return Invalid(kName, "width " + std::to_string(dims[1]) + " is above 2^30");
  if (marks.size() != 2 || (marks[1] != 1 && marks[1] != dims[1])) {
    return Invalid(kName, "where must be [rows, 1 or width] of x " + Text(dims) + ", got " + Text(marks));
  }
  if (sizes.size() != strides.size() || sizes.size() > kMaxAxes) {
    return Invalid(kName, "sizes and strides must be up to 8 numbers each, got " + std::to_string(sizes.size()) + " and " +
                              std::to_string(strides.size()));
  }
  if (marks[0] > 0) {
    if (sizes.size() == 0) return Invalid(kName, "sizes must not be empty with where");
    int64_t rows = 1, last = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      if (sizes[axis] < 1 || strides[axis] < 0) return Invalid(kName, "sizes must be positive and strides not negative");
      rows *= sizes[axis];
      last += (sizes[axis] - 1) * strides[axis];
    }
    if (rows != dims[0])
      return Invalid(kName, "sizes make " + std::to_string(rows) + " rows, x has " + std::to_string(dims[0]));
    if (last >= marks[0]) return Invalid(kName, "strides reach row " + std::to_string(last) + " of where " + Text(marks));
  }
  return CheckKnobs(kName, {threads, cluster, stages}, 0);
}

ffi::Error CheckForward(Array x, Mark where, float, Axes sizes, Axes strides, int64_t threads, int64_t cluster, int64_t stages,
                        ffi::Result<Array> out) {
  EJKERNEL_TRY(CheckRows(x, where, sizes, strides, threads, cluster, stages));
  return CheckLike(kName, "out", *out, "x", x);
}

ffi::Error CheckBackward(Array out, Array grad, Mark where, float, Axes sizes, Axes strides, int64_t threads, int64_t cluster,
                         int64_t stages, ffi::Result<Array> d_x) {
  EJKERNEL_TRY(CheckRows(out, where, sizes, strides, threads, cluster, stages));
  EJKERNEL_TRY(CheckLike(kName, "grad", grad, "out", out));
  return CheckLike(kName, "d_x", *d_x, "out", out);
}

Mask AsMask(Mark where, Axes sizes, Axes strides) {
  Mask mask{};
  if (where.dimensions()[0] == 0) return mask;
  mask.data = reinterpret_cast<const uint8_t*>(where.untyped_data());
  mask.per_element = where.dimensions()[1] != 1;
  mask.axes = int(sizes.size());
  for (int axis = 0; axis < mask.axes; ++axis) {
    mask.size[axis] = sizes[axis];
    mask.stride[axis] = strides[axis];
  }
  return mask;
}

bool Packed(Array x, Mark where, std::initializer_list<const void*> others) {
  if (x.dimensions()[1] * int64_t(ffi::ByteWidth(x.element_type())) % 16) return false;
  if (!Aligned(x.untyped_data()) || !Aligned(where.untyped_data())) return false;
  return std::all_of(others.begin(), others.end(), Aligned);
}

ffi::Error RunForward(cudaStream_t stream, Array x, Mark where, float scale, Axes sizes, Axes strides, int64_t threads,
                      int64_t cluster, int64_t stages, ffi::Result<Array> out) {
  EJKERNEL_TRY(CheckForward(x, where, scale, sizes, strides, threads, cluster, stages, out));
  if (x.element_count() == 0) return ffi::Error::Success();
  return ForFloat(x.element_type(), Packed(x, where, {out->untyped_data()}), [&]<typename T, int N>() {
    const Forward<T, N> op{static_cast<const T*>(x.untyped_data()), AsMask(where, sizes, strides),
                           static_cast<T*>(out->untyped_data()), int(x.dimensions()[1]), scale};
    bool multipass = false;
    Rows split{x.dimensions()[0], kAnyWorkers};
    return LaunchRows(kName, stream, op, split, 1, {threads, cluster, stages}, multipass);
  });
}

ffi::Error RunBackward(cudaStream_t stream, Array out, Array grad, Mark where, float scale, Axes sizes, Axes strides,
                       int64_t threads, int64_t cluster, int64_t stages, ffi::Result<Array> d_x) {
  EJKERNEL_TRY(CheckBackward(out, grad, where, scale, sizes, strides, threads, cluster, stages, d_x));
  if (out.element_count() == 0) return ffi::Error::Success();
  return ForFloat(out.element_type(), Packed(out, where, {grad.untyped_data(), d_x->untyped_data()}), [&]<typename T, int N>() {
    const Backward<T, N> op{static_cast<const T*>(out.untyped_data()),
                            static_cast<const T*>(grad.untyped_data()),
                            AsMask(where, sizes, strides),
                            static_cast<T*>(d_x->untyped_data()),
                            int(out.dimensions()[1]),
                            scale};
    bool multipass = false;
    Rows split{out.dimensions()[0], kAnyWorkers};
    return LaunchRows(kName, stream, op, split, 1, {threads, cluster, stages}, multipass);
  });
}

template <typename Binding>
auto Knobs(Binding binding) {
  return std::move(binding)
      .template Attr<float>("scale")
      .template Attr<Axes>("sizes")
      .template Attr<Axes>("strides")
      .template Attr<int64_t>("threads")
      .template Attr<int64_t>("cluster")
      .template Attr<int64_t>("stages")
      .template Ret<Array>();
}

template <typename Binding>
auto BindForward(Binding binding) {
  return Knobs(std::move(binding).template Arg<Array>().template Arg<Mark>());
}

template <typename Binding>
auto BindBackward(Binding binding) {
  return Knobs(std::move(binding).template Arg<Array>().template Arg<Array>().template Arg<Mark>());
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_softmax_forward, BindForward, RunForward, CheckForward)
EJKERNEL_HANDLER(ejkernel_cuda_softmax_backward, BindBackward, RunBackward, CheckBackward)

}  // namespace ejkernel::softmax
