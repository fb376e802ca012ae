"""The default order of `paged_cache_update`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, forward_on_triton

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": forward_on_triton, "cuda": BEHIND_TRITON}}
"""benchmarks/results/bench_h200.json: an update of 64 requests takes a kernel 3.4 us, XLA's scatters 22 us and more;
bench_cuda_pages_h200.json: CUDA's 4.2 us."""
