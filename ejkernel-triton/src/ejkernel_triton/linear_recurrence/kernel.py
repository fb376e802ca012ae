"""Forward and backward of `linear_recurrence`: which launches follow each other.

In forward one kernel loops over the chunks of a segment with the state in registers. If a segment is not a whole sequence, the
states before segments are computed first: each segment starts from zero, and a scan combines them. Backward computes both the
states and their gradients this way, then runs three recurrences; it stores states between segments only. With decays per channel
another kernel computes the scores of all chunks, and queries and keys decayed to the chunk boundaries. In forward outputs that are
not finite are looked for, and what may be wrong before them is made again. A few tokens go one after the other. Gradients of what
heads share are summed by programs that run several of these heads, so that the gradients of each (for Mamba-2 80 in place of one)
are never in memory. If the config says so, backward stores the states of all chunks and their gradients instead, and the gradients
of all chunks are computed at once.

`problem` holds what launches share, `segments` how tokens are cut, `decays` the log decays as kernels take them, `tile_sizes` tiles
and numbers of programs, `launches` a function per kernel, and `input_gradients` the sums over heads that share an input.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel.operations.linear_recurrence.transposed import pulled_with_key_first, with_key_first
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton.linear_recurrence import forms
from ejkernel_triton.linear_recurrence.config import Config, can_store_states
from ejkernel_triton.linear_recurrence.decays import prepare_decays
from ejkernel_triton.linear_recurrence.input_gradients import input_gradients, zero_gradients
from ejkernel_triton.linear_recurrence.launches import (
    LogGradients,
    chunk_gradients,
    log_gradients,
    query_gradients_from_states,
    recurrence_by_token,
    recurrence_outputs,
    states_before_segments,
    states_of_chunks,
)
from ejkernel_triton.linear_recurrence.params import (
    WIDEST_VALUE,
    RecurrenceParams,
    key_gradient_params,
    prepared_params,
    query_gradient_params,
    takes_scales,
    value_gradient_params,
)
from ejkernel_triton.linear_recurrence.problem import Problem
from ejkernel_triton.linear_recurrence.segments import keep_states_of_empty_sequences
from ejkernel_triton.linear_recurrence.tile_sizes import chunks_per_segment, heads_per_program

_REPAIR_BLOCK = 32
_REPAIR_WARPS = 4
"""Value channels and warps of a program that makes outputs again."""


def forward(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config) -> LinearRecurrenceOutputs:
    if _zero_size(call):
        return _zero_outputs(call, inputs)
    if forms.has_scales(call) and not takes_scales(call):
        return forms.forward_around_scales(forward, call, inputs, config)
    if not config.chunk_size:
        return _forward_by_token(Problem(call, inputs, config))
    if call.transposed_state:
        return with_key_first(call, inputs, lambda call, inputs: forward(call, inputs, config))
    if call.bonus is not None:
        return forms.forward_with_bonus(forward, call, inputs, config)
    if call.value.shape[3] > WIDEST_VALUE:
        return forms.forward_in_parts(forward, call, inputs, config)
    return _forward_in_chunks(Problem(call, inputs, config))


def _forward_by_token(problem: Problem) -> LinearRecurrenceOutputs:
    """For few tokens: one segment, without chunks."""
    config = problem.config
    segments = problem.segments(-(-problem.length // MIN_DOT_SIZE) * MIN_DOT_SIZE)
    out, final = recurrence_by_token(problem, segments, problem.inputs.initial_state, config.block_v, config.num_warps)
    return LinearRecurrenceOutputs(out, final if problem.call.return_state else None)


def _forward_in_chunks(problem: Problem) -> LinearRecurrenceOutputs:
    call, inputs, config = problem.call, problem.inputs, problem.config
    whole = call.cu_seqlens is None and (not config.segment_size or config.segment_size >= problem.length)
    segments = problem.segments(_rounded_length(problem) if whole else _segment_size(config))
    decays = prepare_decays(problem, segments)
    params, arrays = prepared_params(problem.params), (decays.read, decays.update, inputs.value)
    before, final = inputs.initial_state, None
    # Packed sequences leave their states with the outputs: their last segments, often the only ones, are read once. A row's is
    # found before outputs, which whoever wants the state alone then need not compute.
    last = call.return_state and (whole or params.packed)
    if not whole:
        before, final = states_before_segments(
            problem, params, arrays[1:], segments, before, decays, final=call.return_state and not last
        )
    found = recurrence_outputs(problem, params, arrays, segments, decays, before=before, dtype=call.value.dtype, last=last)
    out = found[0]
    if last:
        final = found[1]
        if params.packed:
            final = keep_states_of_empty_sequences(final, segments, inputs.initial_state)
    if problem.length > 1:
        out, _ = recurrence_by_token(problem, segments, before, _REPAIR_BLOCK, _REPAIR_WARPS, found=out)
    return LinearRecurrenceOutputs(out, final if call.return_state else None)


def _rounded_length(problem: Problem) -> int:
    """Tokens of a segment that is a whole sequence: whole chunks."""
    chunk = problem.config.chunk_size
    return -(-problem.length // chunk) * chunk


def _segment_size(config: Config) -> int:
    """Tokens of a segment where there are segments, which packed sequences always have."""
    return config.segment_size or 8 * config.chunk_size


def _zero_size(call: LinearRecurrenceCall) -> bool:
    batch, length = call.query.shape[:2]
    return not (batch and length and call.sequences)


def _zero_outputs(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> LinearRecurrenceOutputs:
    """Outputs if no token is in a sequence."""
    (batch, length), heads, channels = call.query.shape[:2], call.heads[1], call.value.shape[3]
    out = vary_like(jnp.zeros((batch, length, heads, channels), call.value.dtype), inputs)
    if not call.return_state:
        return LinearRecurrenceOutputs(out)
    given = inputs.initial_state
    if given is not None:
        return LinearRecurrenceOutputs(out, given.astype(jnp.float32))
    return LinearRecurrenceOutputs(
        out, vary_like(jnp.zeros((batch, call.sequences, heads, *call.state_shape), jnp.float32), inputs)
    )


def backward(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    if _zero_size(call):
        return zero_gradients(inputs, cotangents.final_state)
    if call.transposed_state:
        return pulled_with_key_first(
            call, inputs, cotangents, lambda call, inputs, cotangents: backward(call, inputs, outputs, cotangents, config)
        )
    stored = config.store_states and can_store_states(call)
    if forms.has_scales(call) and not (stored and takes_scales(call)):
        return forms.backward_around_scales(backward, call, inputs, outputs, cotangents, config)
    if call.bonus is not None:
        return forms.backward_with_bonus(backward, call, inputs, outputs, cotangents, config)
    if call.value.shape[3] > WIDEST_VALUE:
        return forms.backward_in_parts(backward, call, inputs, outputs, cotangents, config)
    gradients = _gradients_of_chunks if stored else _gradients_of_segments
    return gradients(Problem(call, inputs, config), cotangents.out, cotangents.final_state)


def _gradients_of_segments(problem: Problem, d_out: Any, d_final: Any) -> LinearRecurrenceInputs:
    """Three recurrences, from the states before all segments and from the gradients of the states after them."""
    inputs, params = problem.inputs, problem.params
    query, key, value = inputs.query, inputs.key, inputs.value
    segments = problem.segments(min(_segment_size(problem.config), _rounded_length(problem)))
    decays = prepare_decays(problem, segments)
    to_value = value_gradient_params(prepared_params(params))
    before, _ = states_before_segments(
        problem, prepared_params(params), (decays.update, value), segments, inputs.initial_state, decays
    )
    d_after, d_initial = states_before_segments(
        problem, to_value, (decays.read, d_out), segments, d_final, decays, final=inputs.initial_state is not None
    )

    def gradient(given: Any, params: RecurrenceParams, arrays: tuple[Any, Any, Any], **options: Any) -> list[Any]:
        """In float32 where heads share: sums of as many of them as one program runs."""
        dtype = given.dtype if given.shape[2] == problem.heads else jnp.float32
        members = heads_per_program(problem, params, segments)
        return recurrence_outputs(problem, params, arrays, segments, decays, dtype=dtype, members=members, **options)

    decaying = params.decay != "none"
    d_query, _, products, states = gradient(
        query, query_gradient_params(params), (d_out, value, key), update=decays.update, before=before,
        logs=LogGradients(query) if decaying else None,
    )  # fmt: skip
    d_key, _, d_logs, _ = gradient(
        key, key_gradient_params(params), (value, d_out, query), update=decays.read, before=d_after,
        logs=LogGradients(key, products, states) if decaying else None,
    )  # fmt: skip
    d_value = gradient(value, to_value, (decays.update, decays.read, d_out), before=d_after)[0]
    return input_gradients(inputs, (d_query, d_key, d_value), d_logs, d_initial)


def _gradients_of_chunks(problem: Problem, d_out: Any, d_final: Any) -> LinearRecurrenceInputs:
    """The gradients from the stored states of all chunks, and from those of their gradients."""
    inputs, params, chunk = problem.inputs, problem.params, problem.config.chunk_size
    to_value = value_gradient_params(params)
    keys, queries = (inputs.key, inputs.value), (inputs.query, d_out)
    chunks = problem.segments(chunk)
    decays = prepare_decays(problem, chunks)
    initial, d_last, at_once = inputs.initial_state, d_final, chunks_per_segment(problem)
    segments = problem.segments((at_once or -(-problem.length // chunk)) * chunk)
    if at_once:
        of_segments = prepare_decays(problem, segments)
        initial = states_before_segments(problem, params, keys, segments, initial, of_segments)[0]
        d_last = states_before_segments(problem, to_value, queries, segments, d_last, of_segments)[0]
    whole = not at_once
    before = states_of_chunks(problem, params, keys, chunks, decays, segments=segments, initial=initial, whole=whole)[0]
    d_query, from_states = query_gradients_from_states(problem, d_out, before, chunks, decays)
    d_after, d_initial, around = states_of_chunks(
        problem, to_value, queries, chunks, decays, segments=segments, initial=d_last, whole=whole, others=before
    )
    *gradients, rest, d_scale, d_skip = chunk_gradients(problem, d_out, d_query, d_after, chunks, decays)
    if params.skip_heads and params.packed:
        d_skip = jnp.where(chunks.used[None, ..., None], d_skip, 0.0)
    d_logs = log_gradients(problem, from_states, rest, around, chunks)
    if params.packed:
        d_initial = keep_states_of_empty_sequences(d_initial, chunks, d_final)
    return input_gradients(inputs, (*gradients, d_scale, d_skip), d_logs, d_initial)
