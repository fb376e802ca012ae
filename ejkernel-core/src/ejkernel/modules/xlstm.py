"""mLSTM, the matrix memory of xLSTM: linear attention whose gates are exponentials, kept relative to a running maximum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.call.arrays import statistics_dtype
from ejkernel.call.records import Bound
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.packed import edge_tokens, empty_states, first_tokens, of_every_token, taking_part, zero_outside
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.utils.checks import check_compute, check_given, check_shape, finite_number

__all__ = ["MLSTM", "mlstm"]


@public("initial_state", "cu_seqlens")
@argument_names(scale="softmax_scale")
def mlstm(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    input_gate: t.PerHead,
    forget_gate: t.PerHead,
    *,
    initial_state: t.MatrixMemory | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    forget_activation: t.ForgetActivation = "sigmoid",
    softmax_scale: t.Scalar | None = None,
    epsilon: t.Number = 1e-6,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceOutput, t.NewMatrixMemory]:
    """mLSTM: `C_t = f_t C_(t-1) + i_t k_t v_t^T`, `n_t = f_t n_(t-1) + i_t k_t`, `h_t = C_t^T q_t / max(|n_t . q_t|, 1)`.

    `i = exp(input_gate)`, f is the sigmoid or the exponential of forget_gate, and the scale multiplies q. C and n are kept times
    `exp(-m_t)` with `m_t = max(log f_t + m_(t-1), input_gate_t)`, so no exponential exceeds 1; the divisor is
    `max(|n_t . q_t|, exp(-m_t)) + epsilon` of what is kept. The norm of h and the output gate are the caller's.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,H,D]`.
        value: `[B,T,H,V]`.
        input_gate: `[B,T,H]`, before its exponential; -inf takes nothing in.
        forget_gate: `[B,T,H]`, before its activation; -inf forgets.
        initial_state: C `[B,H,D,V]`, n `[B,H,D]` and m `[B,H]`, C and n times `exp(-m)`; `[s,H,...]` with cu_seqlens of s
            sequences; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers, B = 1; as for `recurrent_attention`.
        forget_activation: "sigmoid", or "exp", for which forget_gate is the logarithm of f.
        softmax_scale: factor of query; None = `1 / sqrt(D)`.
        epsilon: added to the divisor, >= 0.
        cfg: config override for the chosen implementation of `linear_recurrence`.

    Returns:
        h `[B,T,H,V]` in the dtype of value, and the last state, float32. Gradients take m for a constant, as it cancels: those
        of h, and of what later calls make of the state, are exact but for epsilon.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Beck et al., xLSTM: Extended Long Short-Term Memory, 2024; xLSTM 7B, 2025, for epsilon.
    """
    arrays, options, run = split(
        locals(), "query key value input_gate forget_gate initial_state cu_seqlens", "scale=softmax_scale"
    )
    check_given(query=query, key=key, value=value, input_gate=input_gate, forget_gate=forget_gate)
    if initial_state is not None and (not isinstance(initial_state, tuple) or len(initial_state) != 3):
        raise wrong_type("initial_state", type(initial_state).__name__, "a tuple of three arrays, C, n and m")
    if forget_activation not in ("sigmoid", "exp"):
        raise invalid("forget_activation", repr(forget_activation), "'sigmoid' or 'exp'")
    options["epsilon"] = finite_number("epsilon", epsilon, at_least=0)
    return _LINEAR_RECURRENCE.invoke(arrays, options, form=_memory, **run)


_LARGEST = 80.0
"""Size of an m beyond which `exp(-m)` is as good as 0 or infinite, and still finite in float32."""


def _memory(
    *,
    query: Any,
    key: Any,
    value: Any,
    input_gate: Any,
    forget_gate: Any,
    initial_state: Any,
    cu_seqlens: Any,
    forget_activation: str,
    scale: float | None,
    epsilon: float,
) -> Bound:
    """mLSTM as a linear recurrence of keys that the input gate weights; n is C of a value channel of ones."""
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
    bound = _LINEAR_RECURRENCE.canonicalise(
        query,
        (key.astype(wide) * jnp.exp(log_input - peak)[..., None]).astype(key.dtype),
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1),
        log_forget + (before - peak),  # of two large numbers first
        initial_state=state,
        cu_seqlens=cu_seqlens,
        scale=scale,
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


MLSTM = class_api("MLSTM", mlstm)
