"""The launches of the recurrences: for each kernel a function that gives it arguments in order, shapes of outputs and a grid.

`params` is the recurrence that a launch runs: the call's, or the gradient of one of its inputs, which is a recurrence too.
`arrays` are the query, key and value of that recurrence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.linear_recurrence.decays import Decays
from ejkernel_triton.linear_recurrence.every_chunk import (
    chunk_states_kernel,
    key_gradients_kernel,
    log_gradients_kernel,
    query_gradients_kernel,
)
from ejkernel_triton.linear_recurrence.fused_chunk import fused_chunk_kernel
from ejkernel_triton.linear_recurrence.params import RecurrenceParams
from ejkernel_triton.linear_recurrence.problem import Problem
from ejkernel_triton.linear_recurrence.recurrent import recurrent_kernel
from ejkernel_triton.linear_recurrence.segments import Segments
from ejkernel_triton.linear_recurrence.states import scan_states_kernel, segment_states_kernel
from ejkernel_triton.linear_recurrence.tile_sizes import (
    chunk_constants,
    chunk_gradient_programs,
    chunk_state_programs,
    chunk_state_rows,
    recurrence_constants,
    score_levels,
    summed_heads,
    transposes_tiles,
    value_blocks,
)

_SCAN_BLOCK = 1024
"""State elements of one program of the scan."""


class LogGradients(NamedTuple):
    """Asks a recurrence that computes a gradient for what it gives to gradients of log decays.

    Attributes:
        own: the array whose gradient it computes.
        partner: of the second of the two recurrences, `own . out` of the first.
        states: of the second, the states before all chunks, which the first stored.
    """

    own: Any
    partner: Any = None
    states: Any = None


def states_before_segments(
    problem: Problem,
    params: RecurrenceParams,
    arrays: tuple[Any, Any],
    segments: Segments,
    initial: Any,
    decays: Decays,
    *,
    final: bool = False,
) -> list[Any]:
    """The states before all segments `[b, segments, H, d, v]` and, if `final`, after all sequences `[b, n, H, d, v]`: each segment
    from zero, then a scan over segments. `arrays` are the recurrence's key and value."""
    own, log = _launch_segment_states(problem, params, arrays, segments, decays, final=final)
    shape = (problem.batch, segments.number, problem.heads, *problem.state_shape)
    return call_kernel(
        scan_states_kernel,
        (own, log, own if initial is None else initial, segments.first, segments.number, segments.sequences),
        ((shape, jnp.float32), (problem.final_shape if final else (1,), jnp.float32)),
        grid=problem.batch * segments.sequences * problem.heads * -(-params.width * params.channels // _SCAN_BLOCK),
        num_warps=4,
        R=params,
        BLOCK=_SCAN_BLOCK,
        INITIAL=initial is not None,
        FINAL=final,
    )


def _launch_segment_states(
    problem: Problem, params: RecurrenceParams, arrays: tuple[Any, Any], segments: Segments, decays: Decays, *, final: bool
) -> list[Any]:
    """The states after all segments, each from zero, and the log decays of whole segments."""
    shape = (problem.batch, segments.number, problem.heads, *problem.state_shape)
    logs = shape[:4] if params.decay == "key" else shape[:3] if params.decay == "scalar" else (1,)
    return call_kernel(
        segment_states_kernel,
        (*arrays, problem.value_scale, *decays.per_head, decays.totals, *segments.arguments),
        ((shape, jnp.float32), (logs, jnp.float32)),
        grid=problem.batch * segments.number * problem.heads * value_blocks(params, problem.config),
        FINAL=final,
        **recurrence_constants(problem, params, segments),
    )


def recurrence_outputs(
    problem: Problem,
    params: RecurrenceParams,
    arrays: tuple[Any, Any, Any],
    segments: Segments,
    decays: Decays,
    *,
    dtype: Any,
    update: Any = None,
    before: Any = None,
    last: bool = False,
    logs: LogGradients | None = None,
    members: int = 1,
) -> list[Any]:
    """The outputs of a recurrence `[b, t, H / members, channels]`, and placeholders for what is not requested of the other three.

    Args:
        problem, params, arrays, segments, decays: what to run.
        dtype: of the outputs.
        update: the key that states take, if it is not the one of the scores.
        before: the states before all segments; zero if None.
        last: whether the states after sequences with tokens are returned, `[b, n, H, d, v]`.
        logs: requests terms of gradients of log decays; for the first gradient also the states before all chunks
            `[b, chunks, H, d, v]`.
        members: neighbouring heads whose outputs are summed.
    """
    config = problem.config
    shape = (problem.batch, problem.length, problem.heads, params.channels)
    blocks, programs = value_blocks(params, config), problem.heads // members
    chunks = segments.number * (segments.size // config.chunk_size)
    log_shape = (1,) if logs is None else (blocks, *shape[:3]) if params.decay == "scalar" else shape
    gradient = "none" if logs is None else "first" if logs.partner is None else "second"
    query = arrays[0]
    optional = (update, before, *(logs or LogGradients(None)))
    return call_kernel(
        fused_chunk_kernel,
        (
            *(*arrays, problem.value_scale, problem.skip, *decays.per_head, problem.channel_logs, decays.scores, decays.totals),
            *(query if array is None else array for array in optional),
            *segments.arguments,
        ),
        (
            ((*shape[:2], programs, params.channels), dtype),
            (problem.final_shape if last else (1,), jnp.float32),
            (log_shape, jnp.float32),
            (
                (problem.batch, chunks, problem.heads, *problem.state_shape) if gradient == "first" else (1,),
                _stored_dtype(problem),
            ),
        ),
        grid=problem.batch * segments.number * programs * blocks,
        LEVELS=score_levels(config),
        BEFORE=before is not None,
        LAST=last,
        TRANSPOSED=transposes_tiles(params, config),
        LOGS=gradient,
        MEMBERS=members,
        **recurrence_constants(problem, params, segments),
    )


def _stored_dtype(problem: Problem) -> Any:
    """Of the states that gradients of decays take: products of states and their gradients, rounded once, are sums of many."""
    return jnp.float32 if problem.call.query.dtype == "float32" else jnp.bfloat16


def recurrence_by_token(
    problem: Problem, segments: Segments, before: Any, block: int, warps: int, *, found: Any = None
) -> list[Any]:
    """Outputs, and states after segments that are wanted, token after token.

    Args:
        problem, segments: what to run.
        before: the states before all segments; zero if None.
        block: most value channels of a program.
        warps: of a program.
        found: outputs, of which those before the first value that is not finite may be wrong: only these are made again.
    """
    call, inputs = problem.call, problem.inputs
    params = dataclasses.replace(problem.params, transposed=call.transposed_state)
    block, repair = min(block, dot_block(params.channels)), found is not None
    final = call.return_state and not repair
    arrays = (
        *(inputs.query, inputs.key, inputs.value, problem.value_scale, problem.skip),
        *problem.or_query(inputs.g, inputs.g_gamma),
        problem.channel_logs,
        *problem.or_query(inputs.bonus, before, found),
    )
    shape = (problem.batch, problem.length, problem.heads, params.channels)
    states = (problem.batch, segments.number, problem.heads, *call.state_shape)
    return call_kernel(
        recurrent_kernel,
        (*arrays, *segments.arguments),
        ((shape, call.value.dtype), (states if final else (1,), jnp.float32)),
        grid=problem.batch * segments.number * problem.heads * -(-params.channels // block),
        num_warps=warps,
        input_output_aliases={len(arrays) - 1: 0} if repair else None,
        R=params,
        SEGMENT=segments.size,
        BLOCK_K=dot_block(params.width),
        BLOCK_V=block,
        BEFORE=before is not None,
        FINAL=final,
        BONUS_HEADS=0 if call.bonus is None else call.bonus.shape[1],
        BONUS_BATCH=call.bonus is not None and call.bonus.shape[0] > 1,
        REPAIR=repair,
    )


def states_of_chunks(
    problem: Problem,
    params: RecurrenceParams,
    arrays: tuple[Any, Any],
    chunks: Segments,
    decays: Decays,
    *,
    segments: Segments,
    initial: Any,
    whole: bool,
    others: Any = None,
) -> list[Any]:
    """The states before all chunks `[b, chunks, H, d, v]` in the dtype of value, and after sequences that have tokens
    `[b, n, H, d, v]`; with `others` also what pairs of tokens around each chunk give to gradients of log decays.

    Args:
        problem, params, chunks, decays: what to run.
        arrays: the recurrence's key and value.
        segments: one for each program.
        initial: the states before segments or, if they are `whole` sequences, before sequences; zero if None.
        whole: whether segments are whole sequences.
        others: the states of the forward phase before all chunks.
    """
    key, value = arrays
    programs = chunk_state_programs(params, problem.config)
    constants: dict[str, Any] = chunk_constants(problem, params) | {"BLOCK_K": chunk_state_rows(params), "num_warps": 4}
    around = (1,) if others is None else (problem.batch, chunks.number, problem.heads, programs)
    return call_kernel(
        chunk_states_kernel,
        (
            *(key, value, problem.value_scale, *decays.per_head),
            *(value if array is None else array for array in (initial, others)),
            *(chunks.first, chunks.number, *segments.arguments),
        ),
        (
            ((problem.batch, chunks.number, problem.heads, *problem.state_shape), value.dtype),
            (problem.final_shape, jnp.float32),
            (around, jnp.float32),
        ),
        grid=problem.batch * problem.heads * programs * segments.number,
        SEGMENT=segments.size,
        INITIAL=initial is not None,
        WHOLE=whole,
        AROUND=others is not None,
        **constants,
    )


def query_gradients_from_states(problem: Problem, d_out: Any, before: Any, chunks: Segments, decays: Decays) -> list[Any]:
    """What the states before all chunks give to the gradient of query, `[b, t, parts, d]` in float32, and to those of log decays,
    `[blocks, b, chunks, H, chunk]`."""
    programs, members = chunk_gradient_programs(problem, chunks)
    return call_kernel(
        query_gradients_kernel,
        (problem.inputs.query, d_out, *decays.per_head, before, *chunks.arguments),
        ((_summed_shape(problem, members), jnp.float32), (_chunk_log_shape(problem, chunks), jnp.float32)),
        grid=programs,
        MEMBERS=members,
        **chunk_constants(problem, problem.params),
    )


def chunk_gradients(
    problem: Problem, d_out: Any, d_query_from_states: Any, d_after: Any, chunks: Segments, decays: Decays
) -> list[Any]:
    """The gradients of query and key `[b, t, parts, d]` and of value `[b, t, H, v]`; two terms of those of log decays
    `[2, blocks, b, chunks, H, chunk]`; the gradients of value_scale `[blocks, b, t, H]` and of skip `[blocks, b, chunks, H]`, or
    placeholders.

    d_after: the gradients of the states after all chunks.
    """
    inputs, params = problem.inputs, problem.params
    blocks, tokens = value_blocks(params, problem.config), (problem.batch, problem.length)
    programs, members = chunk_gradient_programs(problem, chunks)
    summed = _summed_shape(problem, members)

    def gradient(given: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
        """In float32 where sums over heads remain."""
        return shape, given.dtype if given.shape[2] == shape[2] else jnp.float32

    scales = (blocks, *tokens, problem.heads) if params.value_scale_heads else (1,)
    skips = (blocks, problem.batch, chunks.number, problem.heads) if params.skip_heads else (1,)
    return call_kernel(
        key_gradients_kernel,
        (
            *(inputs.query, inputs.key, inputs.value, problem.value_scale, problem.skip, d_out),
            *(*decays.per_head, d_after, d_query_from_states, *chunks.arguments),
        ),
        (
            gradient(inputs.query, summed),
            gradient(inputs.key, summed),
            gradient(inputs.value, (*tokens, problem.heads, params.channels)),
            ((2, *_chunk_log_shape(problem, chunks)), jnp.float32),
            (scales, jnp.float32),
            (skips, jnp.float32),
        ),
        grid=programs,
        MEMBERS=members,
        **chunk_constants(problem, params),
    )


def _summed_shape(problem: Problem, members: int) -> tuple[int, ...]:
    """Of the gradient of query or key, `[b, t, parts, d]`: a part sums the heads or value blocks of one program."""
    blocks = value_blocks(problem.params, problem.config)
    return problem.batch, problem.length, problem.heads * blocks // members, problem.params.width


def _chunk_log_shape(problem: Problem, chunks: Segments) -> tuple[int, ...]:
    """Of terms of the gradients of log decays."""
    return value_blocks(problem.params, problem.config), problem.batch, chunks.number, problem.heads, chunks.size


def log_gradients(problem: Problem, from_states: Any, rest: Any, around: Any, chunks: Segments) -> Any:
    """The gradients of log decays `[1, b, t, H]`: the sum of the terms that the launches for all chunks returned."""
    heads = summed_heads(problem.heads)
    return call_kernel(
        log_gradients_kernel,
        (from_states, rest, around, *chunks.arguments),
        (((1, problem.batch, problem.length, problem.heads), jnp.float32),),
        grid=problem.batch * chunks.number * -(-problem.heads // heads),
        num_warps=4,
        R=problem.params,
        CHUNK=chunks.size,
        HEADS=heads,
        BLOCKS=value_blocks(problem.params, problem.config),
        PROGRAMS=around.shape[3],
    )[0]
