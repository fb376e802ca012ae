"""Which calls of `qk_norm_rope` these kernels run."""

from __future__ import annotations

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal

WIDEST = 256
"""Channels of a head; one warp holds them."""
MOST_BLOCKS = MOST_HEADS = 2**31 - 1
"""Heads of all tokens are counted in 32 bits."""


def supports_forward(call: QkNormRopeCall, target: Target) -> str | None:
    width = call.query.shape[3]
    if width % 2 or width > WIDEST:
        return f"head size {width} is not even and at most {WIDEST}"
    if not call.rotary_dim:
        return "rotary_dim is 0; use rms_norm for heads without rotation"
    most = max(spec.size // max(width, 1) for spec in (call.query, call.key))
    if most > MOST_HEADS:
        return f"{most} heads of tokens are more than {MOST_HEADS}"
    names = ("query", "key", "cos", "sin", "query_scale", "key_scale")
    return refusal(target, {name: getattr(call, name) for name in names})


def supports_backward(call: QkNormRopeCall, target: Target) -> str | None:
    angles = max(call.cos.shape[0], call.sin.shape[0]) * call.cos.shape[1]
    if angles > MOST_BLOCKS:
        return f"{angles} rows of cos and sin are more than {MOST_BLOCKS}"
    members = max((spec.shape[0] for spec in (call.query_scale, call.key_scale) if spec is not None), default=1)
    tiles = 2 * -(-WIDEST // 32)
    if members * tiles > MOST_BLOCKS:
        return f"{members} batch members with scales of their own need more than {MOST_BLOCKS} blocks"
    return supports_forward(call, target)
