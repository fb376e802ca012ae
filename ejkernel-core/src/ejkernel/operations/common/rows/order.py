"""The default order of norms and softmax on a GPU, as far as they share it."""

from __future__ import annotations

import math
from typing import Any

from ejkernel.operations.common.order import BEHIND_TRITON, BEHIND_XLA, FIRST, HALVES, Priority
from ejkernel.plugin import Phase

TRITON_WAS_FASTER = "Triton's was as fast or faster"
MOST_COLUMNS = 131072
"""That were timed."""
_FEW_NUMBERS = 2**23


def is_small(array: Any) -> bool:
    """Fewer numbers than those from which on CUDA's kernels of two fused operations are as fast as Triton's."""
    return math.prod(array.shape) < _FEW_NUMBERS


def wide_halves(call: Any) -> bool:
    """Rows beyond those over which Triton's kernels are as fast, as far as they were timed."""
    return call.x.dtype in HALVES and 8192 < call.x.shape[-1] <= MOST_COLUMNS


def norm_on_cuda(call: Any, phase: Phase, fewest: int, narrow: int) -> Priority:
    """`fewest`: columns from which on it is ahead forward; `narrow`: up to which it is backward. Between 128 and 1024 `rms_norm`
    was not timed."""
    if call.x.dtype not in HALVES:
        return Priority(BEHIND_XLA if phase == "forward" else BEHIND_TRITON, f"{call.x.dtype} was not timed")
    columns = call.x.shape[-1]
    ahead = fewest <= columns <= MOST_COLUMNS if phase == "forward" else columns <= narrow or wide_halves(call)
    if ahead:
        return Priority(FIRST)
    return Priority(BEHIND_TRITON, TRITON_WAS_FASTER)
