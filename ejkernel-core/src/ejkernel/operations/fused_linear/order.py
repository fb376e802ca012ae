"""The default order of `fused_linear`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.operations.fused_linear.interface import FusedLinearCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEW_ROWS = 2


def _on_triton(call: FusedLinearCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/fused_linear_h200.json, bfloat16: 1.01 to 1.35 times as fast as XLA for one or two rows, 0.8 to 1.2 times
    for 4 to 16, and slower for 64 in a served model."""
    if call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.x.dtype} was not timed")
    if call.x.shape[0] * call.x.shape[1] > _FEW_ROWS:
        return Priority(BEHIND_XLA, f"XLA's was as fast or faster for more than {_FEW_ROWS} rows")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
