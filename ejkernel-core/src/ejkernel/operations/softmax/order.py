"""The default order of `softmax`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, FIRST, TRITON, Priority
from ejkernel.operations.common.rows.order import TRITON_WAS_FASTER, wide_halves
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _softmax_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/rows_cuda_h200.json, ms in bfloat16:

    32768x4096   forward 0.130, Triton 0.128, XLA 0.154      backward 0.183, Triton 0.185, XLA 0.314
    131072x128   forward 0.0175, Triton 0.0175, XLA 0.0179   backward 0.0251, Triton 0.0248, XLA 0.0288
    8192x16384   forward 0.129, Triton 0.135, XLA 0.392      backward 0.200, Triton 0.194, XLA 0.309
    2048x32768   forward 0.066, Triton 0.074, XLA 0.162      backward 0.099, Triton 0.102, XLA 0.159
    2048x65536   forward 0.130, Triton 0.169, XLA 0.309      backward 0.192, Triton 0.231, XLA 0.312
    1024x128256  forward 0.125, Triton 0.190, XLA 0.305      backward 0.193, Triton 0.198, XLA 0.305
    1024x131072  forward 0.129, Triton 0.168, XLA 0.307      backward 0.197, Triton 0.202, XLA 0.310
    """
    return Priority(FIRST) if wide_halves(call) else Priority(BEHIND_TRITON, TRITON_WAS_FASTER)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _softmax_on_cuda}}
"""benchmarks/results/rows_h200.json: Triton's forward 1.03 to 1.5 times as fast as XLA, backward 1.03 to 1.8 times."""
