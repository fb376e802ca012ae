"""The default order of `selective_scan`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selective_scan_on_triton(call: SelectiveScanCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/scans_triton_h100.json, ms in bfloat16:

    B2 T4096 I4096 N16        forward 0.461, XLA 4.58    backward 1.42, XLA 31.2
    B1 T8192 I5120 N16        forward 0.676, XLA 5.85    backward 2.23, XLA 27.6
    one token, B64 I4096 N16  0.014: the state is read and written once, at 0.95 of the rate of a copy
    B1 T8192 I4096 N16 in eight documents: forward 0.81 (scans_backward_h100.json), XLA 5.49 (recurrence_sweep_h100.json)

    In float32 and float16 13 times as fast with gradients (recurrences_float32_h200.json).
    """
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selective_scan_on_triton}}
