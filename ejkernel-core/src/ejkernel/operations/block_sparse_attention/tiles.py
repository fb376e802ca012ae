"""Tiles of the score matrix: which of them hold a visible pair, and lists of those for each block of queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call.arrays import ArraySpec
from ejkernel.errors import wrong_type
from ejkernel.operations.flash_attention import pairs

Predicate = Callable[[Any, Any], Any]
_NO_SEGMENT = 2**31 - 1


class TileLists(NamedTuple):
    """key_tiles int32 and full_tiles bool `[B|1, *h, n, m]` of `BlockSparseAttentionInputs`; full_tiles None for not known."""

    key_tiles: Any
    full_tiles: Any

    @property
    def counts(self) -> Any:
        """Length of each list, int32 `[B|1, *h, n]`."""
        return jnp.sum(jnp.cumprod(self.key_tiles >= 0, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)


def tile_lists(call: Any, inputs: Any, predicate: Predicate | None, q_block: int, k_block: int) -> TileLists:
    """The lists of a canonical call, on the device. Heads share them: a tile is visited if any head sees a pair of it."""
    return listed(*tile_map(call, inputs, predicate, q_block, k_block))


def listed(some: Any, every: Any) -> TileLists:
    """From two maps bool `[b, *h, n, tiles]`: tiles with a visible pair, and tiles with visible pairs only."""
    order = jnp.argsort(~some, axis=-1, stable=True).astype(jnp.int32)
    visited = jnp.take_along_axis(some, order, axis=-1)
    return TileLists(jnp.where(visited, order, -1), visited & jnp.take_along_axis(every, order, axis=-1))


def check_predicate(builder: Any) -> None:
    """Refuse a `mask_builder` that is no elementwise function of two arrays of positions."""
    expected = "a function (query_positions, key_positions) -> bool, elementwise"
    if not callable(builder):
        raise wrong_type("mask_builder", repr(builder), expected)
    query, key = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1, 2, 1), (1, 1, 1, 3)))
    try:
        found = jax.eval_shape(builder, query, key)
        fits = found.dtype == bool and np.broadcast_shapes(found.shape, (1, 1, 2, 3)) == (1, 1, 2, 3)
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise wrong_type("mask_builder", f"a function that fails: {reason}", expected) from error
    if not fits:
        raise wrong_type("mask_builder", f"a function that returns {found.dtype} of shape {found.shape}", expected)


def mapped(lists: TileLists, tiles: int) -> Any:
    """The map bool `[b, *h, n, tiles]` of the listed tiles."""
    places = jnp.arange(lists.key_tiles.shape[-1]), jnp.arange(tiles)
    place, tile = (jnp.expand_dims(x, range(lists.key_tiles.ndim - 1 + i)) for i, x in enumerate(places))
    return ((place < lists.counts[..., None])[..., None] & (lists.key_tiles[..., None] == tile)).any(-2)


def tile_map(
    call: Any, inputs: Any, predicate: Predicate | None, q_block: int, k_block: int, *, per_head: bool = False
) -> tuple[Any, Any]:
    """Whether each tile holds a visible pair, and whether all of its pairs are visible: bool `[B|1, n, tiles]`.

    With `per_head`, `[B|1, H, n, tiles]` of a mask that differs between H heads.

    A dense mask or a predicate is looked at pair by pair, together with everything else. Without them bounds of positions and
    segments decide, in O(T + S): where several rules or unsorted segments meet, a tile may be said to hold a pair that it does
    not hold. Bias is left out of both.
    """
    if call.mask is not None or predicate is not None:
        some, every = _by_pairs(call, inputs, predicate, q_block, k_block)
        return (some, every) if per_head and some.shape[1] > 1 else (some.any(1), every.all(1))
    return _by_bounds(call, inputs, q_block, k_block)


def _blocks(length: int, block: int) -> Any:
    """Indices `[n, block]`; past the end the last one is repeated, which changes neither any nor all."""
    first = jnp.arange(-(-length // block), dtype=jnp.int32)[:, None] * block
    return jnp.minimum(first + jnp.arange(block, dtype=jnp.int32)[None], length - 1)


def _positions(call: Any, inputs: Any) -> tuple[Any, Any]:
    queries, keys = call.query.shape[1], call.key.shape[1]
    query, key = inputs.query_positions, inputs.key_positions
    query = jnp.arange(queries, dtype=jnp.int32)[None] + call.query_offset if query is None else query
    return query, jnp.arange(keys, dtype=jnp.int32)[None] if key is None else key


def _by_pairs(call: Any, inputs: Any, predicate: Predicate | None, q_block: int, k_block: int) -> tuple[Any, Any]:
    """`[B|1, H|1, n, tiles]`."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    q_blocks, k_blocks = _blocks(queries, q_block), _blocks(keys, k_block)
    query, key = _positions(call, inputs)
    block_call = dataclasses.replace(call, query=ArraySpec((1, q_block, 1, 1), call.query.dtype), query_offset=0)

    def row(index: Any) -> tuple[Any, Any]:
        position = query[:, index]
        mask, segments = inputs.mask, inputs.query_segments
        block = inputs._replace(
            query_positions=position,
            key_positions=key,
            query_segments=None if segments is None else segments[:, index],
            mask=mask if mask is None or mask.shape[2] == 1 else mask[:, :, index],
        )
        seen = pairs.visible(block_call, block, jnp)
        if predicate is not None:
            seen = seen & predicate(position[:, None, :, None], key[:, None, None, :])
        tiles = jnp.broadcast_to(seen, (*seen.shape[:2], q_block, keys))[..., k_blocks]
        return tiles.any((2, 4)), tiles.all((2, 4))

    some, every = jax.lax.map(row, q_blocks)
    return jnp.moveaxis(some, 0, 2), jnp.moveaxis(every, 0, 2)


def _by_bounds(call: Any, inputs: Any, q_block: int, k_block: int) -> tuple[Any, Any]:
    q_blocks, k_blocks = _blocks(call.query.shape[1], q_block), _blocks(call.key.shape[1], k_block)
    query, key = _positions(call, inputs)
    query, key = query[:, q_blocks], key[:, k_blocks]
    bounds = (query.min(-1)[:, :, None], query.max(-1)[:, :, None], key.min(-1)[:, None], key.max(-1)[:, None])
    some, every = pairs.tile_visibility(call, *bounds, jnp)
    if inputs.query_segments is None:
        return some, every
    query, key = inputs.query_segments[:, q_blocks], inputs.key_segments[:, k_blocks]
    q_low, q_high = (bound[:, :, None] for bound in _segment_bounds(query))
    k_low, k_high = (bound[:, None] for bound in _segment_bounds(key))
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    one = one & (query >= 0).all(-1)[:, :, None] & (key >= 0).all(-1)[:, None]
    return some & (q_low <= k_high) & (k_low <= q_high), every & one


def _segment_bounds(segments: Any) -> tuple[Any, Any]:
    """Smallest and largest segment of each block, padding left out."""
    return jnp.where(segments < 0, _NO_SEGMENT, segments).min(-1), segments.max(-1)
