"""Which calls of `moe_unpermute` these kernels run."""

from __future__ import annotations

from ejkernel.operations.moe_unpermute.interface import MoeUnpermuteCall
from ejkernel.plugin import Target
from ejkernel_triton._copies.capability import moving_problem


def supports_forward(call: MoeUnpermuteCall, target: Target) -> str | None:
    batch, _, width = call.rows.shape
    return moving_problem(batch, call.positions, width, {"rows": call.rows, "weights": call.weights}, target)


supports_backward = supports_forward
