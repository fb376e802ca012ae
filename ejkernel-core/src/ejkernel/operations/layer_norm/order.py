"""The default order of `layer_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.common.rows.order import norm_on_cuda
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _layer_norm_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: rows_cuda_h200.json, bench_cuda_rows_h200.json, orders_grid_pages_h200.json."""
    return norm_on_cuda(call, phase, fewest=4096, narrow=1024)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _layer_norm_on_cuda}}
"""benchmarks/results/rows_h200.json: Triton's forward 1.07 to 2.2 times as fast as XLA, backward 1.08 to 2.7 times."""
