"""Configs of `latent_paged_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.latent_paged_attention.interface import LatentPagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.dtypes import common_dtype
from ejkernel_triton._latents import config
from ejkernel_triton._latents.config import LatentAttentionConfig, LatentGradientConfig, Problem
from ejkernel_triton._pages import ONE_BYTE

UNBOUNDED = 2**30
"""Stands for no window; small enough for int32."""


def product_dtype(call: LatentPagedAttentionCall) -> Any:
    """Dtype of the MMA operands; 8-bit pages are converted to the query's."""
    stored, query = np.dtype(call.pages.dtype), np.dtype(call.query_nope.dtype)
    return query if stored.itemsize == 1 else common_dtype(query, stored)


def product_itemsize(call: LatentPagedAttentionCall) -> int:
    """Bytes of an MMA operand: 4 if queries or floating-point pages are float32, or one is bfloat16 and the other float16."""
    dtypes = {call.query_nope.dtype, call.pages.dtype} - set(ONE_BYTE)
    return 2 if dtypes in ({"bfloat16"}, {"float16"}) else 4


def problem_of(call: LatentPagedAttentionCall) -> Problem:
    batch, tokens, heads, latent = call.query_nope.shape
    requests, entries = call.block_tables.shape[1:]
    together = max(-(-tokens // max(requests, 1)), 1)
    longest = entries * call.pages.shape[2]
    stored = 1 if call.pages.dtype in ONE_BYTE else np.dtype(call.pages.dtype).itemsize
    return Problem(
        queries=batch * tokens,
        heads=heads,
        together=together,
        keys=longest if call.window is None else min(longest, call.window + together - 1),
        latent=latent,
        rest=call.query_pe.shape[3],
        itemsize=product_itemsize(call),
        stored=stored,
    )


def heuristic(call: LatentPagedAttentionCall, target: Target) -> LatentAttentionConfig:
    return config.heuristic(problem_of(call), target)


def search_space(call: LatentPagedAttentionCall, target: Target) -> list[LatentAttentionConfig]:
    return config.search_space(problem_of(call), target)


def backward_heuristic(call: LatentPagedAttentionCall, target: Target) -> LatentGradientConfig:
    return config.gradient_heuristic(problem_of(call), target)


def backward_space(call: LatentPagedAttentionCall, target: Target) -> list[LatentGradientConfig]:
    return config.gradient_space(problem_of(call), target)


FORWARD = ConfigSpace(LatentAttentionConfig, heuristic, search_space)
BACKWARD = ConfigSpace(LatentGradientConfig, backward_heuristic, backward_space)
