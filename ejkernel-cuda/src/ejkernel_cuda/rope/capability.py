"""Which calls of `rope` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal

WIDEST = 1 << 30
MOST_BLOCKS = MOST_HEADS = 2**31 - 1
"""Channels and heads of all tokens are counted in 32 bits; elements in 64."""


def supports_forward(call: RopeCall, target: Target) -> str | None:
    width = call.query.shape[3]
    if width > WIDEST:
        return f"head size {width} is above {WIDEST}"
    rotated = [spec for spec in (call.query, call.key) if spec is not None]
    most = max(spec.size // max(width, 1) for spec in rotated)
    if most > MOST_HEADS:
        return f"{most} heads of tokens are more than {MOST_HEADS}"
    return refusal(target, {name: getattr(call, name) for name in ("query", "key", "cos", "sin")})


def supports_backward(call: RopeCall, target: Target) -> str | None:
    angles = max(call.cos.shape[0], call.sin.shape[0]) * call.cos.shape[1]
    if angles > MOST_BLOCKS:
        return f"{angles} rows of cos and sin are more than {MOST_BLOCKS}"
    return supports_forward(call, target)
