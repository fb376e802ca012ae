"""Which calls of `softmax` these kernels run."""

from __future__ import annotations

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal
from ejkernel_cuda._rows.capability import too_wide
from ejkernel_cuda.softmax.mask import MOST_AXES, axes_of


def supports_forward(call: SoftmaxCall, target: Target) -> str | None:
    if call.where is not None and call.x.size:
        axes = len(axes_of(call.x, call.where).sizes)
        if axes > MOST_AXES:
            return f"where has {axes} alternating stored and broadcast axes, needs {MOST_AXES} or fewer"
    return too_wide(call.x) or refusal(target, {"x": call.x})


supports_backward = supports_forward
