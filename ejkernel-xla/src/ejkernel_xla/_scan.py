"""Recurrences with small states: a loop over chunks, and in each a loop over tokens. Backward differentiates one chunk at a
time.

Forward keeps one state. Backward keeps the states between chunks, and those of the chunk that it differentiates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel_xla._chunks import ChunkLoop

Run = Callable[..., tuple[Any, Any]]
"""`run(shared, state, tokens, valid)`: the state after a chunk and its outputs `[b, c, ...]`; `valid` `[1, c]` or None for all."""


_CACHED_STATES = 2**17
"""Elements of states that a CPU's cache holds beside the tokens (512 KiB in float32)."""


def states_in_cache(query: ArraySpec, value: ArraySpec, heads: int) -> bool:
    """Whether a CPU's cache holds the states `[b, heads, d, v]`: then token after token is faster than products of chunks."""
    return query.shape[0] * heads * query.shape[3] * value.shape[3] <= _CACHED_STATES


def over_tokens(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, tokens: Any, valid: Any, unroll: int
) -> tuple[Any, Any]:
    """`step(state, token) -> (state, output)` for the tokens `[b, c, ...]` of a chunk that exist; in backward, only states stay."""

    @jax.checkpoint
    def guarded(state: Any, token: tuple[Any, Any]) -> tuple[Any, Any]:
        token, exists = token
        after, output = step(state, token)
        if exists is not None:
            after = jax.tree.map(lambda new, old: jnp.where(exists, new, old), after, state)
        return after, output

    by_token = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), tokens)
    state, outputs = jax.lax.scan(guarded, state, (by_token, None if valid is None else valid[0]), unroll=unroll)
    return state, jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), outputs)


def run_forward(chunks: ChunkLoop, run: Run, shared: Any, initial: Any, tokens: Any, dtype: Any, like: Any) -> tuple[Any, Any]:
    """The last states, shaped like the initial ones, and the outputs `[b, t, ...]` in this dtype. `tokens` are prepared arrays."""

    def body(carry: tuple[Any, Any], index: Any) -> tuple[tuple[Any, Any], Any]:
        state, kept = carry
        before = _before(chunks, state, initial, index)
        state, outputs = run(shared, before, _pieces(chunks, tokens, state, index), chunks.valid(index))
        if chunks.packed:
            kept = jax.tree.map(lambda states, one: chunks.write(states, one, index, at_first=False), kept, state)
        return (state, kept), outputs.astype(dtype)

    (state, kept), pieces = chunks.loop(body, (_first(chunks, initial), initial if chunks.packed else None), like)
    return kept if chunks.packed else state, chunks.restore(pieces)


def run_backward(
    chunks: ChunkLoop, run: Run, shared: Any, initial: Any, tokens: Any, d_final: Any, d_out: Any, like: Any
) -> tuple[Any, Any, Any]:
    """Gradients of `shared`, the initial states and the tokens, from those of the last states and of the outputs."""
    d_out = chunks.prepare(d_out)

    def advance(state: Any, index: Any) -> tuple[Any, Any]:
        before = _before(chunks, state, initial, index)
        return run(shared, before, _pieces(chunks, tokens, state, index), chunks.valid(index))[0], before

    _, befores = chunks.loop(advance, _first(chunks, initial), like)

    def body(carry: tuple[Any, Any, Any], index: Any) -> tuple[tuple[Any, Any, Any], Any]:
        d_state, d_shared, d_initial = carry
        if chunks.packed:
            d_state = jax.tree.map(lambda one, of_all: chunks.end(one, of_all, index), d_state, d_final)
        before = jax.tree.map(lambda states: jax.lax.dynamic_index_in_dim(states, index, keepdims=False), befores)
        pieces, valid = _pieces(chunks, tokens, before, index), chunks.valid(index)
        d_rows = chunks.piece(d_out, index).astype(_dtype(before))
        if chunks.packed:
            d_rows = jnp.where(valid.reshape(*valid.shape, *[1] * (d_rows.ndim - 2)), d_rows, 0)
        _, pull = jax.vjp(functools.partial(run, valid=valid), shared, before, pieces)
        more, d_state, d_pieces = pull((d_state, d_rows))
        if chunks.packed:
            d_initial = jax.tree.map(lambda of_all, one: chunks.write(of_all, one, index, at_first=True), d_initial, d_state)
            d_state = jax.tree.map(lambda one: chunks.forget_before(one, index), d_state)
        narrow = jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), d_pieces, tokens)
        return (d_state, jax.tree.map(jnp.add, d_shared, more), d_initial), narrow

    # A sequence without tokens hands its gradient on.
    start = (_first(chunks, d_final), jax.tree.map(jnp.zeros_like, shared), d_final if chunks.packed else None)
    (d_state, d_shared, d_initial), pieces = chunks.loop(body, start, like, reverse=True)
    return d_shared, d_initial if chunks.packed else d_state, jax.tree.map(chunks.restore, pieces)


def _first(chunks: ChunkLoop, states: Any) -> Any:
    """What the loop carries before its first chunk; packed sequences begin with states of their own."""
    return jax.tree.map(lambda array: jnp.zeros_like(array[:, 0]), states) if chunks.packed else states


def _before(chunks: ChunkLoop, state: Any, initial: Any, index: Any) -> Any:
    """The state before a chunk."""
    if not chunks.packed:
        return state
    return jax.tree.map(lambda one, of_all: chunks.begin(one, of_all, index), state, initial)


def _pieces(chunks: ChunkLoop, tokens: Any, state: Any, index: Any) -> Any:
    """The tokens of a chunk in the dtype of the state."""
    return jax.tree.map(lambda array: chunks.piece(array, index).astype(_dtype(state)), tokens)


def _dtype(state: Any) -> Any:
    return jax.tree.leaves(state)[0].dtype
