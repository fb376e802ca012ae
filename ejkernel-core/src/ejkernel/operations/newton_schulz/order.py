"""The default order of `newton_schulz`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS, _FEWEST_NUMBERS = 512, 2**21
"""Of the shorter side, and of all matrices together."""


def _on_triton(call: NewtonSchulzCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/newton_schulz_h200.json: products of bfloat16 1.3 to 1.7 times as fast as XLA, of float32 0.4 times.
    Small matrices are in orders_grid_losses_more_h200.json."""
    if call.dtype == "float32":
        return Priority(BEHIND_XLA, "XLA is faster in float32")
    if min(call.x.shape[1:]) < _FEWEST_ROWS or math.prod(call.x.shape) < _FEWEST_NUMBERS:
        return Priority(BEHIND_XLA, "XLA was faster for a few small matrices")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
