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
    """benchmarks/results: moe_triton_h100.json."""
    if phase == "backward" or call.rows >= _FEWEST_ROWS:
        return Priority(TRITON)
    return Priority(BEHIND_XLA, f"XLA's was faster where fewer than {_FEWEST_ROWS} copies are sorted")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _permute_on_triton}}
