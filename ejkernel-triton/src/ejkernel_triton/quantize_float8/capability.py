"""Which calls of `quantize_float8` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.quantize_float8.interface import OPERATION, QuantizeFloat8Call
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton._pages import e4m3_problem
from ejkernel_triton.quantize_float8.config import SMALLEST, tiles

MAX_PROGRAMS = 2**31 - 1


def supports_forward(call: QuantizeFloat8Call, target: Target) -> str | None:
    if tiles(call, SMALLEST) > MAX_PROGRAMS:
        return f"{call.x.size} elements are more than {MAX_PROGRAMS} tiles"
    return refusal(target, {"x": call.x}) or e4m3_problem(target, OPERATION.output_specs(call).values)
