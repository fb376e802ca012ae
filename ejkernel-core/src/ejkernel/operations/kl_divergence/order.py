"""The default order of `kl_divergence`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.operations.kl_divergence.interface import KlDivergenceCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 128
"""Of logits."""


def _on_triton(call: KlDivergenceCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/vocabulary_triton_h200.json, bfloat16: of logits 1.15 times as fast as XLA forward, 1.7 times with
    gradients; of hidden states 2.2 and 1.37 times. Few rows are in orders_grid_losses_h200.json."""
    if call.student.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.student.dtype} was not timed")
    if call.student_head is None and math.prod(call.student.shape[:-1]) < _FEWEST_ROWS:
        return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_ROWS} rows of logits")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
