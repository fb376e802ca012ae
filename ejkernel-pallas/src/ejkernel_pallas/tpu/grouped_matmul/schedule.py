"""Lists of work items (group, row tile), which XLA computes from the group sizes.

Their lengths depend on shapes only, so one compilation serves every mix of sizes; the grid runs over the valid items. A row
tile that neighbouring groups share is one item for each of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Items(NamedTuple):
    """Work items, int32 `[items]` each: rows `low <= row < high` of the tile `tile` of the member `member` and matrix `matrix`.

    An item without rows has low = high. `edges` has bit 0 set where the result's block is new and bit 1 where it is left.
    `source` is the item whose blocks are read: the item itself, or for one without rows a neighbour whose blocks are there anyhow.
    `base` is the last item up to this one that leaves rows of a new block to others.
    """

    member: Any
    matrix: Any
    tile: Any
    low: Any
    high: Any
    edges: Any
    source: Any
    base: Any


class _Groups(NamedTuple):
    """The rows of every matrix, `[b, g]`, and the number of tiles that they touch."""

    start: Any
    end: Any
    tiles: Any


def _groups(sizes: Any, offset: Any, batch: int, rows: int, matrices: int, height: int) -> _Groups:
    ends = jnp.minimum(jnp.cumsum(sizes, axis=1), rows)
    starts = jnp.pad(ends, ((0, 0), (1, 0)))
    ends = jnp.pad(ends, ((0, 0), (0, 1)))
    group = jnp.arange(matrices, dtype=jnp.int32)[None] + (0 if offset is None else offset[:, None])
    group = jnp.broadcast_to(group, (batch, matrices))
    starts, ends = (jnp.broadcast_to(value, (batch, value.shape[1])) for value in (starts, ends))
    known = (group >= 0) & (group < sizes.shape[1])
    group = jnp.clip(group, 0, sizes.shape[1])
    start = jnp.take_along_axis(starts, group, axis=1)
    end = jnp.where(known, jnp.take_along_axis(ends, group, axis=1), start)
    return _Groups(start, end, jnp.where(end > start, -(-end // height) - start // height, 0))


def max_row_items(batch: int, rows: int, matrices: int, height: int) -> int:
    """Bound on row items: every tile once, and once more for every further group that begins in it."""
    return batch * (-(-rows // height) + min(matrices, rows) - 1)


def max_matrix_items(batch: int, rows: int, matrices: int, height: int) -> int:
    return batch * (-(-rows // height) + matrices)


def row_items(sizes: Any, offset: Any, batch: int, rows: int, matrices: int, height: int) -> tuple[Items, Any]:
    """Items that visit every tile of rows in order, and their number. Tiles without a matrix are visited once."""
    groups = _groups(sizes, offset, batch, rows, matrices, height)
    every = -(-rows // height)
    begin, stop = groups.start[:, :1], groups.end[:, -1:]
    before = jnp.where(stop > begin, begin // height, every)
    after = jnp.where(stop > begin, every - -(-stop // height), 0)
    counts = jnp.concatenate([before, groups.tiles, after], axis=1)  # [b, g + 2]
    firsts = jnp.concatenate([jnp.zeros_like(begin), groups.start // height, -(-stop // height)], axis=1)
    low, high = (jnp.pad(value, ((0, 0), (1, 1))) for value in (groups.start, groups.end))
    segment, place, total = _expand(counts.reshape(-1), max_row_items(batch, rows, matrices, height))
    tile = jnp.clip(firsts.reshape(-1)[segment] + place, 0, every - 1)
    member, matrix = segment // (matrices + 2), jnp.clip(segment % (matrices + 2) - 1, 0, matrices - 1)
    return _items(
        member, matrix, tile, low.reshape(-1)[segment], high.reshape(-1)[segment], member * every + tile, total, height
    )


def matrix_items(
    sizes: Any, offset: Any, batch: int, rows: int, matrices: int, height: int, *, shared: bool
) -> tuple[Items, Any]:
    """Items that visit every matrix in order, one without rows once, and their number.

    With `shared` the members of the batch share their matrices, and their tiles follow each other.
    """
    groups = _groups(sizes, offset, batch, rows, matrices, height)
    counts, start, end = groups.tiles, groups.start, groups.end  # [b, g]
    if shared:
        counts = counts.at[0].set(jnp.where(jnp.sum(counts, axis=0) == 0, 1, counts[0])).T
        start, end = start.T, end.T
    else:
        counts = jnp.maximum(counts, 1)
    segment, place, total = _expand(counts.reshape(-1), max_matrix_items(batch, rows, matrices, height))
    low, high = start.reshape(-1)[segment], end.reshape(-1)[segment]
    tile = jnp.clip(low // height + place, 0, -(-rows // height) - 1)
    inner = batch if shared else matrices
    member, matrix = (segment % inner, segment // inner) if shared else (segment // inner, segment % inner)
    return _items(member, matrix, tile, low, high, matrix if shared else segment, total, height)


def has_matrix(sizes: Any, offset: Any, rows: int, matrices: int) -> Any:
    """Of every row whether its group has a matrix, `[1 or b, rows]`: matrices are those of neighbouring groups."""
    batch = sizes.shape[0] if offset is None else max(sizes.shape[0], offset.shape[0])
    groups = _groups(sizes, offset, batch, rows, matrices, 1)
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    return (row >= groups.start[:, :1]) & (row < groups.end[:, -1:])


def _expand(counts: Any, length: int) -> tuple[Any, Any, Any]:
    """Segment of every item, its place in the segment, and the number of items."""
    up_to = jnp.cumsum(counts)
    index = jnp.arange(length, dtype=jnp.int32)
    segment = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    segment = jnp.minimum(segment, counts.shape[0] - 1)
    return segment, index - (up_to - counts)[segment], up_to[-1]


def _items(member: Any, matrix: Any, tile: Any, low: Any, high: Any, block: Any, total: Any, height: int) -> tuple[Items, Any]:
    index = jnp.arange(tile.shape[0], dtype=jnp.int32)
    new = (index == 0) | (block != jnp.roll(block, 1))
    left = (index == total - 1) | jnp.roll(new, -1)
    busy = (high > low) & (index < total)
    source = jax.lax.cummax(jnp.where(busy, index, -1))
    source = jnp.where(source < 0, jnp.argmax(busy).astype(jnp.int32), source)
    partial = new & ((low > tile * height) | (high < (tile + 1) * height))
    base = jax.lax.cummax(jnp.where(partial, index, 0))
    edges = new.astype(jnp.int32) + 2 * left.astype(jnp.int32)
    return Items(member, matrix, tile, low, high, edges, source, base), total
