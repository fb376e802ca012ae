"""The default order of `lightning_indexer`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.lightning_indexer.interface import LightningIndexerCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _indexer_on_triton(call: LightningIndexerCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/lightning_indexer_triton_h100.json, 64 heads of 128 channels, 2048 of T8192: bfloat16 1.47 ms, XLA 21.7;
    float8 1.26 ms, XLA 20.4."""
    if call.query.dtype in ("float16", "float32"):
        return Priority(UNMEASURED, f"{call.query.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _indexer_on_triton}}
