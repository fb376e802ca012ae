"""The default order of `rope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, BEHIND_XLA, TRITON, Priority
from ejkernel.operations.common.rows.order import TRITON_WAS_FASTER
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _rope_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_cuda_rows_h200.json: forward 0.169 ms, Triton 0.166, XLA 0.166; backward 0.377, Triton 0.326, XLA
    0.467, and without gradients of cosines and sines 0.164, Triton 0.166, XLA 0.165 (rows_cuda_h200.json)."""
    if phase == "forward":
        return Priority(BEHIND_XLA, "XLA takes as long, and may fuse it with what stands beside it")
    return Priority(BEHIND_TRITON, TRITON_WAS_FASTER)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _rope_on_cuda}}
"""benchmarks/results/rows_h200.json: Triton's 0.99 to 1.00 times as fast as XLA in both phases, with gradients of cosines and sines
1.4 times."""
