"""The default order of `grouped_matmul`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import AHEAD_OF_TRITON, BEHIND_TRITON, HALVES, TRITON, UNMEASURED, Priority
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 64
"""Of each matrix, forward."""
_UNTIMED_PRODUCTS = {
    "existing_out": "added results",
    "rhs_scale": "scaled matrices",
    "bias": "biases",
    "lhs_scale": "scaled rows",
}


def _grouped_matmul_on_mosaic_gpu(call: GroupedMatmulCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_h200.json, orders_grid_pages_h200.json."""
    rows, groups = call.lhs.shape[1], call.rhs.shape[1]
    if untimed := _untimed_product(call):
        alone = call.in_float8 or call.lhs_scale is not None  # Triton runs neither: behind it would be before XLA
        return Priority(UNMEASURED if alone else BEHIND_TRITON, f"{untimed} were not timed")
    if phase == "forward" and rows < _FEWEST_ROWS * groups:
        return Priority(BEHIND_TRITON, f"Triton's was as fast or faster for fewer than {_FEWEST_ROWS} rows of each matrix")
    return Priority(AHEAD_OF_TRITON)


def _untimed_product(call: GroupedMatmulCall) -> str:
    """What of a call is far from all that was timed; empty if nothing is."""
    inner = call.lhs.shape[2]
    if call.in_float8:
        return f"products of {call.lhs.dtype}"
    if inner % 64 or call.columns % 64:
        return f"matrices of {inner} x {call.columns}, which are copied to multiples of 64,"
    if call.preferred_element_type not in HALVES:
        return f"results in {call.preferred_element_type}"
    return next((what for field, what in _UNTIMED_PRODUCTS.items() if getattr(call, field) is not None), "")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "pallas.mosaic_gpu": _grouped_matmul_on_mosaic_gpu}}
"""benchmarks/results/bench_h200.json: Triton 3.1 to 4.9 times as fast as XLA forward, 3.8 to 7.6 times backward; in float32 1.25 to
1.4 and 1.02 to 1.4 times (bench_float32_h200.json)."""
