"""Which calls of `scaled_matmul` these kernels run.

int8 and float8_e5m2 need compute capability 8.0, as all kernels here; float8_e4m3fn needs 8.9.
"""

from __future__ import annotations

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._pages import ONE_BYTE, e4m3_problem
from ejkernel_triton.scaled_matmul.config import LEAST, product_of, programs

MAX_PROGRAMS = 2**31 - 1
MAX_WIDTH = 2**22
"""Widest row for which a tile of 256 rows has 32-bit offsets."""


def supports_forward(call: ScaledMatmulCall, target: Target) -> str | None:
    if call.out_dtype not in FLOATS:
        return f"out_dtype is {call.out_dtype}, needs {', '.join(FLOATS)}"
    for name, width in (("K", call.lhs.shape[2]), ("N", call.columns)):
        if width > MAX_WIDTH:
            return f"{name} = {width} is above {MAX_WIDTH}, the widest row that a tile addresses"
    members, rows = product_of(call)
    if programs(members, rows, call.columns, LEAST, LEAST) > MAX_PROGRAMS:
        return f"{members} x {rows} rows and {call.columns} columns may need more than {MAX_PROGRAMS} programs"
    dtypes = {"lhs": ONE_BYTE, "rhs": ONE_BYTE, "lhs_scale": FLOATS, "rhs_scale": FLOATS}
    return refusal(target, {name: getattr(call, name) for name in dtypes}, dtypes) or e4m3_problem(target, call.lhs, call.rhs)


supports_backward = supports_forward
