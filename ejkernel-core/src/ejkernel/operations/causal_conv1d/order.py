"""The default order of `causal_conv1d`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_TOKENS = 64


def _convolution_on_triton(call: CausalConv1dCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: rows_triton_h100.json, orders_grid_losses_more_h200.json."""
    if call.x.shape[1] < call.width:
        return Priority(UNMEASURED, "steps of fewer tokens than taps were not timed")
    if call.x.shape[1] < _FEWEST_TOKENS:
        return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_TOKENS} tokens of each row")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _convolution_on_triton}}
