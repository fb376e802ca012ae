"""Which calls of `moe_permute` these kernels run."""

from __future__ import annotations

from ejkernel.operations.moe_permute.interface import MoePermuteCall
from ejkernel.plugin import Target
from ejkernel_triton._copies.capability import moving_problem

MAX_EXPERTS = 1024
"""Counts of all experts are in one program's registers."""


def supports_forward(call: MoePermuteCall, target: Target) -> str | None:
    if call.num_experts > MAX_EXPERTS:
        return f"{call.num_experts} experts are more than {MAX_EXPERTS}"
    if call.rows and not call.x.shape[2]:
        return "rows of width 0 move nothing"
    return supports_backward(call, target)


def supports_backward(call: MoePermuteCall, target: Target) -> str | None:
    batch, _, width = call.x.shape
    return moving_problem(batch, call.experts, width, {"x": call.x}, target)
