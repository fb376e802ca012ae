"""The default order of `rms_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.common.rows.order import norm_on_cuda
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _rms_norm_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/rows_cuda_h200.json, ms in bfloat16; the first also in
    bench_cuda_rows_h200.json: forward 0.067, Triton 0.072.

    16384x4096   forward 0.065, Triton 0.065, XLA 0.079      backward 0.113, Triton 0.101, XLA 0.191
    131072x128   forward 0.0173, Triton 0.0175, XLA 0.0184   backward 0.0302, Triton 0.0366, XLA 0.0547
    8192x16384   forward 0.134, Triton 0.197, XLA 0.191      backward 0.205, Triton 0.343, XLA 0.352
    2048x32768   forward 0.070, Triton 0.078, XLA 0.120      backward 0.110, Triton 0.174, XLA 0.184
    2048x65536   forward 0.137, Triton 0.181, XLA 0.232      backward 0.206, Triton 0.340, XLA 0.360
    1024x131072  forward 0.138, Triton 0.168, XLA 0.229      backward 0.215, Triton 0.336, XLA 0.371
    """
    return norm_on_cuda(call, phase, 1024)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _rms_norm_on_cuda}}
"""benchmarks/results/rms_norm_h200.json: Triton's forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times."""
