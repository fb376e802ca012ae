"""Which calls over rows these kernels run."""

from __future__ import annotations

from ejkernel.call import ArraySpec
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_ROWS = 2**31 - 2**16
"""Row and column indices are 32-bit, element offsets 64-bit."""


def supports_norm(call: NormCall, target: Target) -> str | None:
    return too_many_rows(call.x) or refusal(target, {"x": call.x, "scale": call.scale, "offset": call.offset})


def too_many_rows(x: ArraySpec) -> str | None:
    """Why rows `[..., d]` exceed 32-bit indices; None if they do not."""
    width = x.shape[-1]
    if width > MAX_ROWS:
        return f"width {width} is more than {MAX_ROWS}"
    if width and x.size // width > MAX_ROWS:
        return f"{x.size // width} rows are more than {MAX_ROWS}"
    return None
