"""The tiles that the rows of every matrix are cut into, made on the device from the sizes of the groups.

The rows of all members of a batch are counted through, and so are their matrices: member i has the rows from `i * m` and the
matrices from `i * g`. How many tiles there may be depends on shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import running_sums


class Tiles(NamedTuple):
    """Tiles of rows `[low, high)` of one matrix, in order, which cover every row that has one; the first `count [1]` are used."""

    matrix: Any
    low: Any
    high: Any
    count: Any


def max_tiles(rows: int, intervals: int, height: int) -> int:
    """Tiles that `intervals` of together `rows` rows may need."""
    busy = min(intervals, rows)
    return (rows - busy) // height + busy


def tiles_of(bounds: Any, rows: int, height: int) -> Tiles:
    """Cut the rows of every matrix into tiles of `height`."""
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
