"""Which calls of `grouped_matmul` these kernels run."""

from __future__ import annotations

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import Target

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
    return None
