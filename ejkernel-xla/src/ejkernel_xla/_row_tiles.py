"""Row tiles of one group each: rows in consecutive groups, every group with a matrix of its own.

How many tiles there are depends on shapes only, so one program serves every mix of sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles: matrix, first row, and own rows `low <= row < high`. The last tiles may be empty."""

    matrix: Any
    first: Any
    low: Any
    high: Any


class Rows(NamedTuple):
    """Rows of lhs: whether each has a matrix, and its index among the rows of all tiles."""

    has_matrix: Any
    place: Any


def _tile_list(rows: int, matrices: int, height: int, sizes: Any, offset: Any) -> tuple[Tiles, Rows]:
    """Split every group that has a matrix into tiles of `height <= rows`."""
    ends = jnp.minimum(jnp.cumsum(sizes), rows)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    ends = jnp.concatenate([ends, jnp.full(1, rows, ends.dtype)])
    group = jnp.arange(matrices, dtype=jnp.int32) + offset
    held = (group >= 0) & (group < sizes.shape[0])
    group = jnp.clip(group, 0, sizes.shape[0])
    start, end = starts[group], jnp.where(held, ends[group], starts[group])
    tiles_of = -(-(end - start) // height)
    tiles_up_to = jnp.cumsum(tiles_of)

    busy = min(matrices, rows)
    index = jnp.arange((rows - busy) // height + busy, dtype=jnp.int32)
    matrix = jnp.minimum(jnp.searchsorted(tiles_up_to, index, side="right"), matrices - 1).astype(jnp.int32)
    low = start[matrix] + (index - tiles_up_to[matrix] + tiles_of[matrix]) * height
    high = jnp.where(index < tiles_up_to[-1], jnp.minimum(low + height, end[matrix]), low)
    tiles = Tiles(matrix, jnp.clip(low, 0, rows - height), low, high)

    row = jnp.arange(rows, dtype=jnp.int32)
    own = jnp.searchsorted(ends[:-1], row, side="right") - offset
    has_matrix = (own >= 0) & (own < matrices) & (row < ends[-2])
    own = jnp.clip(own, 0, matrices - 1)
    tile = jnp.clip(tiles_up_to[own] - tiles_of[own] + (row - start[own]) // height, 0, index.shape[0] - 1)
    return tiles, Rows(has_matrix, tile * height + row - tiles.first[tile])


class RowTiles:
    """The tiles of one batch member.

    Attributes:
        height: rows of a tile.
        tiles: all of them, one after the other.
        rows: where each row is among them.
    """

    def __init__(self, rows: int, matrices: int, height: int, together: int, sizes: Any, offset: Any) -> None:
        """`together` tiles are worked on at one time; sizes int32 `[s]`; offset an integer."""
        self.height = min(height, rows)
        self.tiles, self.rows = _tile_list(rows, matrices, self.height, sizes, offset)
        self._together = min(together, self.tiles.matrix.shape[0])

    def own_rows(self, array: Any, tile: Tiles) -> Any:
        """The tile's rows, zero where they belong to others: those may hold NaN."""
        row = tile.first + jnp.arange(self.height, dtype=jnp.int32)
        block = jax.lax.dynamic_slice_in_dim(array, tile.first, self.height)
        return jnp.where(((row >= tile.low) & (row < tile.high))[:, None], block, 0)

    def map(self, values: Any, one: Callable[[Tiles, Any], Any]) -> Any:
        """`one(tile, its rows of values)` for every tile, put back into the order of the rows; those without a matrix hold
        anything."""

        def step(tile: Tiles) -> Any:
            return one(tile, self.own_rows(values, tile))

        tile = jax.eval_shape(step, jax.tree.map(lambda leaf: leaf[0], self.tiles))
        if tile.size == 0:
            return jnp.zeros((values.shape[0], tile.shape[1]), tile.dtype)
        out = jax.lax.map(step, self.tiles, batch_size=None if self._together == 1 else self._together)
        return out.reshape(out.shape[0] * out.shape[1], out.shape[2])[self.rows.place]
