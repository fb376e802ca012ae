"""The default order of `latent_paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import HALVES, TRITON, UNMEASURED, Priority
from ejkernel.operations.latent_paged_attention.interface import LatentPagedAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _latents_on_triton(call: LatentPagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/latent_triton_h100.json, ms of queries in bfloat16:
    one token, H128, 128 x 4096               0.546, XLA 2.04
    one token, H16, 128 x 4096                0.220, XLA 1.19, and from float8_e4m3fn 0.466, XLA 1.44
    one token, H128, 1 x 32768                0.061, XLA 1.26
    four tokens, H16, 64 x 4096               0.195, XLA 1.04
    512 tokens, H128, 2 x 4096                3.66, XLA 7.63
    """
    if call.query_nope.dtype not in HALVES:
        return Priority(UNMEASURED, f"{call.query_nope.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _latents_on_triton}}
