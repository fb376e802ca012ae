"""The default order of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, FIRST, TRITON, Priority
from ejkernel.operations.common.rows.order import TRITON_WAS_FASTER, is_small
from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _on_cuda(call: QkNormRopeCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_cuda_rows_h200.json, orders_grid_pages_h200.json."""
    if phase == "forward" or is_small(call.query):
        return Priority(BEHIND_TRITON, TRITON_WAS_FASTER)
    return Priority(FIRST)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"cuda": _on_cuda, "triton": TRITON}}
"""benchmarks/results/orders_grid_pages_h200.json: Triton's 1.6 to 3.2 times as fast as XLA forward, 1.8 to 3.2 times backward."""
