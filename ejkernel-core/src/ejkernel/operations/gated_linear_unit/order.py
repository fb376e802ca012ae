"""The default order of `gated_linear_unit`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.gated_linear_unit.interface import GatedLinearUnitCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _on_triton(call: GatedLinearUnitCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: of one array 1.0 to 1.8 times as fast as XLA, backward to 2.5 (orders_grid_losses_more_h200.json); of two
    1.1 and 1.0 (orders_grid_losses_h200.json), on an H100 0.99 to 1.00 (glu_sample_triton_h100.json)."""
    if call.up is not None:
        return Priority(BEHIND_XLA, "XLA's is about as fast for two arrays, and may be fused")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
