"""Which calls of `fused_linear` these kernels run."""

from __future__ import annotations

from ejkernel.operations.fused_linear.interface import FusedLinearCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._rows.capability import supports_norm
from ejkernel_triton.fused_linear.parts import norm_call, unit_call
from ejkernel_triton.gated_linear_unit.capability import supports_forward as supports_unit

MAX_ROWS = 64
"""Of one weight, in one kernel: from there on, general products read it often enough from caches."""
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


def in_one_kernel(call: FusedLinearCall) -> bool:
    """Whether rows are few enough, and there are inputs to sum over."""
    return rows_of(call)[1] <= MAX_ROWS and call.x.shape[2] > 0


def supports_forward(call: FusedLinearCall, target: Target) -> str | None:
    if not in_one_kernel(call):
        return supports_backward(call, target)
    batch, rows = rows_of(call)
    inner = call.x.shape[2]
    if inner > MAX_WIDTH:
        return f"K = {inner} is above {MAX_WIDTH}, the widest row that a tile addresses"
    if max(batch, rows) * call.weight.shape[1] > MAX_PROGRAMS:
        return f"{batch} x {rows} rows and {call.weight.shape[1]} of a weight are more than {MAX_PROGRAMS} results"
    return refusal(target, {name: getattr(call, name) for name in NAMES}, FLOATS)


def supports_backward(call: FusedLinearCall, target: Target) -> str | None:
    norming, gating = norm_call(call), unit_call(call)
    if norming is not None and (problem := supports_norm(norming, target)):
        return problem
    if gating is not None and (problem := supports_unit(gating, target)):
        return problem
    return refusal(target, {name: getattr(call, name) for name in NAMES}, FLOATS)
