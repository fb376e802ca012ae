"""Which calls of `newton_schulz` these kernels run."""

from __future__ import annotations

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import refusal

MAX_COUNT = 2**31 - 2**16
"""Rows of all matrices and programs have 32-bit indices, elements of arrays 64-bit offsets."""
MAX_WIDTH = 2**22
"""Widest row for which a tile of 256 rows has 32-bit offsets."""
MAX_ROWS = 2**19
"""Rows of which the tiles on and below the diagonal have 32-bit numbers."""


def supports_forward(call: NewtonSchulzCall, target: Target) -> str | None:
    batch, rows, columns = call.x.shape
    for name, size, most in (("M", rows, MAX_ROWS), ("N", columns, MAX_WIDTH)):
        if size > most:
            return f"{name} = {size}, of the shorter axis M and the longer N, is above {most}"
    tall, wide = (-(-size // MIN_DOT_SIZE) for size in (rows, columns))
    units = max(batch * rows, batch * tall * max(wide, tall + 1))
    if units > MAX_COUNT:
        return f"{batch} matrices of {rows} x {columns} may need {units} tiles, more than {MAX_COUNT}"
    return refusal(target, {"x": call.x})
