"""Which calls of `rms_norm` run here. Pure and static: shapes, dtypes and flags decide, nothing is tried."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target

DTYPES = ("float32", "bfloat16", "float16")


def supports(call: RmsNormCall, target: Target) -> str | None:
    """None, or the reason for refusing."""
    if call.x.dtype not in DTYPES:
        return f"x is {call.x.dtype}; acme computes in float32 and takes {', '.join(DTYPES)}"
    if call.x.shape[-1] == 0:
        return "x has no elements along the normalised axis"
    return None
