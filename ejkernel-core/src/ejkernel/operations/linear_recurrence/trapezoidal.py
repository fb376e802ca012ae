"""Entry point to `linear_recurrence` for Mamba-3: the exponential-trapezoidal rule and a state that turns as complex numbers do."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.heads import repeat_heads
from ejkernel.operations.common.packed import edge_tokens, first_tokens, of_every_token, taking_part, zero_outside
from ejkernel.operations.linear_recurrence.interface import OPERATION
from ejkernel.operations.linear_recurrence.state_space import check_groups, log_decays, steps_taken
from ejkernel.utils.checks import check_compute, check_shape

_TURN = 2 * math.pi
"""Radians. Angles are summed in turns, whose whole part is dropped without rounding."""


def check_state_parts(state: Any) -> None:
    """Refuse a state that is no tuple of four arrays."""
    if state is not None and (not isinstance(state, tuple) or len(state) != 4):
        raise wrong_type("initial_state", type(state).__name__, "a tuple of four arrays: theta, S, and the last K and x")


def trapezoidal(
    *,
    x: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt: Any,
    trap: Any,
    angles: Any,
    B_bias: Any,
    C_bias: Any,
    initial_state: Any,
    cu_seqlens: Any,
    dt_bias: Any,
    dt_softplus: bool,
    precision: Any,
) -> Bound:
    """Canonicalise Mamba-3 as a linear recurrence.

    `U_t = a_t (U_(t-1) + (c_(t-1) + b_t) K_(t-1) x_(t-1)^T)`, `S_t = U_t + c_t K_t x_t^T`

    A token brings along what it adds of its predecessor, so that nothing of it comes later. The gradient of an angle is a sum over
    all later tokens, of which only pairs of tokens around it do not cancel. So operands have the digits of a half, which products
    in TF32 keep, but are float32, as are their gradients: rounded ones would leave 0.3 of it wrong after 1000 tokens.
    """
    _check_arrays(x, A, B, C, D, dt, trap, angles, B_bias, C_bias)
    part = taking_part(None, cu_seqlens, x, "x")
    _check_state(initial_state, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x, B, angles)
    query, key, rates = C, B, A if A.ndim == 3 else A[None, None]
    if part is not None:  # before any product, whose gradient would be 0 * NaN
        x, query, key, dt, trap, angles = zero_outside(part, x, query, key, dt, trap, angles)
        rates = zero_outside(part, rates)[0] if A.ndim == 3 else rates
    steps = steps_taken(dt, dt_bias, dt_softplus, x, part)
    wide = steps.dtype
    wide_x, logit = x.astype(wide), trap.astype(wide)
    before, own = steps * jax.nn.sigmoid(-logit), steps * jax.nn.sigmoid(logit)
    logs = log_decays(steps, rates)
    theta = state = last_key = last_x = None
    if initial_state is not None:
        theta, state, last_key, last_x = (array.astype(wide) for array in initial_state)
        once = edge_tokens(before, None, cu_seqlens, first=True)[..., None] * last_key
        state = state + once[..., None] * last_x[:, :, None]
    turns = _running_turns(steps, angles.astype(wide), theta, cu_seqlens)
    query, key = _turned(query, C_bias, turns, x.dtype), _turned(key, B_bias, turns, x.dtype)
    last_share, last_value, last_turned = (_of_token_before(array, cu_seqlens) for array in (own, wide_x, key))
    bound = OPERATION.canonicalise(
        query,
        last_turned,
        _as_operand((jnp.exp(logs) * (last_share + before))[..., None] * last_value, x.dtype),
        logs,
        initial_state=state,
        cu_seqlens=cu_seqlens,
        softmax_scale=1.0,
        return_state=True,
        precision="default" if precision is None and x.dtype != wide else precision,
    )

    def finish(outputs: Any) -> Any:
        out, state = bound.finish(outputs)
        written = own[..., None] * wide_x
        out = out + (query * key).sum(axis=-1, keepdims=True) * written
        if D is not None:
            skip = D.astype(wide) if D.ndim == 2 else D.astype(wide)[:, None]
            out = out + wide_x * skip[None, None]
        kept = ((turns * _TURN, theta), (key, last_key), (wide_x, last_x))
        new_theta, new_key, new_x = (edge_tokens(tokens, empty, cu_seqlens) for tokens, empty in kept)
        state = state + edge_tokens(key, None, cu_seqlens)[..., None] * edge_tokens(written, None, cu_seqlens)[:, :, None]
        return out.astype(x.dtype), (new_theta, state, new_key, new_x)

    return Bound(bound.call, bound.inputs, finish)


def _of_token_before(array: Any, cu_seqlens: Any) -> Any:
    """`[B,T,H,...]` of the token before in the same sequence, 0 at the first one."""
    _, starts = first_tokens(cu_seqlens, array.shape[1])
    starts = starts.reshape(1, -1, *[1] * (array.ndim - 2))
    return jnp.where(starts, jnp.zeros_like(array), jnp.roll(array, 1, axis=1))


def _fraction(turns: Any) -> Any:
    return turns - jnp.floor(turns)


def _running_turns(steps: Any, angles: Any, theta: Any, cu_seqlens: Any) -> Any:
    """Theta of every token `[B,T,H,R]` in turns, from 0 to 1; theta before the first token in radians, None = 0."""
    sequence, starts = first_tokens(cu_seqlens, steps.shape[1])
    rates = repeat_heads(jnp.tanh(angles) / 2, steps.shape[2] // angles.shape[2], 2)
    increments = _fraction(steps[..., None] * rates)

    def after(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        return one[0] | other[0], jnp.where(other[0], other[1], _fraction(one[1] + other[1]))

    turns = jax.lax.associative_scan(after, (starts[None, :, None, None], increments), axis=1)[1]
    return turns if theta is None else _fraction(turns + of_every_token(theta / _TURN, sequence, cu_seqlens))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _as_operand(array: Any, dtype: Any) -> Any:
    """Float32 numbers with as many digits as a half has, which tensor cores multiply exactly, and their own range; the gradient is
    not rounded. Others as they are."""
    return array if array.dtype == dtype else jax.lax.reduce_precision(array, 8, jnp.finfo(dtype).nmant)


def _as_operand_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _as_operand(*primals, dtype), tangents[0]


_as_operand.defjvp(_as_operand_jvp)


def _turned(array: Any, bias: Any, turns: Any, dtype: Any) -> Any:
    """B or C `[B,T,G,N]` with its bias `[H,N]`, the first pairs of neighbours turned by `[B,T,H,R]`, as an operand `[B,T,H,N]`."""
    wide = repeat_heads(array.astype(turns.dtype), turns.shape[2] // array.shape[2], 2)
    if bias is not None:
        wide = wide + bias.astype(wide.dtype)[None, None]
    return _turned_operand(wide, jnp.pad(turns, ((0, 0), (0, 0), (0, 0), (0, wide.shape[3] // 2 - turns.shape[3]))), dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _turned_operand(array: Any, turns: Any, dtype: Any) -> Any:
    """Pairs of channels `[...,N]` turned by `[...,N/2]`, rounded.

    The gradient of a turn is taken of what comes out, rounded: what two tokens that turn together give would not cancel otherwise.
    """
    return _as_operand(_turn(array, turns), dtype)


def _turned_operand_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (array, turns), (d_array, d_turns) = primals, tangents
    out: Any = _turned_operand(array, turns, dtype)
    even, odd = _pairs(out)
    aside = jnp.stack([-odd, even], axis=-1) * (_TURN * d_turns)[..., None]
    return out, _turn(d_array, turns) + aside.reshape(out.shape)


_turned_operand.defjvp(_turned_operand_jvp)


def _pairs(array: Any) -> tuple[Any, Any]:
    pairs = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
    return pairs[..., 0], pairs[..., 1]


def _turn(array: Any, turns: Any) -> Any:
    (even, odd), cos, sin = _pairs(array), jnp.cos(_TURN * turns), jnp.sin(_TURN * turns)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(array.shape)


def _check_arrays(x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, trap: Any, angles: Any, B_bias: Any, C_bias: Any) -> None:
    """Refuse dtypes and shapes that do not fit x `[B,T,H,P]`."""
    check_compute("x", x, ndim=4)
    batch, length, heads, channels = x.shape
    width = check_groups(x, B, C, None)
    if width % 2:
        raise invalid("B", f"N = {width}", "an even N", remedy="channels are turned in pairs")
    check_compute("angles", angles, ndim=4)
    found = (angles.shape[:2], angles.shape[2] > 0 and heads % angles.shape[2] == 0, angles.shape[3] <= width // 2)
    if found != (x.shape[:2], True, True):
        meaning = f"[{batch}, {length}, M, R], M a divisor of {heads} heads and R at most N / 2 = {width // 2}"
        raise invalid("angles", f"shape {tuple(angles.shape)}", meaning)
    tokens, per_head, biases = ((batch, length, heads), "[B, T, H]"), ((heads,), "[H]"), ((heads, width), "[H, N]")
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        "A": tokens if getattr(A, "ndim", 1) == 3 else per_head,
        "dt": tokens,
        "trap": tokens,
    }
    wanted["D"] = ((heads, channels), "[H, P]") if getattr(D, "ndim", 1) == 2 else per_head
    given = {"A": A, "dt": dt, "trap": trap, "D": D, "B_bias": B_bias, "C_bias": C_bias}
    for name, array in given.items():
        if array is not None:
            check_compute(name, array)
            check_shape(name, array, *wanted.get(name, biases))


def _check_state(state: Any, sequences: int, x: Any, B: Any, angles: Any) -> None:
    """Refuse a state whose four arrays do not fit the arrays of a call."""
    if state is None:
        return
    (heads, channels), width, count = x.shape[2:], B.shape[3], angles.shape[3]
    shapes = ((heads, count), (heads, width, channels), (heads, width), (heads, channels))
    meanings = ("theta [sequences, H, R]", "S [sequences, H, N, P]", "K [sequences, H, N]", "x [sequences, H, P]")
    for array, shape, meaning in zip(state, shapes, meanings, strict=True):
        check_compute("initial_state", array)
        check_shape("initial_state", array, (sequences, *shape), meaning)
