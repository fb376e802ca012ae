"""Which calls of `add_rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton._rows.capability import too_many_rows


def supports_forward(call: AddRmsNormCall, target: Target) -> str | None:
    specs = {"x": call.x, "residual": call.residual, "scale": call.scale}
    return too_many_rows(call.x) or refusal(target, specs)


supports_backward = supports_forward
