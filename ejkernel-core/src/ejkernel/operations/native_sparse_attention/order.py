"""The default order of `native_sparse_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import HALVES, TRITON, UNMEASURED, Priority
from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selection_on_triton(call: NativeSparseAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: native_sparse_triton_h100.json."""
    if call.query.dtype not in HALVES:
        return Priority(UNMEASURED, f"{call.query.dtype} was not timed")
    if call.query.shape[2] == call.key.shape[2]:
        return Priority(UNMEASURED, "one query head for each key head was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selection_on_triton}}
