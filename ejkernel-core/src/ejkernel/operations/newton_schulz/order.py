"""The default order of `newton_schulz`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, UNMEASURED, Priority
from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_MEASURED_ROWS = 1024
"""Half of the shortest matrices that were timed."""


def _on_triton(call: NewtonSchulzCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/newton_schulz_h200.json: products of bfloat16 1.3 to 1.7 times as fast as XLA, of float32 0.4 times."""
    if call.dtype == "float32":
        return Priority(BEHIND_XLA, "XLA is faster in float32")
    if call.x.shape[1] < _MEASURED_ROWS:
        return Priority(UNMEASURED, f"matrices of less than {_MEASURED_ROWS} rows and columns were not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _on_triton}}
