"""The default order of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_MANY_ROWS, _VERY_MANY_ROWS = 256, 512
"""Between which XLA's, which unpacks once, is faster."""


def _quantized_on_triton(call: QuantizedMatmulCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: quantized_matmul_triton_h100.json, quantized_formats_triton_h100.json, quantized_experts_h100.json,
    orders_grid_recurrences_h200.json, orders_grid_recurrences_more_h200.json."""
    if call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.x.dtype} was not timed")
    if call.group_sizes is None and _MANY_ROWS < call.x.shape[1] <= _VERY_MANY_ROWS:
        return Priority(BEHIND_XLA, f"XLA's was faster for {_MANY_ROWS} to {_VERY_MANY_ROWS} rows")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _quantized_on_triton}}
