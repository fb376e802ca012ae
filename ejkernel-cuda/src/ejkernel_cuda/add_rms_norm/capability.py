"""Which calls of `add_rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal
from ejkernel_cuda._rows.capability import members_refusal, too_wide


def supports(call: AddRmsNormCall, target: Target) -> str | None:
    if call.residual.dtype != call.x.dtype:
        return f"x is {call.x.dtype} and residual {call.residual.dtype}; both must have one dtype"
    specs = {"x": call.x, "scale": call.scale}
    return members_refusal(call.x, (call.scale,)) or too_wide(call.x) or refusal(target, specs)


supports_forward = supports
supports_backward = supports
