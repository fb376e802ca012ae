"""The default order of `native_sparse_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import HALVES, TRITON, UNMEASURED, Priority
from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _selection_on_triton(call: NativeSparseAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/native_sparse_triton_h100.json, ms in bfloat16, 16 blocks of 64 keys:
    T8192 H64/4 D128       forward 1.90, XLA 18.1    backward 4.37, XLA 106
    T32768 H64/4 D128      forward 8.01, XLA 76.2    backward 17.9, XLA 460
    B4 T4096 H32/8 D128    forward 6.98, XLA 68.2    backward 10.2, XLA 378
    """
    if call.query.dtype not in HALVES:
        return Priority(UNMEASURED, f"{call.query.dtype} was not timed")
    if call.query.shape[2] == call.key.shape[2]:
        return Priority(UNMEASURED, "one query head for each key head was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _selection_on_triton}}
