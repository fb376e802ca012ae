"""Which calls of `fused_linear` these kernels run."""

from __future__ import annotations

from ejkernel.operations.fused_linear.interface import FusedLinearCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

MAX_ROWS = 64
"""Rows of one weight: from there on, general products read it often enough from caches."""
MAX_PROGRAMS = 2**31 - 2**16
MAX_WIDTH = 2**23
"""Widest row for which a tile has 32-bit offsets; rows of weights have 64-bit ones."""
NAMES = ("x", "weight", "norm_scale", "bias", "residual")


def rows_of(call: FusedLinearCall) -> tuple[int, int]:
    """Batches of rows with a weight, norm or bias of their own, and rows in each: all are one batch where these are shared."""
    batch, rows, _ = call.x.shape
    parameters = (call.weight, call.norm_scale, call.bias)
    shared = all(spec is None or spec.shape[0] == 1 for spec in parameters)
    return (1, batch * rows) if shared else (batch, rows)


def supports_forward(call: FusedLinearCall, target: Target) -> str | None:
    batch, rows = rows_of(call)
    inner = call.x.shape[2]
    if rows > MAX_ROWS:
        return f"{rows} rows are above {MAX_ROWS}, for which these kernels are made"
    if inner == 0:
        return "K = 0"
    if inner > MAX_WIDTH:
        return f"K = {inner} is above {MAX_WIDTH}, the widest row that a tile addresses"
    if max(batch, rows) * call.weight.shape[1] > MAX_PROGRAMS:
        return f"{batch} x {rows} rows and {call.weight.shape[1]} of a weight are more than {MAX_PROGRAMS} results"
    return refusal(target, {name: getattr(call, name) for name in NAMES}, FLOATS)
