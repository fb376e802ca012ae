// Checks and head geometry that the handlers of rope and qk_norm_rope share.
//
// query and key are [batch, length, heads, channels], or [batch, heads, length, channels] with heads_first; an absent key has
// no heads. cos and sin are float32, each [1 or batch, length, rotary_dim or rotary_dim / 2].
#pragma once

#include <initializer_list>

#include "handler.h"
#include "rope/kernels.cuh"

namespace ejkernel::rope {

constexpr int64_t kMaxHeads = 0x7fffffff;  // of all tokens; kernels count them in 32 bits

inline ffi::Error CheckHeads(const char* operation, const char* name, Array x, Array query, bool heads_first,
                             int64_t rotary_dim) {
  EJKERNEL_TRY(CheckFloat(operation, name, x));
  const Dims dims = x.dimensions();
  if (dims.size() != 4) return Invalid(operation, std::string(name) + " must have 4 axes, got " + Text(dims));
  const Dims like = query.dimensions();
  const int token = heads_first ? 2 : 1;
  if (dims[0] != like[0] || dims[token] != like[token] || dims[3] != like[3]) {
    return Invalid(operation,
                   std::string(name) + " must have batch, length and channels of query " + Text(like) + ", got " + Text(dims));
  }
  if (rotary_dim < 2 || rotary_dim % 2 || rotary_dim > dims[3]) {
    return Invalid(operation,
                   "rotary_dim must be even and 2 ... " + std::to_string(dims[3]) + ", got " + std::to_string(rotary_dim));
  }
  if (dims[3] > (int64_t{1} << 30)) return Invalid(operation, "head size " + std::to_string(dims[3]) + " is above 2^30");
  if (x.element_count() / std::max<int64_t>(1, dims[3]) > kMaxHeads)
    return Invalid(operation, std::string(name) + " must have less than 2^31 heads of tokens, got " + Text(dims));
  return ffi::Error::Success();
}

inline ffi::Error CheckAngles(const char* operation, const char* name, Floats angles, Array query, bool heads_first,
                              int64_t rotary_dim) {
  const Dims dims = angles.dimensions(), like = query.dimensions();
  const int64_t length = like[heads_first ? 2 : 1];
  const bool fits = dims.size() == 3 && (dims[0] == 1 || dims[0] == like[0]) && dims[1] == length &&
                    (dims[2] == rotary_dim || dims[2] == rotary_dim / 2);
  if (fits) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " must be [1 or batch, length, rotary_dim or half of it] for query " +
                                Text(like) + ", got " + Text(dims));
}

// Check the heads of a row of threads, and the threads of a block.
inline ffi::Error CheckKnobs(const char* operation, int64_t span, std::initializer_list<int> spans, int64_t threads) {
  if (std::find(spans.begin(), spans.end(), span) == spans.end()) {
    std::string all;
    for (const int* one = spans.begin(); one != spans.end(); ++one)
      all += (one == spans.begin() ? "" : one + 1 == spans.end() ? " or " : ", ") + std::to_string(*one);
    return Invalid(operation, "span must be " + all + " heads, got " + std::to_string(span));
  }
  if (threads == 64 || threads == 128 || threads == 256) return ffi::Error::Success();
  return Invalid(operation, "threads must be 64, 128 or 256, got " + std::to_string(threads));
}

inline Heads HeadsOf(Array x, bool heads_first, int64_t rotary_dim) {
  const Dims dims = x.dimensions();
  const uint32_t length = uint32_t(dims[heads_first ? 2 : 1]);
  return {uint32_t(dims[0]),   length,     uint32_t(dims[heads_first ? 1 : 2]), heads_first ? length : 1, int(dims[3]),
          int(rotary_dim / 2), heads_first};
}

// Whether 16-byte vectors cover the rotated channels, and the others, of an array with so many bytes per element.
inline bool Packed(const Heads& heads, int64_t bytes, bool interleaved, std::initializer_list<const void*> arrays) {
  const int64_t pack = 16 / bytes;
  return heads.width % pack == 0 && (interleaved ? 2 * heads.half : heads.half) % pack == 0 &&
         std::all_of(arrays.begin(), arrays.end(), Aligned);
}

// Call `run.operator()<T, INTERLEAVED, PACKED>()`.
template <typename Run>
ffi::Error ForHeads(ffi::DataType type, bool packed, bool interleaved, Run run) {
  const auto choose = [&]<typename T>() {
    if (interleaved) return packed ? run.template operator()<T, true, true>() : run.template operator()<T, true, false>();
    return packed ? run.template operator()<T, false, true>() : run.template operator()<T, false, false>();
  };
  switch (type) {
    case ffi::F32: return choose.template operator()<float>();
    case ffi::BF16: return choose.template operator()<__nv_bfloat16>();
    default: return choose.template operator()<__half>();
  }
}

// Call `run.operator()<PER_PAIR, SPAN>()` for one of these spans.
template <int... SPANS, typename Run>
ffi::Error ForSpan(bool per_pair, int64_t span, Run run) {
  ffi::Error error;
  const auto choose = [&]<int SPAN>() {
    if (span != SPAN) return;
    error = per_pair ? run.template operator()<true, SPAN>() : run.template operator()<false, SPAN>();
  };
  (choose.template operator()<SPANS>(), ...);
  return error;
}

// Threads for the pairs of a head: a power of two up to a warp.
inline int Lanes(int half, int pairs) {
  int lanes = 1;
  while (lanes < 32 && lanes * pairs < half) lanes *= 2;
  return lanes;
}

}  // namespace ejkernel::rope
