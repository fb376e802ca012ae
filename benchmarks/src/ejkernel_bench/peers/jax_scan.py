"""Recurrences as one writes them first: `jax.lax.scan` over tokens with a float32 state, and for linear attention by chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond, same_heads

_CHUNK = 64


def _by_token(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, arrays: Any) -> tuple[Any, Any]:
    """State and results `[b, t, ...]` of a scan over axis 1 of the arrays."""
    state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0), arrays))
    return state, jnp.moveaxis(out, 0, 1)


def _linear_recurrence(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "query", "key", "value", "g", "g_gamma", "gk", "bonus", "softmax_scale") or same_heads(call)
    if reason:
        return reason

    def recurrence(x: Any) -> Mapping[str, Any]:
        def step(state: Any, token: Any) -> tuple[Any, Any]:
            query, key, value, decay = token
            written = key[..., :, None] * value[..., None, :]
            after = jnp.exp(decay)[..., None] * state + written
            seen = after if x.bonus is None else state + x.bonus.astype(jnp.float32)[..., None] * written
            return after, call.softmax_scale * jnp.einsum("bhd,bhdv->bhv", query, seen)

        state = jnp.zeros((*x.query.shape[:1], x.query.shape[2], x.query.shape[3], x.value.shape[3]))
        _, out = _by_token(step, state, (x.query, x.key, x.value, _log_decays(x)))
        return {"out": out.astype(x.value.dtype)}

    return recurrence


def _log_decays(x: Any) -> Any:
    """`[b, t, h, d]`, of all kinds together."""
    total = jnp.zeros(x.query.shape, jnp.float32)
    for decay in (x.g[..., None] if x.g is not None else None, x.gk):
        total = total if decay is None else total + decay.astype(jnp.float32)
    return total if x.g_gamma is None else total + x.g_gamma.astype(jnp.float32)[:, None, :, None]


def _chunked_linear_recurrence(call: Any, inputs: Any) -> Function | str:
    """Inside of a chunk products of tokens by tokens, between chunks a state; decays per head only."""
    reason = beyond(call, "query", "key", "value", "g", "g_gamma", "softmax_scale") or same_heads(call)
    if reason:
        return reason

    def recurrence(x: Any) -> Mapping[str, Any]:
        batch, length, heads, width = x.query.shape

        def split(array: Any) -> Any:
            padding = ((0, 0), (0, -length % _CHUNK), *[(0, 0)] * (array.ndim - 2))
            array = jnp.pad(array.astype(jnp.float32), padding)
            return array.reshape(batch, -1, _CHUNK, *array.shape[2:]).swapaxes(0, 1)

        def step(state: Any, chunk: Any) -> tuple[Any, Any]:
            query, key, value, decay = chunk
            sums = jnp.cumsum(decay, axis=1)  # [b, t, h]
            between = sums[:, :, None] - sums[:, None]  # [b, t, s, h]
            seen = jnp.tril(jnp.ones((_CHUNK, _CHUNK), bool))[None, :, :, None]
            weights = jnp.exp(jnp.where(seen, between, -jnp.inf))
            scores = jnp.einsum("bthd,bshd->btsh", query, key) * weights
            out = jnp.einsum("btsh,bshv->bthv", scores, value)
            out = out + jnp.einsum("bthd,bhdv->bthv", query * jnp.exp(sums)[..., None], state)
            left = jnp.exp(sums[:, -1:] - sums)[..., None]
            state = jnp.exp(sums[:, -1])[..., None, None] * state + jnp.einsum("bthd,bthv->bhdv", key * left, value)
            return state, call.softmax_scale * out

        arrays = (*map(split, (x.query, x.key, x.value)), split(_log_decays(x)[..., 0]))
        state = jnp.zeros((batch, heads, width, x.value.shape[3]))
        _, out = jax.lax.scan(step, state, arrays)
        return {"out": out.swapaxes(0, 1).reshape(batch, -1, heads, x.value.shape[3])[:, :length].astype(x.value.dtype)}

    return recurrence


def _delta_rule(call: Any, inputs: Any) -> Function | str:
    known = ("query", "key", "value", "beta", "decay", "softmax_scale", "use_qk_l2norm", "use_chunked")
    reason = beyond(call, *known) or same_heads(call)
    if reason:
        return reason

    def rule(x: Any) -> Mapping[str, Any]:
        def step(state: Any, token: Any) -> tuple[Any, Any]:
            query, key, value, beta, decay = token
            state = jnp.exp(decay)[..., None] * state
            correction = beta[..., None] * (value - jnp.einsum("bhd,bhdv->bhv", key, state))
            state = state + key[..., :, None] * correction[..., None, :]
            return state, call.softmax_scale * jnp.einsum("bhd,bhdv->bhv", query, state)

        query, key = (_of_length_1(array) if call.use_qk_l2norm else array for array in (x.query, x.key))
        beta = jnp.ones(x.key.shape[:3]) if x.beta is None else x.beta
        decay = jnp.zeros(x.key.shape) if x.decay is None else x.decay
        decay = jnp.broadcast_to(decay if decay.ndim == 4 else decay[..., None], x.key.shape)
        state = jnp.zeros((x.key.shape[0], *x.key.shape[2:], x.value.shape[3]))
        _, out = _by_token(step, state, (query, key, x.value, beta, decay))
        return {"out": out.astype(x.value.dtype)}

    return rule


def _of_length_1(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide**2, -1, keepdims=True) + 1e-6)


def _selective_scan(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "A", "B", "C", "D", "dt", "initial_state")
    if reason:
        return reason

    def scan(x: Any) -> Mapping[str, Any]:
        def step(state: Any, token: Any) -> tuple[Any, Any]:
            values, read, write, steps = token
            decay = jnp.exp(x.A.astype(jnp.float32) * steps[..., None])
            state = decay * state + (steps * values)[..., None] * write[:, None, :]
            return state, jnp.einsum("bin,bn->bi", state, read)

        empty = jnp.zeros((x.x.shape[0], *x.A.shape[1:]))
        start = empty if x.initial_state is None else x.initial_state.astype(jnp.float32)
        state, out = _by_token(step, start, (x.x, x.C, x.B, x.dt))
        if x.D is not None:
            out = out + x.D.astype(jnp.float32)[:, None] * x.x.astype(jnp.float32)
        return {"out": out.astype(x.x.dtype), "final_state": state}

    return scan


def _rwkv4(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "w", "u", "k", "v")
    if reason:
        return reason

    def mixing(x: Any) -> Mapping[str, Any]:
        decay, bonus = -jnp.exp(x.w.astype(jnp.float32)), x.u.astype(jnp.float32)

        def step(state: Any, token: Any) -> tuple[Any, Any]:
            (total, weight, largest), (key, value) = state, token
            now = jnp.maximum(largest, bonus + key)
            old, new = jnp.exp(largest - now), jnp.exp(bonus + key - now)
            out = (old * total + new * value) / (old * weight + new)
            after = jnp.maximum(largest + decay, key)
            old, new = jnp.exp(largest + decay - after), jnp.exp(key - after)
            return (old * total + new * value, old * weight + new, after), out

        empty = jnp.zeros((x.k.shape[0], x.k.shape[2]))
        _, out = _by_token(step, (empty, empty, empty - 1e30), (x.k, x.v))
        return {"out": out.astype(x.v.dtype)}

    return mixing


PEERS = (
    Peer(
        "lax.scan",
        {
            "linear_recurrence": _linear_recurrence,
            "delta_rule": _delta_rule,
            "selective_scan": _selective_scan,
            "rwkv4": _rwkv4,
        },
    ),
    Peer("jax chunked", {"linear_recurrence": _chunked_linear_recurrence}),
)
