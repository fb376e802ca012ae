"""Which rows meet which matrix, in which order: a table that XLA makes on the device from the sizes of the groups.

The rows of all members of a batch are counted through, and so are their matrices: member i has the rows from `i * m` and the
matrices from `i * g`. Rows without a matrix are groups too, of a matrix -1. A tile begins at a multiple of 8 rows, as the copy
engine reads them, and so it may hold rows of its neighbours, which it does not store. How many tiles there may be depends on
shapes alone.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import running_sums

ROW_ALIGNMENT = 8
"""Tiles of rows begin at multiples of this."""
MATRIX, BASE, START, END, FIRST, HEIGHT = range(6)
"""Columns of a table of tiles: matrix or -1; first row of the tile's band; rows of its group; first tile and tiles of its band."""


def max_tiles(rows: int, intervals: int, height: int) -> int:
    """Tiles that `intervals` of together `rows` rows may need, however they lie."""
    busy = min(intervals, rows)
    return (rows + (ROW_ALIGNMENT - 2) * busy) // height + busy


def tiles_of(bounds: Any, rows: int, height: int, l2_swizzle: int) -> tuple[Any, Any]:
    """The table `[tiles, 6]` of tiles of `height` rows, which cover every row, and how many of them are used `[1]`.

    Consecutive tiles of one group are a band of at most `l2_swizzle`; the bands of a group are of about the same height.
    """
    batch, matrices = bounds.shape[0], bounds.shape[1] - 1
    member = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    edges = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), bounds, jnp.full((batch, 1), rows, jnp.int32)], axis=1)
    start, end = (edges[:, :-1] + member).reshape(-1), (edges[:, 1:] + member).reshape(-1)  # [b * (g + 2)]
    own = jnp.arange(matrices, dtype=jnp.int32) + jnp.arange(batch, dtype=jnp.int32)[:, None] * matrices
    matrix = jnp.pad(own, ((0, 0), (1, 1)), constant_values=-1).reshape(-1)
    counts = jnp.where(end > start, (end - start // ROW_ALIGNMENT * ROW_ALIGNMENT + height - 1) // height, 0)
    up_to = running_sums(counts[None])[0]
    index = jnp.arange(max_tiles(batch * rows, start.shape[0], height), dtype=jnp.int32)
    group = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, start.shape[0] - 1)
    count = jnp.maximum(counts, 1)[group]
    first = (up_to - counts)[group]
    bands = (count + l2_swizzle - 1) // l2_swizzle
    tall = (count + bands - 1) // bands
    before = (index - first) // tall * tall
    base = start[group] // ROW_ALIGNMENT * ROW_ALIGNMENT + before * height
    columns = (matrix[group], base, start[group], end[group], first + before, jnp.minimum(tall, count - before))
    return jnp.stack(columns, axis=1), up_to[-1:]
