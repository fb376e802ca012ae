// Checks that handlers of paged KV caches share.
#pragma once

#include "handler.h"
#include "pages.cuh"

namespace ejkernel {

using Strides = ffi::Span<const int64_t>;

inline bool IsOneByte(ffi::DataType type) { return type == ffi::S8 || type == ffi::F8E4M3FN || type == ffi::F8E5M2; }

inline bool SharedOr(int64_t got, int64_t batch) { return got == 1 || got == batch; }

inline ffi::Error CheckRequests(const char* operation, int64_t batch, Integers starts, Integers lengths, Integers tables) {
  const Dims from = starts.dimensions(), many = lengths.dimensions(), table = tables.dimensions();
  if (many.size() != 2 || !SharedOr(many[0], batch))
    return Invalid(operation, "lengths must be [1 or batch, requests], got " + Text(many));
  if (from.size() != 2 || !SharedOr(from[0], batch) || from[1] != many[1] + 1) {
    return Invalid(operation, "starts must be [1 or batch, requests + 1] for lengths " + Text(many) + ", got " + Text(from));
  }
  if (table.size() != 3 || !SharedOr(table[0], batch) || table[1] != many[1]) {
    return Invalid(operation,
                   "tables must be [1 or batch, requests, pages] for lengths " + Text(many) + ", got " + Text(table));
  }
  return ffi::Error::Success();
}

// Check that `heads` heads of `size` elements of `batch` members lie within the pages.
inline ffi::Error CheckStrides(const char* operation, const char* name, Strides strides, int64_t first, int64_t batch,
                               int64_t heads, int64_t size, Array pages, int64_t page_count, int64_t page_size) {
  if (strides.size() != 4) return Invalid(operation, std::string(name) + " strides must be of page, token, head and batch");
  if (batch * heads * size * page_count * page_size == 0) return ffi::Error::Success();
  const int64_t last = first + (page_count - 1) * strides[0] + (page_size - 1) * strides[1] + (heads - 1) * strides[2] +
                       (batch - 1) * strides[3] + size - 1;
  const bool negative = first < 0 || std::any_of(strides.begin(), strides.end(), [](int64_t stride) { return stride < 0; });
  if (!negative && last < int64_t(pages.element_count())) return ffi::Error::Success();
  return Invalid(operation, std::string(name) + " strides reach element " + std::to_string(last) + " of pages " +
                                Text(pages.dimensions()));
}

inline Requests AsRequests(Integers starts, Integers lengths, Integers tables, int64_t tokens, int64_t pages,
                           int64_t page_size) {
  return {starts.typed_data(),
          lengths.typed_data(),
          tables.typed_data(),
          starts.dimensions()[0] == 1,
          lengths.dimensions()[0] == 1,
          tables.dimensions()[0] == 1,
          tokens,
          lengths.dimensions()[1],
          tables.dimensions()[2],
          pages,
          page_size};
}

}  // namespace ejkernel
