// XLA FFI handler of paged_cache_update: checks of shapes and dtypes, choice of the kernel, launch.
//
// key and value are [batch, tokens, heads, size]; an absent scale has no columns. Of pages only the number of elements and four
// strides (page, token, head, batch) matter; values within the array of keys begin at `first_value` and have an empty array of
// their own. Both arrays of pages are results that alias the arguments.
#include <bit>

#include "check_pages.h"
#include "paged_cache_update/kernels.cuh"

namespace ejkernel::paged_cache_update {
namespace {

constexpr const char* kName = "paged_cache_update";

struct Sizes {
  int64_t batch, tokens, heads;
};

ffi::Error CheckNew(const char* name, Array array, Array like, Array pages, Floats scale) {
  const Dims dims = array.dimensions(), first = like.dimensions(), factors = scale.dimensions();
  if (dims.size() != 4 || !std::equal(dims.begin(), dims.begin() + 3, first.begin())) {
    return Invalid(kName,
                   std::string(name) + " must be [batch, tokens, heads, size] as key " + Text(first) + ", got " + Text(dims));
  }
  if (dims[2] * dims[3] > kMaxGrid) return Invalid(kName, std::string(name) + " has more than 2^31 - 1 elements of one token");
  const bool absent = factors.size() == 2 && factors[1] == 0;
  if (!absent && (factors.size() != 2 || !SharedOr(factors[0], dims[0]) || !SharedOr(factors[1], dims[2]))) {
    return Invalid(kName, std::string(name) + "'s scale must be [1 or batch, 0, 1 or heads], got " + Text(factors));
  }
  if (array.element_type() == pages.element_type() && absent) return ffi::Error::Success();
  return CheckFloat(kName, name, array);
}

ffi::Error Check(Array key, Array value, Integers starts, Integers lengths, Integers tables, Floats key_scale,
                 Floats value_scale, Array key_pages, Array value_pages, Strides key_strides, Strides value_strides,
                 int64_t first_value, int64_t pages, int64_t page_size, bool fused, int64_t threads, int64_t tokens,
                 ffi::Result<Array> key_out, ffi::Result<Array> value_out) {
  const ffi::DataType type = key_pages.element_type();
  if (!IsFloat(type) && !IsOneByte(type)) {
    return Invalid(kName, "pages must be float32, bfloat16, float16, int8, float8_e4m3fn or float8_e5m2");
  }
  if (value_pages.element_type() != type) return Invalid(kName, "key and value pages must have one type");
  if (key.dimensions().size() != 4)
    return Invalid(kName, "key must be [batch, tokens, heads, size], got " + Text(key.dimensions()));
  EJKERNEL_TRY(CheckNew("key", key, key, key_pages, key_scale));
  EJKERNEL_TRY(CheckNew("value", value, key, key_pages, value_scale));
  EJKERNEL_TRY(CheckLike(kName, "key_out", *key_out, "key_pages", key_pages));
  EJKERNEL_TRY(CheckLike(kName, "value_out", *value_out, "value_pages", value_pages));
  EJKERNEL_TRY(CheckRequests(kName, key.dimensions()[0], starts, lengths, tables));
  if (pages < 0 || page_size < 0) return Invalid(kName, "pages and page_size must not be negative");
  const Dims dims = key.dimensions();
  EJKERNEL_TRY(CheckStrides(kName, "key", key_strides, 0, dims[0], dims[2], dims[3], key_pages, pages, page_size));
  EJKERNEL_TRY(CheckStrides(kName, "value", value_strides, first_value, dims[0], dims[2], value.dimensions()[3],
                            fused ? key_pages : value_pages, pages, page_size));
  if (threads < 32 || threads > 512 || (threads & (threads - 1))) {
    return Invalid(kName, "threads must be a power of two, 32 ... 512, got " + std::to_string(threads));
  }
  if (tokens < 1 || tokens > kMaxTokens) {
    return Invalid(kName, "tokens must be 1 ... 32, got " + std::to_string(tokens));
  }
  if (dims[0] * dims[1] > kMaxGrid) return Invalid(kName, "more than 2^31 - 1 tokens");
  return ffi::Error::Success();
}

// Keys or values, before dispatch by type.
struct KvSource {
  Array from;
  Floats scale;
  char* pages;
  Strides strides;

  bool copies(ffi::DataType type) const { return from.element_type() == type && scale.element_count() == 0; }

  // Whether packs of `count` elements can move as vectors, from 16 bytes to `bytes` each.
  bool packs(int64_t count, int64_t bytes) const {
    const int64_t access = std::min<int64_t>(16, count * bytes);
    const auto whole = [&](int64_t stride) { return stride * bytes % access == 0; };
    return from.dimensions()[3] % count == 0 && Aligned(from.untyped_data()) &&
           reinterpret_cast<uintptr_t>(pages) % access == 0 && std::all_of(strides.begin(), strides.end(), whole);
  }
};

template <typename From, typename To>
PageWrite<From, To> AsPageWrite(const KvSource& source) {
  const Dims dims = source.from.dimensions(), factors = source.scale.dimensions();
  const bool scaled = source.scale.element_count() > 0;
  return {static_cast<const From*>(source.from.untyped_data()),
          reinterpret_cast<To*>(source.pages),
          scaled ? source.scale.typed_data() : nullptr,
          source.strides[0],
          source.strides[1],
          source.strides[2],
          dims[0] > 1 ? source.strides[3] : 0,
          scaled && factors[0] > 1 ? factors[1] : 0,
          scaled && factors[1] > 1 ? 1 : 0,
          int(dims[2]),
          int(dims[3])};
}

// Threads for the packs of one token, and as many tokens in parallel as the other threads serve.
dim3 BlockOf(int64_t packs, int64_t threads, int64_t tokens) {
  const int64_t wide = std::min<int64_t>(threads, std::bit_ceil(uint64_t(std::max<int64_t>(packs, 1))));
  const int64_t high = std::min<int64_t>(threads / wide, std::bit_ceil(uint64_t(tokens)));
  return dim3(unsigned(std::max<int64_t>(wide, 32 / high)), unsigned(high));
}

struct Runner {
  cudaStream_t stream;
  Requests requests;
  int64_t rows, threads, tokens;
  const KvSource* first;
  const KvSource* second;  // null for none

  template <typename From, typename To, int N>
  ffi::Error launch() const {
    const PageWrite<From, To> one = AsPageWrite<From, To>(*first),
                              other = second ? AsPageWrite<From, To>(*second) : PageWrite<From, To>{};
    const int64_t packs = std::max(one.heads * (one.size / N), other.heads * (other.size / N));
    const dim3 block = BlockOf(packs, threads, tokens);
    const int64_t blocks = (rows + tokens - 1) / tokens;
    update_pages<From, To, N><<<unsigned(blocks), block, 0, stream>>>(requests, one, other, rows, int(tokens));
    return CheckLaunch(kName, "update");
  }

  template <typename From, typename To>
  ffi::Error packed() const {
    constexpr int N = 16 / sizeof(From);
    const bool fits = first->packs(N, sizeof(To)) && (!second || second->packs(N, sizeof(To)));
    return fits ? launch<From, To, N>() : launch<From, To, 1>();
  }

  template <typename From>
  ffi::Error converted(ffi::DataType type) const {
    switch (type) {
      case ffi::F32: return packed<From, float>();
      case ffi::BF16: return packed<From, __nv_bfloat16>();
      case ffi::F16: return packed<From, __half>();
      case ffi::S8: return packed<From, Int8>();
      case ffi::F8E4M3FN: return packed<From, E4M3>();
      default: return packed<From, E5M2>();
    }
  }

  ffi::Error run(ffi::DataType type) const {
    if (first->copies(type)) {
      switch (ffi::ByteWidth(type)) {
        case 1: return packed<Bits<1>, Bits<1>>();
        case 2: return packed<Bits<2>, Bits<2>>();
        default: return packed<Bits<4>, Bits<4>>();
      }
    }
    switch (first->from.element_type()) {
      case ffi::F32: return converted<float>(type);
      case ffi::BF16: return converted<__nv_bfloat16>(type);
      default: return converted<__half>(type);
    }
  }
};

ffi::Error Run(cudaStream_t stream, Array key, Array value, Integers starts, Integers lengths, Integers tables,
               Floats key_scale, Floats value_scale, Array key_pages, Array value_pages, Strides key_strides,
               Strides value_strides, int64_t first_value, int64_t pages, int64_t page_size, bool fused, int64_t threads,
               int64_t tokens, ffi::Result<Array> key_out, ffi::Result<Array> value_out) {
  EJKERNEL_TRY(Check(key, value, starts, lengths, tables, key_scale, value_scale, key_pages, value_pages, key_strides,
                     value_strides, first_value, pages, page_size, fused, threads, tokens, key_out, value_out));
  EJKERNEL_TRY(CopyUnlessInPlace(kName, stream, key_pages, *key_out));
  EJKERNEL_TRY(CopyUnlessInPlace(kName, stream, value_pages, *value_out));
  const Dims dims = key.dimensions();
  const int64_t rows = dims[0] * dims[1], table_width = tables.dimensions()[2];
  if (rows * dims[2] * lengths.dimensions()[1] * table_width * pages * page_size == 0) return ffi::Error::Success();
  const ffi::DataType type = key_pages.element_type();
  const Requests requests = AsRequests(starts, lengths, tables, dims[1], pages, page_size);
  char* values =
      static_cast<char*>((fused ? *key_out : *value_out).untyped_data()) + first_value * int64_t(ffi::ByteWidth(type));
  const KvSource sources[] = {{key, key_scale, static_cast<char*>(key_out->untyped_data()), key_strides},
                              {value, value_scale, values, value_strides}};
  const bool one_launch = key.element_type() == value.element_type() && sources[0].copies(type) == sources[1].copies(type);
  if (one_launch && key.element_count() && value.element_count()) {
    return Runner{stream, requests, rows, threads, tokens, &sources[0], &sources[1]}.run(type);
  }
  for (const KvSource& source : sources) {
    if (source.from.element_count())
      EJKERNEL_TRY((Runner{stream, requests, rows, threads, tokens, &source, nullptr}.run(type)));
  }
  return ffi::Error::Success();
}

template <typename Binding>
auto Bind(Binding binding) {
  return std::move(binding)
      .template Arg<Array>()
      .template Arg<Array>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Integers>()
      .template Arg<Floats>()
      .template Arg<Floats>()
      .template Arg<Array>()
      .template Arg<Array>()
      .template Attr<Strides>("key_strides")
      .template Attr<Strides>("value_strides")
      .template Attr<int64_t>("first_value")
      .template Attr<int64_t>("pages")
      .template Attr<int64_t>("page_size")
      .template Attr<bool>("fused")
      .template Attr<int64_t>("threads")
      .template Attr<int64_t>("tokens")
      .template Ret<Array>()
      .template Ret<Array>();
}

}  // namespace

EJKERNEL_HANDLER(ejkernel_cuda_paged_cache_update_forward, Bind, Run, Check)

}  // namespace ejkernel::paged_cache_update
