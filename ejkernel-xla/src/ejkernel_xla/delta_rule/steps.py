"""One step of the loop over tokens: a few chunks, by matrix products or token after token."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.operations.delta_rule.lengths import divided_by_length
from ejkernel_xla._numerics import dot_precision, finite, finite_logs, first_nonfinite, nan_where
from ejkernel_xla.delta_rule.products import decayed_products, scan, sum_after, sum_before, unit_lower_inverse


class Tokens(NamedTuple):
    """The tokens of the chunks of a step: `[n, b, h, c]`, n chunks of c, then channels. Zeros where no token takes part."""

    query: Any
    key: Any
    value: Any
    beta: Any = None
    decay: Any = None
    a: Any = None
    b: Any = None


class Marks(NamedTuple):
    """Where states change in the chunks of a step; None where they do not.

    Attributes:
        rank: `[n, 1 or b, c]`, how often the state became 0 up to each place.
        rank_before: `[n, 1 or b]`, the same for the place before the chunk.
        first: `[n, 1 or b]` bool, whether another sequence begins with the chunk.
    """

    rank: Any = None
    rank_before: Any = None
    first: Any = None


class Step(NamedTuple):
    """A few chunks. starts: `[n, b, H, d, v]`, the state before each chunk with which another sequence begins, or None."""

    tokens: Tokens
    marks: Marks = Marks()
    starts: Any = None


class _Vectors(NamedTuple):
    """What tokens do, `[n, b, H, c, d or v]` in the state's dtype; decay `[..., d]` or `[..., 1]`."""

    query: Any
    read: Any
    writes: tuple[Any, ...]
    value: Any
    beta: Any
    decay: Any


def _vectors(call: DeltaRuleCall, tokens: Tokens) -> _Vectors:
    dtype = jnp.dtype(call.state_dtype)

    def wide(array: Any) -> Any:
        return jnp.repeat(array, call.heads // array.shape[2], axis=2) if array.shape[2] != call.heads else array

    query, key, value = (array.astype(dtype) for array in tokens[:3])
    if call.use_qk_l2norm:
        query, key = divided_by_length(query), divided_by_length(key)
    query, key, value = wide(query * call.softmax_scale), wide(key), wide(value)
    beta = jnp.ones_like(key[..., :1]) if tokens.beta is None else wide(tokens.beta.astype(dtype))[..., None]
    if tokens.decay is None:
        decay = jnp.zeros_like(key[..., :1])
    else:
        decay = finite_logs(wide(tokens.decay.astype(dtype)))
        decay = decay if call.decays_by_channel else decay[..., None]
    read = jnp.exp(decay) * key if tokens.b is None else wide(tokens.b.astype(dtype))
    writes = (key,) if tokens.a is None else (wide(tokens.a.astype(dtype)), key)
    return _Vectors(query, read, writes, value, beta, decay)


def _einsum(call: DeltaRuleCall) -> Any:
    """Products in full precision; where the inputs are of two bytes, as the device multiplies float32 fastest."""
    return functools.partial(jnp.einsum, precision=dot_precision(None, call.query.dtype))


def run_step(call: DeltaRuleCall, state: Any, step: Step) -> tuple[Any, Any, Any]:
    """The state `[b, H, d, v]` after the chunks of a step, from that before them.

    Returns:
        The state, out `[n, b, H, c, v]`, and the state after each chunk `[n, b, H, d, v]` if there are starts, else None.
    """
    return (_by_chunks if call.use_chunked else _by_tokens)(call, state, step)


def _enter(state: Any, first: Any, start: Any) -> Any:
    return state if start is None else jnp.where(first[:, None, None, None], start, state)


def _by_tokens(call: DeltaRuleCall, state: Any, step: Step) -> tuple[Any, Any, Any]:
    tokens, marks, starts = step
    vectors, dot = _vectors(call, tokens), _einsum(call)
    fresh = None
    if marks.rank is not None:
        before = jnp.concatenate([marks.rank_before[..., None], marks.rank[..., :-1]], axis=-1)
        fresh = jnp.moveaxis(marks.rank != before, -1, 1)

    def token(state: Any, step: Any) -> Any:
        (query, read, writes, value, beta, decay), fresh = step
        if fresh is not None:
            state = jnp.where(fresh[:, None, None, None], 0, state)
        read_value = dot("bhd,bhdv->bhv", read, state)
        state = jnp.exp(decay)[..., None] * state
        if len(writes) == 1:
            state += dot("bhd,bhv->bhdv", writes[0], beta * (value - read_value))
        else:
            state += dot("bhd,bhv->bhdv", writes[0], read_value) + dot("bhd,bhv->bhdv", writes[1], beta * value)
        return state, dot("bhd,bhdv->bhv", query, state)

    def chunk(state: Any, step: Any) -> Any:
        steps, first, start = step
        state, out = scan(token, _enter(state, first, start), steps)
        return state, (jnp.moveaxis(out, 0, 2), None if start is None else state)

    rows = (jax.tree.map(lambda x: jnp.moveaxis(x, 3, 1), vectors), fresh)
    state, (out, states) = scan(chunk, state, (rows, marks.first, starts))
    return state, out, states


class _Chunk(NamedTuple):
    """What a chunk does to the state S before it, `[n, b, H, ...]`.

    With `u = values - reads S`: out is `queries S + weights u + own`, and the state after it `kept S + writes^T u + stored`.
    """

    reads: Any
    values: Any
    queries: Any
    weights: Any
    kept: Any
    writes: Any
    own: Any = None
    stored_keys: Any = None
    stored_values: Any = None


def _by_chunks(call: DeltaRuleCall, state: Any, step: Step) -> tuple[Any, Any, Any]:
    tokens, marks, starts = step
    dot, vectors = _einsum(call), _vectors(call, tokens)
    vectors, nan_in_out, nan_in_state = _finite(vectors)

    def chunk(state: Any, step: Any) -> Any:
        (reads, values, queries, weights, kept, writes, own, keys, stored), nan, first, start = step
        state = _enter(state, first, start)
        values = values - dot("bhcd,bhdv->bhcv", reads, state)
        out = dot("bhcd,bhdv->bhcv", queries, state) + dot("bhij,bhjv->bhiv", weights, values)
        state = kept * state + dot("bhcd,bhcv->bhdv", writes, values)
        if own is not None:
            out, state = out + own, state + dot("bhcd,bhcv->bhdv", keys, stored)
        state = state + nan
        return state, (out, None if start is None else state)

    steps = (_chunks(call, vectors, marks), nan_in_state, marks.first, starts)
    state, (out, states) = scan(chunk, state, steps)
    return state, out + nan_in_out, states


def _finite(x: _Vectors) -> tuple[_Vectors, Any, Any]:
    """NaN-safe path: what enters matmuls over the tokens of a chunk is finite, since 0 * NaN would spread to earlier tokens.

    Returns:
        The vectors; what is added to out `[n, b, H, c, v]` and to the state after the chunk `[n, b, H, 1, v]`: NaN in the value
        channels that a non-finite number reaches, of that token and later ones, else 0. A query reaches its own token only.
    """
    size, axis = x.value.shape[-2], x.value.ndim - 2
    first = first_nonfinite(x.value, axis, of_all_channels=False)
    for array in (x.read, *x.writes, x.beta, x.decay):
        first = jnp.minimum(first, first_nonfinite(array, axis, of_all_channels=True))
    index = jax.lax.broadcasted_iota(jnp.int32, (*[1] * axis, size, 1), axis)
    return (
        _Vectors(x.query, *jax.tree.map(finite, x[1:])),
        nan_where(index >= first, x.value.dtype),
        nan_where(first < size, x.value.dtype),
    )


def _chunks(call: DeltaRuleCall, x: _Vectors, marks: Marks) -> _Chunk:
    """The WY form: u of every token, a linear function of the state before the chunk, by the inverse of a triangular matrix."""
    dot = _einsum(call)
    readers = jnp.stack([x.read, x.query * jnp.exp(x.decay)], axis=-3)
    writers = jnp.stack(x.writes, axis=-3)
    products = decayed_products(dot, readers, writers, x.decay)
    readers = readers * jnp.exp(sum_before(x.decay))[..., None, :, :]
    writers = writers * jnp.exp(sum_after(x.decay))[..., None, :, :]
    kept = jnp.exp(jnp.sum(x.decay, axis=-2))[..., None]
    if marks.rank is not None:
        rank, last = marks.rank[:, :, None, None, :], marks.rank[:, :, None, None, -1:]
        before = marks.rank_before[:, :, None, None, None]
        products = jnp.where(rank[..., :, None, None] == rank[..., None, None, :], products, 0)
        readers = jnp.where((rank == before)[..., None], readers, 0)
        writers = jnp.where((rank == last)[..., None], writers, 0)
        kept = jnp.where(last == before, kept, 0)
    reach, given = products[..., 0, :, 0, :], x.beta * x.value
    own = dot("...id,...id->...i", x.query, x.writes[0])
    weights = products[..., 1, :, 0, :] + jnp.where(jnp.eye(own.shape[-1], dtype=bool), own[..., None], 0)
    reads = readers[..., 0, :, :]
    if len(x.writes) == 1:
        inverse = unit_lower_inverse(x.beta * reach)
        solved = dot("...ij,...jd->...id", inverse, jnp.concatenate([x.beta * reads, given], axis=-1))
        reads, values = jnp.split(solved, [reads.shape[-1]], axis=-1)
        return _Chunk(reads, values, readers[..., 1, :, :], weights, kept, writers[..., 0, :, :])
    inverse = unit_lower_inverse(-reach)
    from_values = dot("...ij,...jv->...iv", products[..., 0, :, 1, :], given)
    solved = dot("...ij,...jd->...id", inverse, jnp.concatenate([-reads, from_values], axis=-1))
    reads, values = jnp.split(solved, [reads.shape[-1]], axis=-1)
    direct = dot("...id,...id->...i", x.query, x.writes[1])[..., None] * given
    direct = direct + dot("...ij,...jv->...iv", products[..., 1, :, 1, :], given)
    return _Chunk(
        reads, values, readers[..., 1, :, :], weights, kept, writers[..., 0, :, :], direct, writers[..., 1, :, :], given
    )
