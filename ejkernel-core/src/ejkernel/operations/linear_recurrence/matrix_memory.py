"""Entry point to `linear_recurrence` for mLSTM, the matrix memory of xLSTM."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import statistics_dtype
from ejkernel.call.records import Bound
from ejkernel.operations.common.packed import edge_tokens, empty_states, first_tokens, of_every_token, taking_part, zero_outside
from ejkernel.operations.linear_recurrence.interface import OPERATION
from ejkernel.utils.checks import check_compute, check_shape

_LARGEST = 80.0
"""Size of an m beyond which `exp(-m)` is as good as 0 or infinite, and still finite in float32."""


def matrix_memory(
    *,
    query: Any,
    key: Any,
    value: Any,
    input_gate: Any,
    forget_gate: Any,
    initial_state: Any,
    cu_seqlens: Any,
    forget_activation: str,
    softmax_scale: float | None,
    epsilon: float,
) -> Bound:
    """Canonicalise mLSTM as a linear recurrence of keys that the input gate weights; n is C of a value channel of ones."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_compute(name, array, ndim=4)
    batch, length, heads, width = query.shape
    check_shape("key", key, query.shape, "[B, T, H, D] as query")
    check_shape("value", value, (batch, length, heads, value.shape[3]), "[B, T, H, V], with query's batch, length and heads")
    for name, gate in (("input_gate", input_gate), ("forget_gate", forget_gate)):
        check_compute(name, gate)
        check_shape(name, gate, (batch, length, heads), "[B, T, H]")
    part = taking_part(None, cu_seqlens, query, "query")
    if part is not None:  # before any product, whose gradient would be 0 * NaN
        key, input_gate, forget_gate = zero_outside(part, key, input_gate, forget_gate)
    wide = statistics_dtype(str(value.dtype))
    log_input, log_forget = input_gate.astype(wide), forget_gate.astype(wide)
    if forget_activation == "sigmoid":
        log_forget = jax.nn.log_sigmoid(log_forget)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state, first = None, empty_states(log_input, cu_seqlens)
    if initial_state is not None:
        shapes = ((sequences, heads, width, value.shape[3]), (sequences, heads, width), (sequences, heads))
        meanings = ("C [sequences, H, D, V]", "n [sequences, H, D]", "m [sequences, H]")
        for array, shape, meaning in zip(initial_state, shapes, meanings, strict=True):
            check_compute("initial_state", array)
            check_shape("initial_state", array, shape, meaning)
        matrix, vector, first = (array.astype(wide) for array in initial_state)
        state = jnp.concatenate([matrix, vector[..., None]], axis=-1)
    before, peak, last = _running_maximum(log_input, log_forget, first, cu_seqlens)
    bound = OPERATION.canonicalise(
        query,
        (key.astype(wide) * jnp.exp(log_input - peak)[..., None]).astype(key.dtype),
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1),
        log_forget + (before - peak),  # of two large numbers first
        initial_state=state,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale,
        return_state=True,
    )

    def finish(outputs: Any) -> Any:
        both, state = bound.finish(outputs)
        both = both.astype(wide)
        least = jnp.exp(-jnp.clip(peak, -_LARGEST, _LARGEST))[..., None]
        out = (both[..., :-1] / (jnp.maximum(jnp.abs(both[..., -1:]), least) + epsilon)).astype(value.dtype)
        return out, (state[..., :-1], state[..., -1], last)

    return Bound(bound.call, bound.inputs, finish)


def _running_maximum(log_input: Any, log_forget: Any, first: Any, cu_seqlens: Any) -> tuple[Any, Any, Any]:
    """m before and after every token `[B,T,H]` and after every sequence `[n,H]`; constants, but for what is of `first`."""
    length = log_input.shape[1]
    if length == 0:
        return log_input, log_input, first
    sequence, starts = first_tokens(cu_seqlens, length)
    own, starts = of_every_token(first, sequence, cu_seqlens), starts[None, :, None]

    def after(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        return one[0] + other[0], jnp.maximum(one[1] + other[0], other[1])

    gates = jnp.maximum(log_input, jnp.where(starts, log_forget + own, -jnp.inf))
    elements = jax.lax.stop_gradient((jnp.where(starts, -jnp.inf, log_forget), gates))
    peak = jnp.maximum(jax.lax.associative_scan(after, elements, axis=1)[1], -1e30)  # finite where all gates are -inf
    before = jnp.where(starts, own, jnp.roll(peak, 1, axis=1))
    return before, peak, edge_tokens(peak, first, cu_seqlens)
