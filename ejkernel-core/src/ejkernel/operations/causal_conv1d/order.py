"""The default order of `causal_conv1d`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _convolution_on_triton(call: CausalConv1dCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: rows_triton_h100.json."""
    if call.x.shape[1] < call.width:
        return Priority(UNMEASURED, "steps of fewer tokens than taps were not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _convolution_on_triton}}
