"""Which calls of `cross_entropy` these kernels run."""

from __future__ import annotations

import math

from ejkernel.operations.cross_entropy.interface import CrossEntropyCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_COUNT = 2**31 - 2**16
"""Rows and entries have 32-bit indices, logits 64-bit offsets."""


def supports_forward(call: CrossEntropyCall, target: Target) -> str | None:
    rows = math.prod(call.x.shape[:-1])
    return too_many(rows, call.vocabulary) or refusal(target, {"x": call.x, "head": call.head, "head_bias": call.head_bias})


def too_many(rows: int, entries: int) -> str | None:
    """Why rows of logits exceed 32-bit indices; None if they do not."""
    for name, count in (("rows", rows), ("entries", entries), ("programs", rows * -(-entries // 1024))):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    return None


supports_backward = supports_forward
