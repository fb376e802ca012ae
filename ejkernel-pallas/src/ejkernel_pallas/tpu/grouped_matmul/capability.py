"""Which calls of `grouped_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import Target
from ejkernel_pallas.tpu.grouped_matmul.config import MAX_BLOCK_M, MAX_ITEMS
from ejkernel_pallas.tpu.grouped_matmul.schedule import max_matrix_items

DTYPES = ("float32", "bfloat16")
STORED = (*DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of rhs."""


def supports(call: GroupedMatmulCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("lhs", "rhs", "existing_out", "rhs_scale", "bias"):
        spec, wanted = getattr(call, name), STORED if name == "rhs" else DTYPES
        if spec is not None and spec.dtype not in wanted:
            return f"{name} is {spec.dtype}, needs {' or '.join(wanted)}"
    if call.preferred_element_type not in DTYPES:
        return f"preferred_element_type is {call.preferred_element_type}, needs {' or '.join(DTYPES)}"
    batch, rows, _ = call.lhs.shape
    items = max_matrix_items(batch, rows, call.rhs.shape[1], MAX_BLOCK_M)
    if items > MAX_ITEMS:
        return f"{batch} x {rows} rows in {call.rhs.shape[1]} groups make {items} work items, at most {MAX_ITEMS} fit into SMEM"
    return None
