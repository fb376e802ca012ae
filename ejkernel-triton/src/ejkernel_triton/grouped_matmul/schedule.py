"""The table of row tiles, computed on the device from the group sizes.

Rows and matrices are numbered through the batch: member i has rows from `i * m` and matrices from `i * g`. The largest number
of tiles depends on shapes only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import running_sums


class Tiles(NamedTuple):
    """Row tiles `[low, high)` of one matrix each, in order; they cover every row that has a matrix. The first `count [1]` are
    valid."""

    matrix: Any
    low: Any
    high: Any
    count: Any


def max_tiles(rows: int, intervals: int, height: int) -> int:
    """Largest number of tiles of `intervals` groups with `rows` rows in total."""
    busy = min(intervals, rows)
    return (rows - busy) // height + busy


def tiles_of(bounds: Any, rows: int, height: int) -> Tiles:
    """Split the rows of every matrix into tiles of `height` rows."""
    batch, matrices = bounds.shape[0], bounds.shape[1] - 1
    member = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    start, end = (bounds[:, :-1] + member).reshape(-1), (bounds[:, 1:] + member).reshape(-1)
    counts = -(-(end - start) // height)
    up_to = running_sums(counts[None])[0]
    index = jnp.arange(max_tiles(batch * rows, batch * matrices, height), dtype=jnp.int32)
    matrix = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    matrix = jnp.minimum(matrix, batch * matrices - 1)
    low = start[matrix] + (index - (up_to - counts)[matrix]) * height
    return Tiles(matrix, low, jnp.minimum(low + height, end[matrix]), up_to[-1:])
