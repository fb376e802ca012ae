"""The default order of `selective_scan`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selective_scan_on_triton(call: SelectiveScanCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: scans_triton_h100.json, scans_backward_h100.json, recurrence_sweep_h100.json,
    recurrences_float32_h200.json, orders_grid_recurrences_more_h200.json."""
    if call.x.shape[1] == 1:
        return Priority(BEHIND_XLA, "XLA's was faster for one token")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selective_scan_on_triton}}
