"""The default order of `causal_conv1d`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _convolution_on_triton(call: CausalConv1dCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/rows_triton_h100.json, us in bfloat16, four taps with bias and SiLU:

    B2 T4096 C4096               forward 65.6, XLA 92.8    backward 194, XLA 357
    B1 T8192 C8192, five packed  forward 139, XLA 192
    """
    if call.x.shape[1] < call.width:
        return Priority(UNMEASURED, "steps of fewer tokens than taps were not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _convolution_on_triton}}
