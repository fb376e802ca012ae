"""Which calls of `rwkv4` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rwkv4.interface import Rwkv4Call
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

MOST = 2**31 - 2**16
"""Tokens and programs are counted in 32 bits; elements in 64."""
_LEAST_CHUNK = 16


def supports_forward(call: Rwkv4Call, target: Target) -> str | None:
    problem = refusal(target, {name: getattr(call, name) for name in ("w", "u", "k", "v", "state")}, FLOATS)
    if problem:
        return problem
    batch, length, channels = call.k.shape
    for name, count in (("tokens", batch * length), ("programs", batch * channels * (1 + length // _LEAST_CHUNK))):
        if count > MOST:
            return f"{count} {name} are more than {MOST}"
    return None


supports_backward = supports_forward
