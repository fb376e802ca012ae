"""The default order of `layer_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.common.rows.order import norm_on_cuda
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _layer_norm_on_cuda(call: Any, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/rows_cuda_h200.json, ms in bfloat16, and of the first forward bench_cuda_rows_h200.json:

    16384x4096   forward 0.067, Triton 0.069, XLA 0.074      backward 0.105, XLA 0.273
    131072x128   forward 0.0174, Triton 0.0179, XLA 0.0194   backward 0.0308, Triton 0.0359, XLA 0.0601
    1048576x64   forward 0.063, Triton 0.064, XLA 0.067      backward 0.102, Triton 0.107, XLA 0.192
    1048576x128  forward 0.128, Triton 0.125, XLA 0.132      backward 0.198, Triton 0.205, XLA 0.396
    262144x512   forward 0.130, Triton 0.127, XLA 0.166      backward 0.212, Triton 0.203, XLA 0.516
    65536x1024   forward 0.066, Triton 0.064, XLA 0.088      backward 0.106, Triton 0.106, XLA 0.259
    8192x8192    forward 0.066, Triton 0.067, XLA 0.080      backward 0.111, Triton 0.105, XLA 0.271
    8192x16384   forward 0.131, Triton 0.139, XLA 0.299      backward 0.203, Triton 0.355, XLA 0.605
    2048x32768   forward 0.069, Triton 0.081, XLA 0.158      backward 0.111, Triton 0.176, XLA 0.190
    2048x65536   forward 0.138, Triton 0.174, XLA 0.303      backward 0.217, Triton 0.344, XLA 0.371
    1024x131072  forward 0.139, Triton 0.178, XLA 0.296      backward 0.237, Triton 0.338, XLA 0.376

    and of the first in an earlier run: forward 0.067, Triton 0.068; backward 0.105, Triton 0.103.
    """
    return norm_on_cuda(call, phase, 4096)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON, "cuda": _layer_norm_on_cuda}}
"""benchmarks/results/rows_h200.json: Triton's forward 1.07 to 2.2 times as fast as XLA, backward 1.08 to 2.7 times."""
