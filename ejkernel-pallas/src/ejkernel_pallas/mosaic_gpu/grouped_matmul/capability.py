"""Which calls of `grouped_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import HALVES
from ejkernel.utils.dtypes import FLOAT8
from ejkernel_pallas.mosaic_gpu._device import refusal
from ejkernel_pallas.mosaic_gpu.grouped_matmul.config import DEPTH
from ejkernel_pallas.mosaic_gpu.grouped_matmul.schedule import max_tiles

FLOATS = ("float32", *HALVES)
MAX_COUNT = 2**31 - 2**16
"""Rows, elements of a matrix, and steps of all tiles have 32-bit indices."""
_MIN_TILE = 64
"""Rows and columns of the smallest tile."""


def supports_forward(call: GroupedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: GroupedMatmulCall, target: Target) -> str | None:
    return _refusal(call, target)


def _refusal(call: GroupedMatmulCall, target: Target) -> str | None:
    problem = refusal(target, {"lhs": call.lhs, "rhs": call.rhs}, (*HALVES, *FLOAT8))
    if problem:
        return problem
    if call.in_float8 and not call.transpose_rhs:
        remedy = "store [G, N, K] and pass transpose_rhs=True"
        return f"rhs is {call.rhs.dtype} in [G, K, N], and the tensor cores read float8 along K only; {remedy}"
    if call.lhs_scale is not None and not call.in_float8:
        return f"lhs_scale is given beside lhs in {call.lhs.dtype}; kernels here scale rows of {' or '.join(FLOAT8)} only"
    if call.lhs.dtype != call.rhs.dtype and not (call.in_float8 and call.rhs.dtype in FLOAT8):
        return f"lhs is {call.lhs.dtype} and rhs {call.rhs.dtype}: the tensor cores multiply one dtype"
    for name in ("existing_out", "rhs_scale", "bias", "lhs_scale"):
        spec = getattr(call, name)
        if spec is not None and spec.dtype not in FLOATS:
            return f"{name} is {spec.dtype}, needs {', '.join(FLOATS)}"
    if call.preferred_element_type not in FLOATS:
        return f"preferred_element_type is {call.preferred_element_type}, needs {', '.join(FLOATS)}"
    return _size_problem(call)


def _size_problem(call: GroupedMatmulCall) -> str | None:
    batch, rows, inner = call.lhs.shape
    matrices, columns = call.rhs.shape[1], call.columns
    high, wide = (-(-size // DEPTH) + 1 for size in (inner, columns))
    tiles = max_tiles(batch * rows, batch * (matrices + 2), _MIN_TILE)
    steps = max(tiles * high * wide, batch * matrices * high * wide)
    if max(steps, batch * rows * 2, inner * columns) > MAX_COUNT:
        return f"{batch} x {rows} rows and {matrices} matrices of {inner} x {columns} may need {steps} steps, more than {MAX_COUNT}"
    return None
