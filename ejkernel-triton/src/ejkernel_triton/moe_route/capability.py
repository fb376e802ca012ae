"""Which calls of `moe_route` these kernels run."""

from __future__ import annotations

from ejkernel.operations.moe_route.interface import MoeRouteCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_EXPERTS = 1024
"""A program has all logits of its tokens in registers."""
MAX_CHOICES = 64
MAX_GROUPS = 32
"""The values of groups are found one after the other, unrolled."""
MAX_COUNT = 2**31 - 2**16


def supports_forward(call: MoeRouteCall, target: Target) -> str | None:
    batch, tokens, experts = call.logits.shape
    limits = (
        ("experts", experts, MAX_EXPERTS),
        ("experts of a token", call.k, MAX_CHOICES),
        ("groups", call.num_groups, MAX_GROUPS),
        ("tokens", batch * tokens, MAX_COUNT),
    )
    for name, count, most in limits:
        if count > most:
            return f"{count} {name} are more than {most}"
    return refusal(target, {"logits": call.logits, "bias": call.bias})


supports_backward = supports_forward
