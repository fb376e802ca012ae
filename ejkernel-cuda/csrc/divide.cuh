// Division: of 64-bit numbers that are mostly small, and by divisors known at launch.
#pragma once

#include "device.cuh"

namespace ejkernel {

// Quotient and remainder of value >= 0 by divisor > 0; in 32 bits if both fit, which takes a fifth of the time.
__device__ inline int64_t divide(int64_t value, int64_t divisor, int64_t& remainder) {
  if (((value | divisor) >> 32) == 0) {
    const uint32_t quotient = uint32_t(value) / uint32_t(divisor);
    remainder = uint32_t(value) - quotient * uint32_t(divisor);
    return quotient;
  }
  const int64_t quotient = value / divisor;
  remainder = value - quotient * divisor;
  return quotient;
}

// The same in 32 bits, for divisors that are often 1: the division takes ten times as long as the comparison.
__device__ inline int divide(int value, int divisor, int& remainder) {
  const int quotient = divisor == 1 ? value : int(unsigned(value) / unsigned(divisor));
  remainder = value - quotient * divisor;
  return quotient;
}

// A positive divisor of numbers below 2^31. The host precomputes it; the device multiplies and shifts.
struct Divisor {
  uint32_t value;
  uint32_t factor;  // 2^shift / value, rounded up
  int shift;

  __device__ uint32_t divide(uint32_t number) const { return uint32_t((uint64_t(number) * factor) >> shift); }
};

inline Divisor divisor(uint32_t value) {
  int bits = 0;  // 2^bits >= value, so that the factor's rounding error never changes a quotient
  while (bits < 31 && (uint32_t{1} << bits) < value) ++bits;
  return {value, uint32_t((uint64_t{1} << (31 + bits)) / value + 1), 31 + bits};
}

}  // namespace ejkernel
