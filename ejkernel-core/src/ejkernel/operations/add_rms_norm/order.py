"""The default order of `add_rms_norm`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.operations.common.order import BEHIND_TRITON, FIRST, TRITON, Priority
from ejkernel.operations.common.rows.order import TRITON_WAS_FASTER, is_small
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _on_cuda(call: AddRmsNormCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_cuda_rows_h200.json, orders_grid_pages_h200.json."""
    return Priority(BEHIND_TRITON, TRITON_WAS_FASTER) if is_small(call.x) else Priority(FIRST)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"cuda": _on_cuda, "triton": TRITON}}
"""benchmarks/results/orders_grid_pages_h200.json: Triton's forward 1.2 to 2.4 times as fast as XLA, backward 1.3 to
3.5 times; gradients of up to 16 rows 0.8 to 0.9 times."""
