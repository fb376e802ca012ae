"""The table of row tiles and their matrices, which XLA computes on the device from the group sizes.

Rows and matrices are numbered through the batch: member i has rows from `i * m` and matrices from `i * g`. Rows without a
matrix are groups too, with matrix -1. A tile begins at a multiple of 8 rows, as TMA requires, so it may hold rows of its
neighbours, which it does not store. The largest number of tiles depends on shapes only.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import running_sums

ROW_ALIGNMENT = 8
"""Row tiles begin at multiples of this."""
MATRIX, BASE, START, END, FIRST, HEIGHT = range(6)
"""Columns of the table: matrix or -1; first row of the tile's swizzle group; rows of its matrix's group; first tile and number
of tiles of the swizzle group."""


def max_tiles(rows: int, intervals: int, height: int) -> int:
    """Largest number of tiles of `intervals` groups with `rows` rows in total."""
    busy = min(intervals, rows)
    return (rows + (ROW_ALIGNMENT - 2) * busy) // height + busy


def tiles_of(bounds: Any, rows: int, height: int, l2_swizzle: int) -> tuple[Any, Any]:
    """The table `[tiles, 6]` of tiles of `height` rows, which cover every row, and the number of valid tiles `[1]`.

    Consecutive tiles of one group form swizzle groups of at most `l2_swizzle` tiles, of about equal height.
    """
    batch, matrices = bounds.shape[0], bounds.shape[1] - 1
    member = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    edges = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), bounds, jnp.full((batch, 1), rows, jnp.int32)], axis=1)
    start, end = (edges[:, :-1] + member).reshape(-1), (edges[:, 1:] + member).reshape(-1)  # [b * (g + 2)]
    own = jnp.arange(matrices, dtype=jnp.int32)[None] + jnp.arange(batch, dtype=jnp.int32)[:, None] * matrices
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
