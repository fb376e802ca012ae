"""The default order of `mean_pooling`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.mean_pooling.interface import MeanPoolingCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_NUMBERS = 2**25


def _on_triton(call: MeanPoolingCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: rows_h200.json (packed sequences over 200 times as fast as XLA), orders_grid_losses_h200.json,
    orders_grid_losses_more_h200.json."""
    if call.cu_seqlens is None and math.prod(call.x.shape) < _FEWEST_NUMBERS:
        return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_NUMBERS} numbers")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
