"""Which calls of `grouped_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._pages import STORED, e4m3_problem

MAX_COUNT = 2**31 - 2**16
"""Rows, elements of a matrix, tiles and programs have 32-bit indices, elements of arrays 64-bit offsets."""
MAX_WIDTH = 2**23
"""Widest row for which a tile of 128 rows has 32-bit offsets."""


def supports_forward(call: GroupedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: GroupedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def _refusal(call: GroupedMatmulCall, target: Target) -> str | None:
    batch, rows, inner = call.lhs.shape
    matrices, columns = call.rhs.shape[1], call.columns
    if call.preferred_element_type not in FLOATS:
        return f"preferred_element_type is {call.preferred_element_type}, needs {', '.join(FLOATS)}"
    for name, width in (("K", inner), ("N", columns)):
        if width > MAX_WIDTH:
            return f"{name} = {width} is above {MAX_WIDTH}, the widest row that a tile addresses"
    if inner * columns > MAX_COUNT:
        return f"a matrix of {inner} x {columns} elements is above {MAX_COUNT}"
    widest = -(-max(inner, columns) // MIN_DOT_SIZE)
    tiles = batch * (rows // MIN_DOT_SIZE + matrices + 2)
    units = max(tiles * widest, batch * matrices * -(-inner // MIN_DOT_SIZE) * -(-columns // MIN_DOT_SIZE), batch * rows)
    if units > MAX_COUNT:
        return f"{batch} x {rows} rows and {matrices} matrices of {inner} x {columns} may need {units} tiles, more than {MAX_COUNT}"
    names: dict[str, tuple[str, ...]] = dict.fromkeys(("lhs", "existing_out", "rhs_scale", "bias"), FLOATS)
    names["rhs"] = STORED
    problem = refusal(target, {name: getattr(call, name) for name in names}, names)
    return problem or e4m3_problem(target, call.rhs)
