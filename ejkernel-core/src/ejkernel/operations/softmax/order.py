"""The default order of `softmax`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, FIRST, TRITON, Priority
from ejkernel.operations.common.rows.order import TRITON_WAS_FASTER, wide_halves
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _softmax_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: rows_cuda_h200.json."""
    return Priority(FIRST) if wide_halves(call) else Priority(BEHIND_TRITON, TRITON_WAS_FASTER)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _softmax_on_cuda}}
"""benchmarks/results/rows_h200.json: Triton's forward 1.03 to 1.5 times as fast as XLA, backward 1.03 to 1.8 times."""
