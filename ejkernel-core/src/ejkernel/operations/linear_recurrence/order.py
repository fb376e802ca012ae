"""The default order of `linear_recurrence`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _linear_recurrence_on_triton(call: LinearRecurrenceCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_h200.json, linear_recurrence_h200.json, bench_float32_h200.json, recurrences_float32_h200.json,
    scans_triton_h100.json."""
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _linear_recurrence_on_triton}}
