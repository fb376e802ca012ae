"""The default order of `selective_scan`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selective_scan_on_triton(call: SelectiveScanCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: scans_triton_h100.json, scans_backward_h100.json, recurrence_sweep_h100.json,
    recurrences_float32_h200.json."""
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selective_scan_on_triton}}
