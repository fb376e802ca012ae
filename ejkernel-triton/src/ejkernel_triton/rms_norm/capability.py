"""Which calls of `rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

WIDEST_FORWARD = 65536
"""A program holds a whole row in registers."""
WIDEST_BACKWARD = 16384
"""A program holds a row of x, of the gradient and of each parameter's partial sum."""
MOST_ROWS = 2**31 - 2**16
"""Rows are counted in 32 bits; elements in 64."""


def supports_forward(call: RmsNormCall, target: Target) -> str | None:
    return _refusal(call, target, WIDEST_FORWARD)


def supports_backward(call: RmsNormCall, target: Target) -> str | None:
    return _refusal(call, target, WIDEST_BACKWARD)


def _refusal(call: RmsNormCall, target: Target, widest: int) -> str | None:
    width = call.x.shape[-1]
    if width > widest:
        return f"width {width} is above {widest}, the widest row that one program holds"
    if width and call.x.size // width > MOST_ROWS:
        return f"{call.x.size // width} rows are more than {MOST_ROWS}"
    return refusal(target, {"x": call.x, "scale": call.scale, "offset": call.offset})
