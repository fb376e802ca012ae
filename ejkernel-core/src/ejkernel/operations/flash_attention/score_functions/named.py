"""Score functions with a name: position biases that attention takes as arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.errors import invalid
from ejkernel.operations.flash_attention.score_functions.functions import Functions
from ejkernel.utils.checks import check_array
from ejkernel.utils.dtypes import accumulator


def with_named(
    functions: Functions,
    seen: Any,
    sizes: tuple[int, int, int, int],
    dtype: Any,
    *,
    alibi_slopes: Any,
    forget_gate: Any,
    batch_index: Any,
) -> Functions:
    """The functions, and after them what these arrays stand for.

    Args:
        functions: of the call.
        seen: its `Visibility`, for the positions of queries and keys.
        sizes: (B, H, T, S).
        dtype: of the query.
        batch_index: of the rows of a part of a larger problem, whose arrays these are and were checked before; or None.
        alibi_slopes: `[H]` or `[B|1, H]`: `score - slope * |query position - key position|` (Press et al., Train short, test
            long, 2022).
        forget_gate: `[B|1, H, S]`, logarithms of forget gates, one per key: the gates of the keys after a key up to the query are
            added to its score (Lin et al., Forgetting Transformer, 2025). The queries are the last T tokens.
    """
    queries, keys = sizes[2:]
    if batch_index is None:
        check_named(sizes[0], sizes[1], keys, alibi_slopes=alibi_slopes, forget_gate=forget_gate)
    if alibi_slopes is not None:
        slopes = jnp.asarray(alibi_slopes)
        slopes = slopes if slopes.ndim == 2 else slopes[None]
        query_positions = _positions(seen.query_positions, queries, seen.query_offset)
        key_positions = _positions(seen.key_positions, keys, 0)

        def alibi(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            row = batch if batch_index is None else batch - batch_index[0]  # positions are those of the part
            distance = abs(_of(query_positions, row, query) - _of(key_positions, row, key))
            return score - _of(slopes, batch, head).astype(score.dtype) * distance.astype(score.dtype)

        functions = functions.with_score(alibi, dtype)
    if forget_gate is not None:
        if not seen.causal or (seen.query_positions is None and seen.query_offset != keys - queries):
            got = f"causal={seen.causal} and query 0 at position {seen.query_offset} of {keys} keys for {queries} queries"
            raise invalid("forget_gate", got, "causal attention whose queries are the last tokens")
        gate = jnp.asarray(forget_gate)
        total = jnp.cumsum(gate.astype(accumulator(gate.dtype)), axis=-1)

        def forget(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            until = _of(total, batch, head, query + (keys - queries)) - _of(total, batch, head, key)
            return score + until.astype(score.dtype)

        functions = functions.with_score(forget, dtype)
    return functions


def check_named(batch: int, heads: int, keys: int, *, alibi_slopes: Any, forget_gate: Any) -> None:
    """Refuse arrays of other rows, heads or keys than those of the problem."""
    if alibi_slopes is not None:
        _check("alibi_slopes", alibi_slopes, ((heads,), (1, heads), (batch, heads)), "[H] or [B or 1, H]")
    if forget_gate is not None:
        _check("forget_gate", forget_gate, ((1, heads, keys), (batch, heads, keys)), "[B or 1, H, S]")


def _of(array: Any, batch: Any, *indices: Any) -> Any:
    """An element of a row of the batch, or of the one row of all. Positions by index need no array."""
    if array is None:
        return indices[0]
    return array[(0 if array.shape[0] == 1 else batch, *indices)]


def _positions(positions: Any, size: int, offset: int) -> Any:
    if positions is None and not offset:
        return None
    return (jnp.arange(size, dtype=jnp.int32)[None] if positions is None else jnp.asarray(positions)) + offset


def _check(name: str, array: Any, shapes: tuple[tuple[int, ...], ...], meaning: str) -> None:
    check_array(name, array)
    if tuple(array.shape) not in shapes:
        raise invalid(name, f"shape {tuple(array.shape)}", meaning)
