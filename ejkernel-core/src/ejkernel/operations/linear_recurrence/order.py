"""The default order of `linear_recurrence`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _linear_recurrence_on_triton(call: LinearRecurrenceCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: 11 to 30 times as fast as XLA forward (bench_h200.json), 5 to 20 times backward (also
    linear_recurrence_h200.json); in float32 4.5 times forward (bench_float32_h200.json), 3.1 to 7.6 times with gradients
    (recurrences_float32_h200.json). With a bonus 15 and 17 times, with values of 512 channels 12 and 7 times
    (scans_triton_h100.json)."""
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _linear_recurrence_on_triton}}
