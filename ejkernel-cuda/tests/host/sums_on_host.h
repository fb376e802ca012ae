// The reduction of partial sums on a host, as launched.
#pragma once

#include "reduce.cuh"

namespace {

using namespace ejkernel;

template <int N>
void sum_of(const PartialSums& first, const PartialSums& second, int64_t width) {
  const int lanes = sum_lanes<N>(std::max(first.partials, second.partials)), columns = lanes * N;
  host::launch(unsigned((first.groups + second.groups) * ((width + columns - 1) / columns)), {kSumThreads, 1}, 1,
               [&] { sum_partials<N>(first, second, width, lanes); });
}

void sum(const PartialSums& first, const PartialSums& second, int64_t width) {
  width % 4 ? sum_of<1>(first, second, width) : sum_of<4>(first, second, width);
}

}  // namespace
