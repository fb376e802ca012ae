// XLA FFI handlers of qk_norm_rope: checks of shapes and dtypes, choice of the kernel, launch.
//
// A scale is float32, [0, channels] if absent, [1, channels] if the batch shares it, else [batch, channels].
#include <span>

#include "launch_rows.cuh"
#include "qk_norm_rope/kernels.cuh"
#include "rope/heads.cuh"

namespace ejkernel::qk_norm_rope {
namespace {

constexpr const char* kName = "qk_norm_rope";

struct Geometry {
  int64_t rotary_dim;
  bool interleaved, heads_first;
};

ffi::Error CheckHeads(Array query, Array key, Geometry geometry) {
  EJKERNEL_TRY(rope::CheckHeads(kName, "query", query, query, geometry.heads_first, geometry.rotary_dim));
  EJKERNEL_TRY(rope::CheckHeads(kName, "key", key, query, geometry.heads_first, geometry.rotary_dim));
  const int64_t width = query.dimensions()[3];
  if (width % 2 == 0 && width <= kMaxHeadSize) return ffi::Error::Success();
  return Invalid(kName,
                 "head size must be even and at most " + std::to_string(kMaxHeadSize) + ", got " + std::to_string(width));
}

ffi::Error CheckScale(const char* name, Floats scale, Array query) {
  const Dims dims = scale.dimensions(), like = query.dimensions();
  if (dims.size() == 2 && dims[1] == like[3] && (dims[0] == 0 || dims[0] == 1 || dims[0] == like[0]))
    return ffi::Error::Success();
  return Invalid(kName,
                 std::string(name) + " must be [0, 1 or batch, channels] of query " + Text(like) + ", got " + Text(dims));
}

int64_t CountHeads(Array x) { return x.dimensions()[0] * x.dimensions()[1] * x.dimensions()[2]; }

ffi::Error CheckStatistic(const char* name, Floats array, Array x, bool optional) {
  const int64_t count = array.element_count();
  if (count == CountHeads(x) || (optional && count == 0)) return ffi::Error::Success();
  return Invalid(kName, std::string(name) + " must have one value per head" + (optional ? " or none" : "") + ", got " +
                            Text(array.dimensions()));
}

ffi::Error CheckAngles(Floats cos, Floats sin, Array query, Geometry geometry) {
  EJKERNEL_TRY(rope::CheckAngles(kName, "cos", cos, query, geometry.heads_first, geometry.rotary_dim));
  EJKERNEL_TRY(rope::CheckAngles(kName, "sin", sin, query, geometry.heads_first, geometry.rotary_dim));
  if (cos.dimensions()[2] == sin.dimensions()[2]) return ffi::Error::Success();
  return Invalid(kName, "cos and sin must have the same channels");
}

ffi::Error CheckForward(Array query, Array key, Floats cos, Floats sin, Floats query_scale, Floats key_scale,
                        int64_t rotary_dim, bool interleaved, bool heads_first, float, float, int64_t span, int64_t threads,
                        ffi::Result<Array> query_out, ffi::Result<Array> key_out, ffi::Result<Floats> query_rstd,
                        ffi::Result<Floats> key_rstd) {
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  EJKERNEL_TRY(CheckHeads(query, key, geometry));
  EJKERNEL_TRY(CheckAngles(cos, sin, query, geometry));
  EJKERNEL_TRY(CheckScale("query_scale", query_scale, query));
  EJKERNEL_TRY(CheckScale("key_scale", key_scale, query));
  EJKERNEL_TRY(CheckLike(kName, "query_out", *query_out, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "key_out", *key_out, "key", key));
  EJKERNEL_TRY(CheckStatistic("query_rstd", *query_rstd, query, true));
  EJKERNEL_TRY(CheckStatistic("key_rstd", *key_rstd, key, true));
  return rope::CheckKnobs(kName, span, {4, 8}, threads);
}

ffi::Error CheckBackward(Array query, Array key, Floats query_rstd, Floats key_rstd, Array query_grad, Array key_grad,
                         Floats cos, Floats sin, Floats query_scale, Floats key_scale, int64_t rotary_dim, bool interleaved,
                         bool heads_first, float, int64_t span, int64_t partials, ffi::Result<Array> d_query,
                         ffi::Result<Array> d_key, ffi::Result<Array> d_query_scale, ffi::Result<Array> d_key_scale,
                         ffi::Result<Floats> query_partials, ffi::Result<Floats> key_partials) {
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  EJKERNEL_TRY(CheckHeads(query, key, geometry));
  EJKERNEL_TRY(CheckAngles(cos, sin, query, geometry));
  EJKERNEL_TRY(CheckStatistic("query_rstd", query_rstd, query, false));
  EJKERNEL_TRY(CheckStatistic("key_rstd", key_rstd, key, false));
  EJKERNEL_TRY(CheckLike(kName, "query_grad", query_grad, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "key_grad", key_grad, "key", key));
  EJKERNEL_TRY(CheckLike(kName, "d_query", *d_query, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "d_key", *d_key, "key", key));
  if (partials < 1) return Invalid(kName, "partials must be positive, got " + std::to_string(partials));
  const struct {
    const char* name;
    Floats scale;
    Array total;
    Floats partial;
  } operands[] = {{"query_scale", query_scale, *d_query_scale, *query_partials},
                  {"key_scale", key_scale, *d_key_scale, *key_partials}};
  for (const auto& operand : operands) {
    EJKERNEL_TRY(CheckScale(operand.name, operand.scale, query));
    if (!Same(operand.scale.dimensions(), operand.total.dimensions()))
      return Invalid(kName, std::string("the gradient of ") + operand.name + " must be like it");
    EJKERNEL_TRY(CheckFloat(kName, (std::string("the gradient of ") + operand.name).c_str(), operand.total));
    const Dims got = operand.partial.dimensions(), dims = operand.scale.dimensions();
    if (got.size() != 3 || got[0] != dims[0] || got[1] != partials || got[2] != dims[1]) {
      return Invalid(kName, std::string("partial sums of ") + operand.name + " must be [" + std::to_string(dims[0]) + ", " +
                                std::to_string(partials) + " partials, " + std::to_string(dims[1]) + "], got " + Text(got));
    }
  }
  if (span >= 1 && span <= (1 << 20)) return ffi::Error::Success();
  return Invalid(kName, "span must be 1 ... 2^20 heads, got " + std::to_string(span));
}

ffi::Error CheckAngleGradients(Array query, Array key, Floats query_rstd, Floats key_rstd, Array query_grad, Array key_grad,
                               Floats query_scale, Floats key_scale, int64_t rotary_dim, bool interleaved, bool heads_first,
                               float, ffi::Result<Floats> d_cos, ffi::Result<Floats> d_sin) {
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  EJKERNEL_TRY(CheckHeads(query, key, geometry));
  EJKERNEL_TRY(CheckStatistic("query_rstd", query_rstd, query, false));
  EJKERNEL_TRY(CheckStatistic("key_rstd", key_rstd, key, false));
  EJKERNEL_TRY(CheckLike(kName, "query_grad", query_grad, "query", query));
  EJKERNEL_TRY(CheckLike(kName, "key_grad", key_grad, "key", key));
  EJKERNEL_TRY(CheckScale("query_scale", query_scale, query));
  EJKERNEL_TRY(CheckScale("key_scale", key_scale, query));
  EJKERNEL_TRY(rope::CheckAngles(kName, "d_cos", *d_cos, query, heads_first, rotary_dim));
  if (!Same(d_cos->dimensions(), d_sin->dimensions())) return Invalid(kName, "d_sin must be like d_cos");
  return ffi::Error::Success();
}

Parameter AsParameter(Floats scale) {
  const int64_t batch = scale.dimensions()[0];
  return {batch ? scale.typed_data() : nullptr, batch > 1 ? scale.dimensions()[1] : 0};
}

Angles AsAngles(Floats cos, Floats sin, int64_t rotary_dim) {
  return {cos.typed_data(), sin.typed_data(), cos.dimensions()[0] == 1, sin.dimensions()[0] == 1,
          cos.dimensions()[2] != rotary_dim};
}

// Whether 16-byte vectors also cover the pass-through channels, paired like the rotated ones.
bool AllPacked(const Heads& heads, int64_t bytes, bool interleaved, std::initializer_list<const void*> arrays) {
  const bool rest = interleaved || (heads.width / 2 - heads.half) % (16 / bytes) == 0;
  return rest && rope::Packed(heads, bytes, interleaved, arrays);
}

// Threads of a head.
int LanesOf(const Heads& heads) { return rope::Lanes(heads.width / 2, kPairsPerThread); }

struct Normalising {
  Array x;
  Floats scale;
  Array out;
  Floats rstd;
};

// One launch for one or two arrays of one dtype.
ffi::Error Forward(cudaStream_t stream, std::span<const Normalising> arrays, const Angles& angles, Geometry geometry,
                   float epsilon, float scale_offset, int64_t span, int64_t threads) {
  const ffi::DataType type = arrays[0].x.element_type();
  const Heads first = rope::HeadsOf(arrays[0].x, geometry.heads_first, geometry.rotary_dim);
  bool packed = true;
  for (const Normalising& array : arrays) {
    packed &= AllPacked(first, ffi::ByteWidth(type), geometry.interleaved,
                        {array.x.untyped_data(), array.out.untyped_data(), array.scale.untyped_data(), angles.cos, angles.sin});
  }
  const int lanes = LanesOf(first), rows = int(threads) / lanes;
  return rope::ForHeads(type, packed, geometry.interleaved, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    Operands<Operand<T>> operands{};
    uint32_t blocks = 0;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [x, scale, out, rstd] = arrays[i];
      const Heads heads = rope::HeadsOf(x, geometry.heads_first, geometry.rotary_dim);
      operands.of[i] = {static_cast<const T*>(x.untyped_data()),
                        AsParameter(scale),
                        static_cast<T*>(out.untyped_data()),
                        rstd.element_count() ? rstd.typed_data() : nullptr,
                        heads,
                        rope::spans_of(heads, span)};
      blocks += (operands.of[i].spans.count + rows - 1) / rows;
      if (i == 0) operands.blocks = blocks;
    }
    if (blocks == 0) return ffi::Error::Success();
    return rope::ForSpan<4, 8>(angles.per_pair, span, [&]<bool PER_PAIR, int SPAN>() {
      norm_rotate<T, INTERLEAVED, PACKED, PER_PAIR, SPAN>
          <<<blocks, dim3(lanes, rows), 0, stream>>>(operands, angles, epsilon, scale_offset);
      return CheckLaunch(kName, "norm and rotation");
    });
  });
}

ffi::Error RunForward(cudaStream_t stream, Array query, Array key, Floats cos, Floats sin, Floats query_scale, Floats key_scale,
                      int64_t rotary_dim, bool interleaved, bool heads_first, float epsilon, float scale_offset, int64_t span,
                      int64_t threads, ffi::Result<Array> query_out, ffi::Result<Array> key_out, ffi::Result<Floats> query_rstd,
                      ffi::Result<Floats> key_rstd) {
  EJKERNEL_TRY(CheckForward(query, key, cos, sin, query_scale, key_scale, rotary_dim, interleaved, heads_first, epsilon,
                            scale_offset, span, threads, query_out, key_out, query_rstd, key_rstd));
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  const Angles angles = AsAngles(cos, sin, rotary_dim);
  const Normalising both[] = {{query, query_scale, *query_out, *query_rstd}, {key, key_scale, *key_out, *key_rstd}};
  const auto run = [&](std::span<const Normalising> arrays) {
    return Forward(stream, arrays, angles, geometry, epsilon, scale_offset, span, threads);
  };
  if (query.element_type() == key.element_type()) return run(both);
  EJKERNEL_TRY(run({both, 1}));
  return run({both + 1, 1});
}

// Resident blocks of kThreads of the device.
template <typename Kernel>
int64_t ResidentBlocks(Kernel kernel) {
  int device = 0, processors = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0);
  return int64_t(std::max(1, blocks)) * std::max(1, processors);
}

// Partial sums from up to `partials` blocks per scale; returns their number there.
ffi::Error BackwardOfOne(cudaStream_t stream, Array x, Floats rstd, Array grad, Floats scale, Array d_x, Floats partial,
                         const Angles& angles, Geometry geometry, float scale_offset, int64_t span, int64_t& partials) {
  const Heads heads = rope::HeadsOf(x, geometry.heads_first, geometry.rotary_dim);
  const int64_t groups = std::max<int64_t>(1, scale.dimensions()[0]);
  const bool packed =
      AllPacked(heads, ffi::ByteWidth(x.element_type()), geometry.interleaved,
                {x.untyped_data(), grad.untyped_data(), d_x.untyped_data(), scale.untyped_data(), angles.cos, angles.sin});
  if (groups * partials > kMaxGrid) return Invalid(kName, std::to_string(groups * partials) + " blocks exceed the grid limit");
  return rope::ForHeads(x.element_type(), packed, geometry.interleaved, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    auto kernel = gradients<T, INTERLEAVED, PACKED>;
    const int lanes = LanesOf(heads), rows = kThreads / lanes;
    const Spans spans = rope::spans_of(heads, span);
    const int64_t spans_per_group = spans.count / groups;
    const int64_t most = std::min(ResidentBlocks(kernel) / groups, (spans_per_group + rows - 1) / rows);
    partials = std::clamp<int64_t>(most, 1, partials);
    kernel<<<unsigned(groups * partials), dim3(lanes, rows), 0, stream>>>(
        static_cast<const T*>(x.untyped_data()), rstd.typed_data(), static_cast<const T*>(grad.untyped_data()),
        AsParameter(scale), static_cast<T*>(d_x.untyped_data()), scale.dimensions()[0] ? partial.typed_data() : nullptr, angles,
        heads, spans, unsigned(spans_per_group), unsigned(partials), scale_offset);
    return CheckLaunch(kName, "gradients");
  });
}

ffi::Error RunBackward(cudaStream_t stream, Array query, Array key, Floats query_rstd, Floats key_rstd, Array query_grad,
                       Array key_grad, Floats cos, Floats sin, Floats query_scale, Floats key_scale, int64_t rotary_dim,
                       bool interleaved, bool heads_first, float scale_offset, int64_t span, int64_t partials,
                       ffi::Result<Array> d_query, ffi::Result<Array> d_key, ffi::Result<Array> d_query_scale,
                       ffi::Result<Array> d_key_scale, ffi::Result<Floats> query_partials, ffi::Result<Floats> key_partials) {
  EJKERNEL_TRY(CheckBackward(query, key, query_rstd, key_rstd, query_grad, key_grad, cos, sin, query_scale, key_scale,
                             rotary_dim, interleaved, heads_first, scale_offset, span, partials, d_query, d_key, d_query_scale,
                             d_key_scale, query_partials, key_partials));
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  const Angles angles = AsAngles(cos, sin, rotary_dim);
  // Without heads there are no spans, and the kernel writes empty partial sums.
  int64_t of_query = partials, of_key = partials;
  EJKERNEL_TRY(BackwardOfOne(stream, query, query_rstd, query_grad, query_scale, *d_query, *query_partials, angles, geometry,
                             scale_offset, span, of_query));
  EJKERNEL_TRY(BackwardOfOne(stream, key, key_rstd, key_grad, key_scale, *d_key, *key_partials, angles, geometry, scale_offset,
                             span, of_key));
  const int64_t width = query.dimensions()[3];
  const PartialSums first = PartialSumsOf(*query_partials, *d_query_scale, of_query),
                    second = PartialSumsOf(*key_partials, *d_key_scale, of_key);
  return LaunchSum(kName, stream, first, second, width);
}

ffi::Error AngleGradientsOfOne(cudaStream_t stream, Array x, Floats rstd, Array grad, Floats scale, Floats d_cos, Floats d_sin,
                               Geometry geometry, float scale_offset, bool add) {
  const Heads heads = rope::HeadsOf(x, geometry.heads_first, geometry.rotary_dim);
  const bool packed = rope::Packed(heads, ffi::ByteWidth(x.element_type()), geometry.interleaved,
                                   {x.untyped_data(), grad.untyped_data(), scale.untyped_data()});
  return rope::ForHeads(x.element_type(), packed, geometry.interleaved, [&]<typename T, bool INTERLEAVED, bool PACKED>() {
    const Dims dims = d_cos.dimensions();
    const int lanes = rope::Lanes(heads.half, kPairs<T, INTERLEAVED, PACKED>);
    const int64_t blocks = dims[0] * dims[1];
    if (blocks > kMaxGrid) return Invalid(kName, std::to_string(blocks) + " rows of angles exceed the grid limit");
    rope::angle_gradients<T, INTERLEAVED, PACKED, Normalised><<<unsigned(blocks), dim3(lanes, kThreads / lanes), 0, stream>>>(
        static_cast<const T*>(x.untyped_data()), static_cast<const T*>(grad.untyped_data()), d_cos.typed_data(),
        d_sin.typed_data(), heads, dims[0] == 1, dims[2] == heads.half, add,
        Normalised{rstd.typed_data(), AsParameter(scale), scale_offset});
    return CheckLaunch(kName, "gradients of cos and sin");
  });
}

ffi::Error RunAngleGradients(cudaStream_t stream, Array query, Array key, Floats query_rstd, Floats key_rstd, Array query_grad,
                             Array key_grad, Floats query_scale, Floats key_scale, int64_t rotary_dim, bool interleaved,
                             bool heads_first, float scale_offset, ffi::Result<Floats> d_cos, ffi::Result<Floats> d_sin) {
  EJKERNEL_TRY(CheckAngleGradients(query, key, query_rstd, key_rstd, query_grad, key_grad, query_scale, key_scale, rotary_dim,
                                   interleaved, heads_first, scale_offset, d_cos, d_sin));
  if (d_cos->element_count() == 0) return ffi::Error::Success();
  const Geometry geometry{rotary_dim, interleaved, heads_first};
  // Without heads the sums are empty, and the kernel writes zeros.
  EJKERNEL_TRY(
      AngleGradientsOfOne(stream, query, query_rstd, query_grad, query_scale, *d_cos, *d_sin, geometry, scale_offset, false));
  if (key.element_count() == 0) return ffi::Error::Success();
  return AngleGradientsOfOne(stream, key, key_rstd, key_grad, key_scale, *d_cos, *d_sin, geometry, scale_offset, true);
}

template <typename Binding>
auto BindGeometry(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("rotary_dim")
      .template Attr<bool>("interleaved")
      .template Attr<bool>("heads_first");
}

template <typename Binding>
auto BindForward(Binding binding) {
  return BindGeometry(std::move(binding)
                          .template Arg<Array>()
                          .template Arg<Array>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Floats>())
      .template Attr<float>("epsilon")
      .template Attr<float>("scale_offset")
      .template Attr<int64_t>("span")
      .template Attr<int64_t>("threads")
      .template Ret<Array>()
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>();
}

template <typename Binding>
auto BindBackward(Binding binding) {
  return BindGeometry(std::move(binding)
                          .template Arg<Array>()
                          .template Arg<Array>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Array>()
                          .template Arg<Array>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Floats>())
      .template Attr<float>("scale_offset")
      .template Attr<int64_t>("span")
      .template Attr<int64_t>("partials")
      .template Ret<Array>()
      .template Ret<Array>()
      .template Ret<Array>()
      .template Ret<Array>()
      .template Ret<Floats>()
      .template Ret<Floats>();
}

template <typename Binding>
auto BindAngleGradients(Binding binding) {
  return BindGeometry(std::move(binding)
                          .template Arg<Array>()
                          .template Arg<Array>()
                          .template Arg<Floats>()
                          .template Arg<Floats>()
                          .template Arg<Array>()
                          .template Arg<Array>()
                          .template Arg<Floats>()
                          .template Arg<Floats>())
      .template Attr<float>("scale_offset")
      .template Ret<Floats>()
      .template Ret<Floats>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_qk_norm_rope_forward, BindForward, RunForward, CheckForward)
EJKERNEL_HANDLER(ejkernel_cuda_qk_norm_rope_backward, BindBackward, RunBackward, CheckBackward)
EJKERNEL_HANDLER(ejkernel_cuda_qk_norm_rope_angle_gradients, BindAngleGradients, RunAngleGradients, CheckAngleGradients)

}  // namespace ejkernel::qk_norm_rope
