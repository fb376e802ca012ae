"""Which calls of `cross_entropy` these kernels run."""

from __future__ import annotations

import math

from ejkernel.operations.cross_entropy.interface import CrossEntropyCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_COUNT = 2**31 - 2**16
"""Rows and entries have 32-bit indices, logits 64-bit offsets."""


def supports_forward(call: CrossEntropyCall, target: Target) -> str | None:
    if call.head is not None:
        return "it takes logits, not hidden states and a head"
    rows = math.prod(call.x.shape[:-1])
    for name, count in (("rows", rows), ("entries", call.x.shape[-1]), ("programs", rows * -(-call.x.shape[-1] // 1024))):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    return refusal(target, {"x": call.x})


supports_backward = supports_forward
