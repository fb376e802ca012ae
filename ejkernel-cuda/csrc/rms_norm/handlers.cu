// XLA's door to rms_norm: checks of every shape and dtype, the choice of kernel, the launch.
//
// A parameter that is absent comes as [0, width]; shared by the batch as [1, width]; one per batch member as [batch, width].
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "export.h"
#include "rms_norm/kernels.cuh"
#include "xla/ffi/api/ffi.h"

namespace ejkernel::rms_norm {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Dims = ffi::AnyBuffer::Dimensions;

constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr int kBlockThreads = 256;

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("ejkernel_cuda rms_norm: " + message); }

ffi::Error CheckLast(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("ejkernel_cuda rms_norm: ") + what + ": " + cudaGetErrorString(error));
}

std::string Text(Dims dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

bool Same(Dims a, Dims b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()); }

ffi::Error CheckX(ffi::AnyBuffer x) {
  const auto type = x.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) return Invalid("x must be float32, bfloat16 or float16");
  if (x.dimensions().size() != 3) return Invalid("x must be [batch, rows, width], got " + Text(x.dimensions()));
  if (x.dimensions()[2] > (int64_t{1} << 30)) return Invalid("width " + std::to_string(x.dimensions()[2]) + " is above 2^30");
  return ffi::Error::Success();
}

ffi::Error CheckLike(const char* name, ffi::AnyBuffer array, ffi::AnyBuffer x) {
  if (array.element_type() == x.element_type() && Same(array.dimensions(), x.dimensions())) return ffi::Error::Success();
  return Invalid(std::string(name) + " must be like x " + Text(x.dimensions()) + ", got " + Text(array.dimensions()));
}

ffi::Error CheckParameter(const char* name, Floats array, ffi::AnyBuffer x) {
  const Dims dims = array.dimensions(), like = x.dimensions();
  if (dims.size() == 2 && dims[1] == like[2] && (dims[0] == 0 || dims[0] == 1 || dims[0] == like[0])) return ffi::Error::Success();
  return Invalid(std::string(name) + " must be [0, 1 or batch, width] of x " + Text(like) + ", got " + Text(dims));
}

ffi::Error CheckForward(ffi::AnyBuffer x, Floats scale, Floats offset, int64_t threads, ffi::AnyBuffer out, Floats rstd) {
  if (auto error = CheckX(x); error.failure()) return error;
  if (auto error = CheckParameter("scale", scale, x); error.failure()) return error;
  if (auto error = CheckParameter("offset", offset, x); error.failure()) return error;
  if (auto error = CheckLike("out", out, x); error.failure()) return error;
  const Dims dims = x.dimensions();
  const int64_t saved = rstd.element_count();
  if (saved != 0 && saved != dims[0] * dims[1]) return Invalid("rstd must have one value per row or none, got " + Text(rstd.dimensions()));
  if (threads < 1 || threads > kMaxThreads || (threads & (threads - 1))) return Invalid("threads must be a power of two up to 512");
  return ffi::Error::Success();
}

ffi::Error CheckBackward(ffi::AnyBuffer x, Floats scale, Floats rstd, ffi::AnyBuffer grad, int64_t threads, ffi::AnyBuffer d_x,
                         Floats d_scale, Floats d_offset, Floats part_scale, Floats part_offset) {
  if (auto error = CheckX(x); error.failure()) return error;
  if (auto error = CheckParameter("scale", scale, x); error.failure()) return error;
  if (auto error = CheckParameter("d_scale", d_scale, x); error.failure()) return error;
  if (auto error = CheckParameter("d_offset", d_offset, x); error.failure()) return error;
  if (auto error = CheckLike("grad", grad, x); error.failure()) return error;
  if (auto error = CheckLike("d_x", d_x, x); error.failure()) return error;
  const Dims dims = x.dimensions();
  if (int64_t(rstd.element_count()) != dims[0] * dims[1]) return Invalid("rstd must have one value per row, got " + Text(rstd.dimensions()));
  if (!Same(scale.dimensions(), d_scale.dimensions())) return Invalid("d_scale must be like scale");
  const bool batched = std::max(d_scale.dimensions()[0], d_offset.dimensions()[0]) > 1;
  int64_t parts = 0;
  const Floats totals[] = {d_scale, d_offset}, partials[] = {part_scale, part_offset};
  for (int i = 0; i < 2; ++i) {
    const Dims got = partials[i].dimensions();
    if (got.size() != 3 || got[2] != dims[2]) return Invalid("partial sums must be [groups, parts, width], got " + Text(got));
    if (totals[i].dimensions()[0] == 0) continue;
    if (got[0] != (batched ? dims[0] : 1) || got[1] < 1 || (parts && parts != got[1])) {
      return Invalid("partial sums must be [groups, parts, width] and equal, got " + Text(got));
    }
    parts = got[1];
  }
  if (threads < 1 || threads > kMaxThreads || (threads & (threads - 1))) return Invalid("threads must be a power of two up to 512");
  return ffi::Error::Success();
}

Parameter AsParameter(Floats array, int64_t width) {
  const int64_t batch = array.dimensions()[0];
  return {batch ? array.typed_data() : nullptr, batch > 1 ? width : 0};
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Threads per row and packs per thread that cover a row of `packs`; items = 0 when registers cannot.
struct Plan {
  int threads;
  int items;
};

Plan MakePlan(int64_t packs, int64_t wished, int most) {
  int64_t threads = wished;
  while (threads < kMaxThreads && threads * most < packs) threads *= 2;
  const int64_t items = (packs + threads - 1) / threads;
  return {int(threads), items > most ? 0 : items > 2 ? 4 : int(items)};
}

dim3 Block(int threads) { return dim3(threads, threads > 32 ? 1 : std::max(1, kBlockThreads / threads)); }

template <typename Kernel>
int64_t ResidentBlocks(Kernel kernel, int threads) {
  int device = 0, processors = 1, blocks = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
  return int64_t(processors) * std::max(1, blocks);
}

template <typename T, int N>
ffi::Error Forward(cudaStream_t stream, ffi::AnyBuffer x, Floats scale, Floats offset, float epsilon, float scale_offset, int64_t threads,
                   ffi::AnyBuffer out, Floats rstd) {
  const Dims dims = x.dimensions();
  const Shape shape{dims[0] * dims[1], dims[1], int(dims[2])};
  float* saved = rstd.element_count() ? rstd.typed_data() : nullptr;
  const T* from = static_cast<const T*>(x.untyped_data());
  T* to = static_cast<T*>(out.untyped_data());
  const Parameter scales = AsParameter(scale, dims[2]), offsets = AsParameter(offset, dims[2]);
  const Plan plan = MakePlan((dims[2] + N - 1) / N, threads, 4);
  if (plan.items == 0) {
    const int64_t blocks = std::min(shape.rows, ResidentBlocks(forward_wide<T, N>, kMaxThreads));
    forward_wide<T, N><<<unsigned(blocks), kMaxThreads, 0, stream>>>(from, scales, offsets, to, saved, shape, epsilon, scale_offset);
    return CheckLast("forward");
  }
  const dim3 block = Block(plan.threads);
  auto kernel = plan.items == 1 ? forward_rows<T, N, 1> : plan.items == 2 ? forward_rows<T, N, 2> : forward_rows<T, N, 4>;
  const int64_t tiles = (shape.rows + block.y - 1) / block.y;
  const int64_t blocks = std::min(tiles, ResidentBlocks(kernel, block.x * block.y));
  kernel<<<unsigned(blocks), block, 0, stream>>>(from, scales, offsets, to, saved, shape, epsilon, scale_offset);
  return CheckLast("forward");
}

struct Gradients {
  int64_t groups;
  int64_t parts;
  float* scale;  // partial sums, null when absent
  float* offset;
};

template <typename T, int N>
ffi::Error Backward(cudaStream_t stream, ffi::AnyBuffer x, Floats scale, Floats rstd, ffi::AnyBuffer grad, float scale_offset,
                    int64_t threads, ffi::AnyBuffer d_x, Gradients to) {
  const Dims dims = x.dimensions();
  const Shape shape{dims[0] * dims[1], dims[1], int(dims[2])};
  const T* values = static_cast<const T*>(x.untyped_data());
  const T* grads = static_cast<const T*>(grad.untyped_data());
  T* result = static_cast<T*>(d_x.untyped_data());
  const Parameter scales = AsParameter(scale, dims[2]);
  const Plan plan = MakePlan((dims[2] + N - 1) / N, threads, 2);  // 4 would not fit into registers
  const int64_t rows_per_group = shape.rows / to.groups;
  if (plan.items == 0) {
    const int64_t blocks = std::min(shape.rows, ResidentBlocks(backward_wide<T, N>, kMaxThreads));
    backward_wide<T, N><<<unsigned(blocks), kMaxThreads, 0, stream>>>(values, scales, rstd.typed_data(), grads, result, shape, scale_offset);
    const int64_t tiles = (dims[2] + kBlockThreads - 1) / kBlockThreads;
    if (tiles * to.groups * to.parts > kMaxGrid) return Invalid("too many partial sums");
    if (to.scale || to.offset) {
      backward_columns<T><<<unsigned(tiles * to.groups * to.parts), kBlockThreads, 0, stream>>>(
          values, rstd.typed_data(), grads, to.scale, to.offset, rows_per_group, to.parts, shape.width);
    }
    return CheckLast("backward");
  }
  const dim3 block = Block(plan.threads);
  if (to.groups * to.parts > kMaxGrid) return Invalid("too many partial sums");
  auto kernel = plan.items == 1 ? backward_rows<T, N, 1> : backward_rows<T, N, 2>;
  const size_t shared = block.y > 1 ? size_t(block.x) * block.y * plan.items * N * sizeof(float) : 0;
  kernel<<<unsigned(to.groups * to.parts), block, shared, stream>>>(values, scales, rstd.typed_data(), grads, result, to.scale, to.offset,
                                                                     rows_per_group, to.parts, shape.width, scale_offset);
  return CheckLast("backward");
}

// Call `run(T*, vector width)` for x's type; 16-byte packs when every row of every array starts on 16 bytes, else single elements.
template <typename Run>
ffi::Error ForType(ffi::AnyBuffer x, bool aligned, Run run) {
  const int64_t bytes = x.dimensions()[2] * int64_t(ffi::ByteWidth(x.element_type()));
  const bool packed = aligned && Aligned(x.untyped_data()) && bytes % 16 == 0;
  switch (x.element_type()) {
    case ffi::F32: return packed ? run.template operator()<float, 4>() : run.template operator()<float, 1>();
    case ffi::BF16: return packed ? run.template operator()<__nv_bfloat16, 8>() : run.template operator()<__nv_bfloat16, 1>();
    default: return packed ? run.template operator()<__half, 8>() : run.template operator()<__half, 1>();
  }
}

struct RunForward {
  cudaStream_t stream;
  ffi::AnyBuffer x;
  Floats scale, offset;
  float epsilon, scale_offset;
  int64_t threads;
  ffi::AnyBuffer out;
  Floats rstd;
  template <typename T, int N>
  ffi::Error operator()() {
    return Forward<T, N>(stream, x, scale, offset, epsilon, scale_offset, threads, out, rstd);
  }
};

struct RunBackward {
  cudaStream_t stream;
  ffi::AnyBuffer x;
  Floats scale, rstd;
  ffi::AnyBuffer grad;
  float scale_offset;
  int64_t threads;
  ffi::AnyBuffer d_x;
  Gradients to;
  template <typename T, int N>
  ffi::Error operator()() {
    return Backward<T, N>(stream, x, scale, rstd, grad, scale_offset, threads, d_x, to);
  }
};

ffi::Error ForwardHandler(cudaStream_t stream, ffi::AnyBuffer x, Floats scale, Floats offset, float epsilon, float scale_offset,
                          int64_t threads, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> rstd) {
  if (auto error = CheckForward(x, scale, offset, threads, *out, *rstd); error.failure()) return error;
  if (x.element_count() == 0) return ffi::Error::Success();
  const bool aligned = Aligned(scale.untyped_data()) && Aligned(offset.untyped_data()) && Aligned(out->untyped_data());
  return ForType(x, aligned, RunForward{stream, x, scale, offset, epsilon, scale_offset, threads, *out, *rstd});
}

ffi::Error SumParts(cudaStream_t stream, Floats partial, Floats total) {
  const int64_t groups = total.dimensions()[0], width = total.dimensions()[1];
  if (groups == 0) return ffi::Error::Success();
  const int64_t parts = partial.dimensions()[0] * partial.dimensions()[1] / groups;
  const int64_t blocks = groups * ((width + 31) / 32);
  if (blocks > kMaxGrid) return Invalid("too many parameters");
  sum_parts<<<unsigned(blocks), dim3(32, 8), 0, stream>>>(partial.typed_data(), total.typed_data(), parts, width);
  return CheckLast("sum of partial gradients");
}

ffi::Error BackwardHandler(cudaStream_t stream, ffi::AnyBuffer x, Floats scale, Floats rstd, ffi::AnyBuffer grad, float scale_offset,
                           int64_t threads, int64_t parts, ffi::Result<ffi::AnyBuffer> d_x, ffi::Result<Floats> d_scale,
                           ffi::Result<Floats> d_offset, ffi::Result<Floats> part_scale, ffi::Result<Floats> part_offset) {
  if (auto error = CheckBackward(x, scale, rstd, grad, threads, *d_x, *d_scale, *d_offset, *part_scale, *part_offset); error.failure()) {
    return error;
  }
  const Dims dims = x.dimensions();
  const int64_t scales = d_scale->dimensions()[0], offsets = d_offset->dimensions()[0];
  Gradients to{std::max(scales, offsets) > 1 ? dims[0] : 1, parts, scales ? part_scale->typed_data() : nullptr,
               offsets ? part_offset->typed_data() : nullptr};
  if (scales || offsets) to.parts = (scales ? *part_scale : *part_offset).dimensions()[1];
  if (to.parts < 1) return Invalid("parts must be positive");
  if (x.element_count() == 0) {
    cudaMemsetAsync(d_scale->untyped_data(), 0, d_scale->size_bytes(), stream);
    cudaMemsetAsync(d_offset->untyped_data(), 0, d_offset->size_bytes(), stream);
    return CheckLast("gradients of no rows");
  }
  const bool aligned = Aligned(scale.untyped_data()) && Aligned(grad.untyped_data()) && Aligned(d_x->untyped_data());
  if (auto error = ForType(x, aligned, RunBackward{stream, x, scale, rstd, grad, scale_offset, threads, *d_x, to}); error.failure()) {
    return error;
  }
  if (auto error = SumParts(stream, *part_scale, *d_scale); error.failure()) return error;
  return SumParts(stream, *part_offset, *d_offset);
}

// The checks alone, for a host without a GPU.
ffi::Error ForwardCheckHandler(ffi::AnyBuffer x, Floats scale, Floats offset, float, float, int64_t threads, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<Floats> rstd) {
  return CheckForward(x, scale, offset, threads, *out, *rstd);
}

ffi::Error BackwardCheckHandler(ffi::AnyBuffer x, Floats scale, Floats rstd, ffi::AnyBuffer grad, float, int64_t threads, int64_t,
                                ffi::Result<ffi::AnyBuffer> d_x, ffi::Result<Floats> d_scale, ffi::Result<Floats> d_offset,
                                ffi::Result<Floats> part_scale, ffi::Result<Floats> part_offset) {
  return CheckBackward(x, scale, rstd, grad, threads, *d_x, *d_scale, *d_offset, *part_scale, *part_offset);
}

template <typename Binding>
auto BindForward(Binding binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>().template Arg<Floats>().template Arg<Floats>().template Attr<float>("epsilon")
      .template Attr<float>("scale_offset").template Attr<int64_t>("threads").template Ret<ffi::AnyBuffer>().template Ret<Floats>();
}

template <typename Binding>
auto BindBackward(Binding binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>().template Arg<Floats>().template Arg<Floats>().template Arg<ffi::AnyBuffer>()
      .template Attr<float>("scale_offset").template Attr<int64_t>("threads").template Attr<int64_t>("parts")
      .template Ret<ffi::AnyBuffer>().template Ret<Floats>().template Ret<Floats>().template Ret<Floats>().template Ret<Floats>();
}

}  // namespace

using Stream = ffi::PlatformStream<cudaStream_t>;

EJKERNEL_EXPORT XLA_FFI_Error* ejkernel_cuda_rms_norm_forward(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindForward(ffi::Ffi::Bind().Ctx<Stream>()).To(ForwardHandler).release();
  return handler->Call(frame);
}

EJKERNEL_EXPORT XLA_FFI_Error* ejkernel_cuda_rms_norm_backward(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindBackward(ffi::Ffi::Bind().Ctx<Stream>()).To(BackwardHandler).release();
  return handler->Call(frame);
}

EJKERNEL_EXPORT XLA_FFI_Error* ejkernel_cuda_rms_norm_forward_check(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindForward(ffi::Ffi::Bind()).To(ForwardCheckHandler).release();
  return handler->Call(frame);
}

EJKERNEL_EXPORT XLA_FFI_Error* ejkernel_cuda_rms_norm_backward_check(XLA_FFI_CallFrame* frame) {
  static auto* handler = BindBackward(ffi::Ffi::Bind()).To(BackwardCheckHandler).release();
  return handler->Call(frame);
}

}  // namespace ejkernel::rms_norm
