"""Log decays as kernels take them: sums of those per head, and scores and decayed tokens of those per channel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.linear_recurrence.fused_chunk import scores_kernel
from ejkernel_triton.linear_recurrence.problem import Problem
from ejkernel_triton.linear_recurrence.segments import Segments
from ejkernel_triton.linear_recurrence.states import sums_kernel
from ejkernel_triton.linear_recurrence.tile_sizes import recurrence_constants, score_levels, summed_heads


class Decays(NamedTuple):
    """The decay arguments of the kernels. The query is a placeholder for absent ones.

    Attributes:
        read, update: query and key; with decays per channel, scaled and decayed to the boundaries of their chunks.
        scores: of all chunks `[b, t, H, chunk]`; with decays per channel only.
        totals: log decays of all chunks `[b, segments, H, chunks, d]`; with decays per channel only.
        hi, lo: sums of g from the start of each chunk `[b, segments, H, segment]`, and what rounding left of them.
        gamma: g_gamma.
    """

    read: Any
    update: Any
    scores: Any
    totals: Any
    hi: Any
    lo: Any
    gamma: Any

    @property
    def per_head(self) -> tuple[Any, Any, Any]:
        """The decays per head, in the order in which all kernels take them."""
        return self.hi, self.lo, self.gamma


def prepare_decays(problem: Problem, segments: Segments) -> Decays:
    """The decays of all segments."""
    query, key = problem.inputs.query, problem.inputs.key
    if problem.params.decay == "key":
        scores, read, update, totals = _launch_scores(problem, segments)
        return Decays(read, update, scores, totals, query, query, query)
    (gamma,) = problem.or_query(problem.inputs.g_gamma)
    hi, lo = _launch_sums(problem, segments, gamma) if problem.params.g_heads else (query, query)
    return Decays(query, key, query, query, hi, lo, gamma)


def _launch_sums(problem: Problem, segments: Segments, gamma: Any) -> list[Any]:
    """Sums of g from the start of each chunk, as hi and lo."""
    params, chunk = problem.params, problem.config.chunk_size
    shape = (problem.batch, segments.number, problem.heads, segments.size)
    heads = summed_heads(problem.heads)
    return call_kernel(
        sums_kernel,
        (problem.inputs.g, gamma, *segments.arguments),
        ((shape, jnp.float32), (shape if params.hi_lo else (1,), jnp.float32)),
        grid=problem.batch * segments.number * (segments.size // chunk) * -(-problem.heads // heads),
        num_warps=4,
        R=params,
        CHUNK=chunk,
        SEGMENT=segments.size,
        HEADS=heads,
    )


def _launch_scores(problem: Problem, segments: Segments) -> list[Any]:
    """With decays per channel: the scores of all chunks, decayed queries and keys, and the decays of whole chunks."""
    inputs, chunk = problem.inputs, problem.config.chunk_size
    query, width = inputs.query, problem.call.query.shape[3]
    constants = recurrence_constants(problem, problem.params, segments)
    del constants["BLOCK_V"]
    constants["BLOCK_K"] = min(constants["BLOCK_K"], 16 if chunk == 16 else 64)
    constants |= {"num_warps": 4, "num_stages": 1}
    chunks = segments.size // chunk
    tokens = (problem.batch, problem.length, problem.heads)
    return call_kernel(
        scores_kernel,
        (query, inputs.key, problem.channel_logs, *segments.arguments),
        (
            ((*tokens, chunk), query.dtype if query.dtype == jnp.bfloat16 else jnp.float32),
            ((*tokens, width), query.dtype),
            ((*tokens, width), query.dtype),
            ((problem.batch, segments.number, problem.heads, chunks, width), jnp.float32),
        ),
        grid=problem.batch * segments.number * chunks * problem.heads,
        LEVELS=score_levels(problem.config),
        **constants,
    )
