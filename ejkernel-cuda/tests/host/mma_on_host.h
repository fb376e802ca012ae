// Stand-ins for tensor cores on a host, with the fragment layouts of the PTX ISA; lanes exchange elements through their warp.
#pragma once

#include "device_on_host.h"

namespace ejkernel {
namespace host {

constexpr int kMatrix = 8, kDeep = 16;

inline uint16_t half_of(uint32_t word, int which) { return uint16_t(word >> 16 * which); }

// Lane, register and half of an operand's element: a [16, 16], b [16, 8].
struct FragmentElement {
  int lane, word, half;
};
inline FragmentElement element_of_a(int row, int column) {
  return {row % 8 * 4 + column % 8 / 2, row / 8 + 2 * (column / 8), column % 2};
}
inline FragmentElement element_of_b(int row, int column) { return {column * 4 + row % 8 / 2, row / 8, row % 2}; }

inline void load(uint32_t (&to)[4], const void* row, bool transposed) {
  Warp& here = warp();
  here.words[lane()] = reinterpret_cast<uint64_t>(row);
  if (here.words[lane()] % 16) {
    std::fprintf(stderr, "an ldmatrix row is not aligned to 16 bytes\n");
    std::abort();
  }
  __syncwarp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto element = [&](int i, int j) {
      return uint32_t(reinterpret_cast<const uint16_t*>(here.words[matrix * kMatrix + i])[j]);
    };
    const int line = lane() / 4, pair = lane() % 4 * 2;
    to[matrix] =
        transposed ? element(pair, line) | element(pair + 1, line) << 16 : element(line, pair) | element(line, pair + 1) << 16;
  }
  __syncwarp();
}

}  // namespace host

inline void ldmatrix_x4(uint32_t (&to)[4], const void* row) { host::load(to, row, false); }
inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* row) { host::load(to, row, true); }

inline uint32_t movmatrix_trans(uint32_t pair) {
  host::Warp& here = host::warp();
  here.words[host::lane()] = pair;
  __syncwarp();
  const auto element = [&](int row, int column) {
    return uint32_t(host::half_of(uint32_t(here.words[row * 4 + column / 2]), column % 2));
  };
  const int row = host::lane() / 4, column = host::lane() % 4 * 2;
  const uint32_t transposed = element(column, row) | element(column + 1, row) << 16;
  __syncwarp();
  return transposed;
}

template <typename T>
inline void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  auto& fragments = host::warp().fragments;
  uint32_t* mine = fragments[host::lane()];
  std::memcpy(mine, a, sizeof(a));
  mine[4] = b_low, mine[5] = b_high;
  __syncwarp();
  const auto number = [&](host::FragmentElement at, int first) {
    return float(__builtin_bit_cast(T, host::half_of(fragments[at.lane][first + at.word], at.half)));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = host::lane() / 4 + i / 2 * 8, column = host::lane() % 4 * 2 + i % 2;
    for (int k = 0; k < host::kDeep; ++k) {
      acc[i] += number(host::element_of_a(row, k), 0) * number(host::element_of_b(k, column), 4);
    }
  }
  __syncwarp();
}

}  // namespace ejkernel
