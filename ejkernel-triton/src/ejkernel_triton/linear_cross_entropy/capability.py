"""Which calls of `linear_cross_entropy` these kernels run."""

from __future__ import annotations

from ejkernel.operations.linear_cross_entropy.interface import LinearCrossEntropyCall
from ejkernel.plugin import Target
from ejkernel_triton.cross_entropy import capability


def supports_forward(call: LinearCrossEntropyCall, target: Target) -> str | None:
    return capability.supports_forward(call.per_row, target)


supports_backward = supports_forward
