"""Which calls of `quantized_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton.quantized_matmul.config import intervals_of

MOST = 2**31 - 2**16
"""Rows and programs have 32-bit indices, elements of arrays 64-bit offsets."""
MOST_WIDE = 2**23
"""Widest row for which a tile has 32-bit offsets."""
MOST_INTERVALS = 2**12
"""Groups of all members that every program looks through, about 32 for each thread."""


def supports_forward(call: QuantizedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: QuantizedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def _refusal(call: QuantizedMatmulCall, target: Target) -> str | None:
    dtypes = {"x": FLOATS, "w": ("uint32",), "scales": FLOATS if call.form.float_scales else ("uint8",), "zeros": FLOATS}
    problem = refusal(target, {name: getattr(call, name) for name in dtypes}, dtypes)
    if problem:
        return problem
    stored = call.stored_rows, call.packed_columns
    for name, width in (("K", call.x.shape[2]), ("N", call.columns)):
        if width > MOST_WIDE:
            return f"{name} = {width} is above {MOST_WIDE}, the widest row that a tile addresses"
    batch, rows, _ = call.x.shape
    intervals = 1
    if call.group_sizes is not None:
        intervals = intervals_of(call.matrices)
        if batch * intervals > MOST_INTERVALS:
            return f"{batch} x {call.matrices} groups are more than {MOST_INTERVALS}, among which a program searches its rows"
        if batch * rows > MOST:
            return f"{batch} x {rows} rows in groups are more than {MOST}"
    programs = batch * (rows // 16 + intervals) * (max(stored) // 16 + 1)
    if programs > MOST:
        return f"{batch} x {rows} rows and {stored[0]} x {stored[1]} weights may need {programs} programs, over {MOST}"
    return None
