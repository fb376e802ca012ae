"""Which calls of `rope` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_HEAD_SIZE = 4096
"""A program holds all channels of a head."""
MAX_TOKENS = 2**31 - 2**16
"""Tokens, heads and programs have 32-bit indices, elements 64-bit offsets."""


def supports_forward(call: RopeCall, target: Target) -> str | None:
    if call.query.shape[-1] > MAX_HEAD_SIZE:
        return f"head size {call.query.shape[-1]} is above {MAX_HEAD_SIZE}, the widest head that one program holds"
    if call.key is not None and (call.query.size == 0) != (call.key.size == 0):
        return f"query {call.query} or key {call.key} has no heads, the other one has"
    tokens = call.query.shape[0] * call.query.shape[2 if call.heads_first else 1]
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens are more than {MAX_TOKENS}"
    heads = sum(spec.shape[1] for spec in (call.query, call.key) if spec is not None) if call.heads_first else 1
    if tokens * heads > MAX_TOKENS:
        return f"{tokens} tokens of {heads} heads, which come first, are more than {MAX_TOKENS}"
    return refusal(target, {"query": call.query, "key": call.key, "cos": call.cos, "sin": call.sin})


supports_backward = supports_forward
