"""The default order of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import FIRST

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"cuda": FIRST}}
"""benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.35 times as fast as XLA forward, 2.7 times backward."""
