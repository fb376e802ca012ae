"""The default order of `latent_paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import HALVES, UNMEASURED, Priority, forward_on_triton
from ejkernel.operations.latent_paged_attention.interface import LatentPagedAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _latents_on_triton(call: LatentPagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/latent_triton_h100.json, bfloat16, ms:
    one token, 128 x 4096      H128 0.546, XLA 2.04    H16 0.220, XLA 1.19
    512 tokens, 2 x 4096       H128 3.66, XLA 7.63
    """
    if call.query_nope.dtype not in HALVES:
        return Priority(UNMEASURED, f"{call.query_nope.dtype} was not timed")
    return forward_on_triton(call, phase, target)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _latents_on_triton}}
