"""Configs of `sparse_latent_attention`."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.sparse_latent_attention.interface import SparseLatentAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._latents import config
from ejkernel_triton._latents.config import LatentAttentionConfig, LatentGradientConfig, Problem

_PARTS = 2**27
"""Numbers that queries add to tokens and that are in memory at once, in float32 512 MiB."""


def problem_of(call: SparseLatentAttentionCall) -> Problem:
    """Every query reads tokens of its own, so none is together with another."""
    batch, length, heads, size = call.query.shape
    itemsize = np.dtype(call.query.dtype).itemsize
    return Problem(
        queries=batch * length,
        heads=heads,
        together=1,
        keys=call.token_indices.shape[2],
        latent=call.value_size,
        rest=size - call.value_size,
        itemsize=itemsize,
        stored=itemsize,
    )


def heuristic(call: SparseLatentAttentionCall, target: Target) -> LatentAttentionConfig:
    return config.heuristic(problem_of(call), target)


def search_space(call: SparseLatentAttentionCall, target: Target) -> list[LatentAttentionConfig]:
    return config.search_space(problem_of(call), target)


def queries_of_chunk(call: SparseLatentAttentionCall) -> int:
    """Queries, of all members of the batch, whose parts are in memory at once."""
    batch, length, _, size = call.query.shape
    most = max(_PARTS // max(call.token_indices.shape[2] * size, 1), 1)
    chunks = -(-batch * length // most)
    return -(-batch * length // max(chunks, 1))


def backward_heuristic(call: SparseLatentAttentionCall, target: Target) -> LatentGradientConfig:
    return config.gradient_heuristic(problem_of(call), target)


def backward_space(call: SparseLatentAttentionCall, target: Target) -> list[LatentGradientConfig]:
    return config.gradient_space(problem_of(call), target)


FORWARD = ConfigSpace(LatentAttentionConfig, heuristic, search_space)
BACKWARD = ConfigSpace(LatentGradientConfig, backward_heuristic, backward_space)
