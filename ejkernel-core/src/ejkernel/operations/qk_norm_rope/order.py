"""The default order of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import FIRST, TRITON

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"cuda": FIRST, "triton": TRITON}}
"""benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.35 times as fast as XLA forward, 2.7 times backward.
benchmarks/results/vocabulary_triton_h200.json: Triton's 1.5 times as fast as XLA forward, 2.5 times with gradients."""
