"""The default order of `cross_entropy`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.operations.cross_entropy.interface import CrossEntropyCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 128
"""Of logits."""


def _on_triton(call: CrossEntropyCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results, ms in bfloat16, 8192 x 128256: of logits forward 0.830, XLA 1.419; backward 1.389, XLA 1.602
    (rows_triton_h100.json); of hidden states forward 13.3, XLA 15.1; with gradients 53.6, XLA 59.7
    (vocabulary_triton_h200.json). Few rows are in orders_grid_losses_h200.json."""
    if call.head is not None and call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"hidden states of {call.x.dtype} were not timed")
    if phase == "forward" and call.head is None and math.prod(call.x.shape[:-1]) < _FEWEST_ROWS:
        return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_ROWS} rows of logits")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
