"""Which calls of `gated_linear_unit` these kernels run."""

from __future__ import annotations

from ejkernel.operations.gated_linear_unit.interface import GatedLinearUnitCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_PROGRAMS = 2**31 - 2**16
"""Of 1024 elements or more; elements have 64-bit offsets."""


def supports_forward(call: GatedLinearUnitCall, target: Target) -> str | None:
    if call.gate.size > MAX_PROGRAMS * 1024:
        return f"{call.gate.size} elements are more than {MAX_PROGRAMS * 1024}"
    return refusal(target, {"gate": call.gate})


supports_backward = supports_forward
