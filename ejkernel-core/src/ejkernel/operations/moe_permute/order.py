"""The default order of `moe_permute`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.moe_permute.interface import MoePermuteCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 16384


def _permute_on_triton(call: MoePermuteCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/moe_triton_h100.json, us in bfloat16:

    T16384 k8 E64 D2048  forward 281, XLA 486    backward 200, XLA 202
    T8192 k2 E8 D4096    forward 76, XLA 165     backward 68, XLA 74
    T64 k8 E64 D2048     forward 29, XLA 13      backward 1.7, XLA 1.9
    """
    if phase == "backward" or call.rows >= _FEWEST_ROWS:
        return Priority(TRITON)
    return Priority(BEHIND_XLA, f"XLA's was faster where fewer than {_FEWEST_ROWS} copies are sorted")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _permute_on_triton}}
