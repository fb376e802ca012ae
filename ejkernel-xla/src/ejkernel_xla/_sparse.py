"""Sparse softmax attention: every query attends to its own gathered keys, one tile of queries at a time.

Axes: b batch, k key heads, g query heads per key head, q queries of the tile, j gathered keys of a query, d and e sizes of keys
and values. Batch and heads stay separate axes, so that XLA can partition them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._numerics import dot_precision, finite, propagate_nan


class Rows(NamedTuple):
    """Per query `[b,k,t,g,...]`, or a tile of it: query, d_out, and the statistics of `weight = exp(logit - shift)`, `d_logit =
    weight * (d_out . value - delta)`."""

    query: Any
    d_out: Any
    shift: Any
    delta: Any


def by_head(x: Any, key_heads: int) -> Any:
    """`[b,t,h,...]` as `[b,k,t,g,...]`."""
    groups = x.shape[2] // key_heads
    return jnp.moveaxis(x.reshape(*x.shape[:2], key_heads, groups, *x.shape[3:]), 1, 2)


def from_heads(x: Any) -> Any:
    """`[b,k,t,g,...]` as `[b,t,h,...]`."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def by_tiles(function: Callable[[Any], Any], arrays: Any, block: int) -> Any:
    """Map `function` over tiles of `block` queries (axis 2) of every array; concatenates the results along axis 2.

    The last tile is padded with zeros, which must be harmless. A single tile needs no loop.
    """
    length = jax.tree.leaves(arrays)[0].shape[2]
    if length <= block:
        return function(arrays)
    tiles = jax.tree.map(lambda x: _tiles(x, block), arrays)
    found = jax.lax.map(function, tiles)
    return jax.tree.map(lambda x: _joined(x, length), found)


def fold_tiles(function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, arrays: Any, block: int) -> tuple[Any, Any]:
    """`by_tiles` of `(carry, tile) -> (carry, result)`."""
    length = jax.tree.leaves(arrays)[0].shape[2]
    if length <= block:
        return function(carry, arrays)
    tiles = jax.tree.map(lambda x: _tiles(x, block), arrays)
    carry, found = jax.lax.scan(function, carry, tiles)
    return carry, jax.tree.map(lambda x: _joined(x, length), found)


def _tiles(x: Any, block: int) -> Any:
    x = jnp.pad(x, [(0, -x.shape[axis] % block if axis == 2 else 0) for axis in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:2], x.shape[2] // block, block, *x.shape[3:]), 2, 0)


def _joined(x: Any, length: int) -> Any:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])[:, :, :length]


def attend(query: Any, key: Any, value: Any, visible: Any, scale: float) -> tuple[Any, Any]:
    """Output `[b,k,q,g,e]` and log-sum-exp `[b,k,q,g]` in the wide dtype.

    Args:
        query: `[b,k,q,g,d]`.
        key, value: `[b,k,q,j,d]` and `[b,k,q,j,e]`, finite where invisible.
        visible: bool `[b,k,q,j]`.
        scale: factor on the products.
    """
    logits = _product("bkqgd,bkqjd->bkqgj", query, key) * scale
    logits = jnp.where(visible[:, :, :, None], logits, -jnp.inf)
    # Any constant may be subtracted, so the maximum needs no derivative.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = _product("bkqgj,bkqje->bkqge", weights.astype(value.dtype), value) / total[..., None]
    return out, jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def rows_of(query: Any, out: Any, lse: Any, d_out: Any, d_lse: Any) -> Rows:
    """The per-query inputs of backward, from `[b,k,t,g,...]`.

    NaN-safe: all matmul operands are finite. A query that holds a non-finite number, or whose cotangent does, gets NaN as its
    shift, so that its weights are NaN where it sees a key and 0 elsewhere.
    """
    wide = accumulator(query.dtype)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
    delta = delta if d_lse is None else delta - d_lse.astype(wide)
    nonfinite = propagate_nan(query).astype(wide) + propagate_nan(d_out).astype(wide) + delta * 0
    shift = jnp.where(lse == -jnp.inf, jnp.inf, lse.astype(wide) + nonfinite)
    return Rows(finite(query), finite(d_out), shift, finite(delta))


def tile_gradients(rows: Rows, key: Any, value: Any, visible: Any, scale: float) -> tuple[Any, Any, Any]:
    """Gradients of a tile: query `[b,k,q,g,d]`, and of its gathered keys and values, in the wide dtype."""
    logits = _product("bkqgd,bkqjd->bkqgj", rows.query, key) * scale
    seen = visible[:, :, :, None]
    weights = jnp.where(seen, jnp.exp(logits - rows.shift[..., None]), 0)
    d_weights = _product("bkqge,bkqje->bkqgj", rows.d_out, value)
    d_logits = (weights * (d_weights - rows.delta[..., None]) * scale).astype(key.dtype)
    return (
        _product("bkqgj,bkqjd->bkqgd", d_logits, key),
        _product("bkqgj,bkqgd->bkqjd", d_logits, rows.query),
        _product("bkqgj,bkqge->bkqje", weights.astype(value.dtype), rows.d_out),
    )


def gathered(x: Any, starts: Any, size: int) -> Any:
    """`size` tokens from each start: `[b,k,n,d]` and `[b,k,q,s]` give `[b,k,q,s*size,d]`; starts lie within `n - size`."""

    def windows(x: Any, starts: Any) -> Any:
        take = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(x, start, size))
        return take(starts.reshape(-1)).reshape(starts.shape[0], starts.shape[1] * size, x.shape[-1])

    return jax.vmap(jax.vmap(windows))(x, starts)


def added(total: Any, starts: Any, parts: Any) -> Any:
    """`total[b,k,n,d]` with the windows `[b,k,q,s*size,d]` added at their starts; windows that begin at n or later are dropped.

    Queries are processed serially and the windows of a query do not overlap, so the scatter is deterministic.
    """
    slots, size = starts.shape[3], parts.shape[3] // max(starts.shape[3], 1)
    parts = jnp.moveaxis(parts.reshape(*parts.shape[:3], slots, size, parts.shape[-1]), 2, 0)
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))

    def add(total: Any, starts: Any, parts: Any) -> Any:
        return jax.lax.scatter_add(total, starts[:, None], parts, numbers, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)

    def step(total: Any, one: tuple[Any, Any]) -> tuple[Any, None]:
        return jax.vmap(jax.vmap(add))(total, *one), None

    return jax.lax.scan(step, total, (jnp.moveaxis(starts, 2, 0), parts))[0]


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """A loop's initial value that varies over the mesh axes over which the data does (inside `shard_map`)."""
    return vary_like(jnp.zeros(shape, dtype), like)


def _product(equation: str, a: Any, b: Any) -> Any:
    return jnp.einsum(equation, a, b, precision=dot_precision(None, a.dtype), preferred_element_type=accumulator(a.dtype))
