"""Which calls of `mean_pooling` these kernels run."""

from __future__ import annotations

import math

from ejkernel.operations.mean_pooling.interface import MeanPoolingCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_COUNT = 2**31 - 2**16
"""Tokens, channels and programs have 32-bit indices, elements 64-bit offsets."""


def supports_forward(call: MeanPoolingCall, target: Target) -> str | None:
    batch, length = call.x.shape[:2]
    channels = math.prod(call.x.shape[2:])
    for name, count in (("tokens", batch * length), ("channels", channels), ("sums", batch * call.sequences * channels)):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    return refusal(target, {"x": call.x})


supports_backward = supports_forward
