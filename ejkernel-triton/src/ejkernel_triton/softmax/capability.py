"""Which calls of `softmax` these kernels run."""

from __future__ import annotations

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton._rows.capability import too_many_rows


def supports_forward(call: SoftmaxCall, target: Target) -> str | None:
    return too_many_rows(call.x) or refusal(target, {"x": call.x})


supports_backward = supports_forward
