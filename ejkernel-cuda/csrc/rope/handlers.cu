// XLA FFI handlers of rope: checks of shapes and dtypes, choice of the kernel, launch.
#include <span>

#include "rope/heads.cuh"

namespace ejkernel::rope {
namespace {

constexpr const char* kName = "rope";

ffi::Error CheckRotate(Array query, Array key, Floats cos, Floats sin, int64_t rotary_dim, bool interleaved, bool heads_first,
                       bool inverse, int64_t span, int64_t threads, ffi::Result<Array> query_out, ffi::Result<Array> key_out) {
  EJKERNEL_TRY(CheckHeads(kName, "query", query, query, heads_first, rotary_dim));
  EJKERNEL_TRY(CheckHeads(kName, "key", key, query, heads_first, rotary_dim));
  EJKERNEL_TRY(CheckAngles(kName, "cos", cos, query, heads_first, rotary_dim));
  EJKERNEL_TRY(CheckAngles(kName, "sin", sin, query, heads_first, rotary_dim));
  if (cos.dimensions()[2] != sin.dimensions()[2]) return Invalid(kName, "cos and sin must have the same channels");
  EJKERNEL_TRY(CheckLike(kName, "query_out", *query_out, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "key_out", *key_out, "key", key));
  return CheckKnobs(kName, span, {1, 2, 4}, threads);
}

ffi::Error CheckAngleGradients(Array query, Array key, Array query_grad, Array key_grad, int64_t rotary_dim, bool interleaved,
                               bool heads_first, ffi::Result<Floats> d_cos, ffi::Result<Floats> d_sin) {
  EJKERNEL_TRY(CheckHeads(kName, "query", query, query, heads_first, rotary_dim));
  EJKERNEL_TRY(CheckHeads(kName, "key", key, query, heads_first, rotary_dim));
  EJKERNEL_TRY(CheckLike(kName, "query_grad", query_grad, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "key_grad", key_grad, "key", key));
  EJKERNEL_TRY(CheckAngles(kName, "d_cos", *d_cos, query, heads_first, rotary_dim));
  if (!Same(d_cos->dimensions(), d_sin->dimensions())) return Invalid(kName, "d_sin must be like d_cos");
  return ffi::Error::Success();
}

struct Rotated {
  Array x, out;
};

struct Rotation {
  int64_t rotary_dim;
  bool interleaved, heads_first, inverse;
  int64_t span, threads;
};

// One launch for one or two arrays of one dtype.
ffi::Error Rotate(cudaStream_t stream, std::span<const Rotated> arrays, const Angles& angles, const Rotation& rotation) {
  const ffi::DataType type = arrays[0].x.element_type();
  bool packed = true;
  for (const Rotated& array : arrays) {
    packed &= Packed(HeadsOf(array.x, rotation.heads_first, rotation.rotary_dim), ffi::ByteWidth(type), rotation.interleaved,
                     {array.x.untyped_data(), array.out.untyped_data(), angles.cos, angles.sin});
  }
  return ForHeads(type, packed, rotation.interleaved, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const int lanes = Lanes(int(rotation.rotary_dim / 2), kRotatedPairs<T, INTERLEAVED, PACKED>);
    const int rows = int(rotation.threads) / lanes;
    Operands<Operand<T>> operands{};
    uint32_t blocks = 0;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const Heads heads = HeadsOf(arrays[i].x, rotation.heads_first, rotation.rotary_dim);
      operands.of[i] = {static_cast<const T*>(arrays[i].x.untyped_data()), static_cast<T*>(arrays[i].out.untyped_data()), heads,
                        spans_of(heads, rotation.span)};
      blocks += (operands.of[i].spans.count + rows - 1) / rows;
      if (i == 0) operands.blocks = blocks;
    }
    if (blocks == 0) return ffi::Error::Success();
    return ForSpan<1, 2, 4>(angles.per_pair, rotation.span, [&]<bool PER_PAIR, int SPAN>() {
      rotate<T, INTERLEAVED, PACKED, PER_PAIR, SPAN>
          <<<blocks, dim3(lanes, rows), 0, stream>>>(operands, angles, rotation.inverse);
      return CheckLaunch(kName, "rotation");
    });
  });
}

ffi::Error RunRotate(cudaStream_t stream, Array query, Array key, Floats cos, Floats sin, int64_t rotary_dim, bool interleaved,
                     bool heads_first, bool inverse, int64_t span, int64_t threads, ffi::Result<Array> query_out,
                     ffi::Result<Array> key_out) {
  EJKERNEL_TRY(
      CheckRotate(query, key, cos, sin, rotary_dim, interleaved, heads_first, inverse, span, threads, query_out, key_out));
  const Angles angles{cos.typed_data(), sin.typed_data(), cos.dimensions()[0] == 1, sin.dimensions()[0] == 1,
                      cos.dimensions()[2] != rotary_dim};
  const Rotation rotation{rotary_dim, interleaved, heads_first, inverse, span, threads};
  const Rotated both[] = {{query, *query_out}, {key, *key_out}};
  if (query.element_type() == key.element_type()) return Rotate(stream, both, angles, rotation);
  EJKERNEL_TRY(Rotate(stream, {both, 1}, angles, rotation));
  return Rotate(stream, {both + 1, 1}, angles, rotation);
}

ffi::Error AngleGradientsOfOne(cudaStream_t stream, Array x, Array grad, Floats d_cos, Floats d_sin, const Heads& heads,
                               bool interleaved, bool add) {
  const bool packed = Packed(heads, ffi::ByteWidth(x.element_type()), interleaved, {x.untyped_data(), grad.untyped_data()});
  return ForHeads(x.element_type(), packed, interleaved, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const Dims dims = d_cos.dimensions();
    const int lanes = Lanes(heads.half, kPairs<T, INTERLEAVED, PACKED>);
    const int64_t blocks = dims[0] * dims[1];
    if (blocks > kMaxGrid) return Invalid(kName, std::to_string(blocks) + " rows of angles exceed the grid limit");
    angle_gradients<T, INTERLEAVED, PACKED, Identity><<<unsigned(blocks), dim3(lanes, kThreads / lanes), 0, stream>>>(
        static_cast<const T*>(x.untyped_data()), static_cast<const T*>(grad.untyped_data()), d_cos.typed_data(),
        d_sin.typed_data(), heads, dims[0] == 1, dims[2] == heads.half, add, Identity{});
    return CheckLaunch(kName, "gradients of cos and sin");
  });
}

ffi::Error RunAngleGradients(cudaStream_t stream, Array query, Array key, Array query_grad, Array key_grad, int64_t rotary_dim,
                             bool interleaved, bool heads_first, ffi::Result<Floats> d_cos, ffi::Result<Floats> d_sin) {
  EJKERNEL_TRY(CheckAngleGradients(query, key, query_grad, key_grad, rotary_dim, interleaved, heads_first, d_cos, d_sin));
  if (d_cos->element_count() == 0) return ffi::Error::Success();
  // Without heads the sums are empty, and the kernel writes zeros.
  EJKERNEL_TRY(AngleGradientsOfOne(stream, query, query_grad, *d_cos, *d_sin, HeadsOf(query, heads_first, rotary_dim),
                                   interleaved, false));
  if (key.element_count() == 0) return ffi::Error::Success();
  return AngleGradientsOfOne(stream, key, key_grad, *d_cos, *d_sin, HeadsOf(key, heads_first, rotary_dim), interleaved, true);
}

template <typename Binding>
auto BindRotate(Binding binding) {
  return std::move(binding)
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Floats>()
      .template Arg<Floats>()
      .template Attr<int64_t>("rotary_dim")
      .template Attr<bool>("interleaved")
      .template Attr<bool>("heads_first")
      .template Attr<bool>("inverse")
      .template Attr<int64_t>("span")
      .template Attr<int64_t>("threads")
      .template Ret<Array>()
      .template Ret<Array>();
}

template <typename Binding>
auto BindAngleGradients(Binding binding) {
  return std::move(binding)
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Array>()
      .template Attr<int64_t>("rotary_dim")
      .template Attr<bool>("interleaved")
      .template Attr<bool>("heads_first")
      .template Ret<Floats>()
      .template Ret<Floats>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_rope_rotate, BindRotate, RunRotate, CheckRotate)
EJKERNEL_HANDLER(ejkernel_cuda_rope_angle_gradients, BindAngleGradients, RunAngleGradients, CheckAngleGradients)

}  // namespace ejkernel::rope
