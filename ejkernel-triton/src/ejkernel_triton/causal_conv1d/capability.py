"""Which calls of `causal_conv1d` these kernels run."""

from __future__ import annotations

from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_WIDTH = 8
"""Taps are unrolled, in the gradient their square."""
MAX_COUNT = 2**31 - 2**16
"""Tokens, channels and programs have 32-bit indices, elements 64-bit offsets."""


def supports_forward(call: CausalConv1dCall, target: Target) -> str | None:
    batch, length, channels = call.x.shape
    if call.width > MAX_WIDTH:
        return f"{call.width} taps are more than {MAX_WIDTH}"
    programs = batch * length * (-(-channels // 32))
    for name, count in (("tokens", batch * length), ("channels", channels), ("tokens times channels / 32", programs)):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    arrays = {"x": call.x, "weight": call.weight, "bias": call.bias, "initial_state": call.initial_state}
    return refusal(target, arrays)


def supports_backward(call: CausalConv1dCall, target: Target) -> str | None:
    if call.initial_state is not None:
        return "there is no gradient of an initial state"
    if call.return_state:
        return "there is no gradient of a returned state"
    return supports_forward(call, target)
