"""Which calls of `quantized_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

MOST = 2**31 - 2**16
"""Rows and programs have 32-bit indices, elements of arrays 64-bit offsets."""
MOST_WIDE = 2**23
"""Widest row for which a tile has 32-bit offsets."""


def supports_forward(call: QuantizedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: QuantizedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def _refusal(call: QuantizedMatmulCall, target: Target) -> str | None:
    dtypes = {"x": FLOATS, "w": ("uint32",), "scales": FLOATS if call.form.float_scales else ("uint8",), "zeros": FLOATS}
    problem = refusal(target, {name: getattr(call, name) for name in dtypes}, dtypes)
    if problem:
        return problem
    stored = call.w.shape[1], call.packed_columns
    for name, width in (("K", call.x.shape[2]), ("N", call.columns)):
        if width > MOST_WIDE:
            return f"{name} = {width} is above {MOST_WIDE}, the widest row that a tile addresses"
    batch, rows, _ = call.x.shape
    programs = batch * (rows // 16 + 1) * (max(stored) // 16 + 1)
    if programs > MOST:
        return f"{batch} x {rows} rows and {stored[0]} x {stored[1]} weights may need {programs} programs, over {MOST}"
    return None
