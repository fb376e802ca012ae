"""The default order of `native_sparse_selection`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.native_sparse_selection.interface import NativeSparseSelectionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selection_on_triton(call: NativeSparseSelectionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/native_sparse_selection_h100.json, 64 query and 4 key heads of 128 channels, 16 blocks of 64 keys: T8192
    0.090 ms, XLA 0.69; T32768 0.86, XLA 7.7."""
    if call.query.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.query.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selection_on_triton}}
