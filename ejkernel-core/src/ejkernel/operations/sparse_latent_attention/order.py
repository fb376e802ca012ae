"""The default order of `sparse_latent_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import HALVES, UNMEASURED, Priority, forward_on_triton
from ejkernel.operations.sparse_latent_attention.interface import SparseLatentAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _latents_on_triton(call: SparseLatentAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_latent_h100.json, in bfloat16: T8192 H128, 2048 of them each, forward 18.2 ms, XLA 42.3."""
    if call.query.dtype not in HALVES:
        return Priority(UNMEASURED, f"{call.query.dtype} was not timed")
    return forward_on_triton(call, phase, target)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _latents_on_triton}}
