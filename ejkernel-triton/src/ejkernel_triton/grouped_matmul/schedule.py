"""Which rows belong to which matrix, and the tiles that they are cut into, made on the device from the sizes of the groups.

The rows of all members of a batch are counted through, and so are their matrices: member i has the rows from `i * m` and the
matrices from `i * g`. How many tiles there may be depends on shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_MANY = 4096


class Tiles(NamedTuple):
    """Tiles of rows `[low, high)` of one matrix, in order, which cover every row that has one; the first `count [1]` are used."""

    matrix: Any
    low: Any
    high: Any
    count: Any


def most_tiles(rows: int, intervals: int, height: int) -> int:
    """Tiles that `intervals` of together `rows` rows may need."""
    busy = min(intervals, rows)
    return (rows - busy) // height + busy


def bounds_of(sizes: Any, offset: Any, batch: int, rows: int, matrices: int) -> Any:
    """`[b, g + 1]`: the rows of a member's matrix j go from entry j up to entry j + 1, within the member.

    Args:
        sizes: int32 `[1 or b, s]`.
        offset: int32 `[1 or b]`, or None.
        batch: b.
        rows: of a member.
        matrices: g.
    """
    groups = sizes.shape[1]
    group = jnp.arange(groups + 1, dtype=jnp.int32)
    sizes = jnp.clip(sizes, 0, rows)
    ends = jnp.sum(jnp.where(group[:groups] < group[:, None], sizes[:, None], 0), axis=-1, dtype=jnp.int32)
    ends = jnp.clip(ends, 0, rows)
    if groups * rows >= 2**31:  # sizes that no call may have could pass 32 bits; nothing outside of the arrays is read for them
        ends = jax.lax.cummax(ends, axis=1)
    if offset is None:
        return jnp.broadcast_to(ends, (batch, groups + 1))
    wanted = jnp.clip(jnp.arange(matrices + 1, dtype=jnp.int32) + jnp.clip(offset, -matrices, groups)[:, None], 0, groups)
    ends, wanted = (jnp.broadcast_to(values, (batch, values.shape[1])) for values in (ends, wanted))
    return jnp.take_along_axis(ends, wanted, axis=1)


def tiles_of(bounds: Any, rows: int, height: int) -> Tiles:
    """Cut the rows of every matrix into tiles of `height`."""
    batch, matrices = bounds.shape[0], bounds.shape[1] - 1
    member = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    start, end = (bounds[:, :-1] + member).reshape(-1), (bounds[:, 1:] + member).reshape(-1)
    counts = -(-(end - start) // height)
    up_to = _running_sum(counts)
    index = jnp.arange(most_tiles(batch * rows, batch * matrices, height), dtype=jnp.int32)
    matrix = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    matrix = jnp.minimum(matrix, batch * matrices - 1)
    low = start[matrix] + (index - (up_to - counts)[matrix]) * height
    return Tiles(matrix, low, jnp.minimum(low + height, end[matrix]), up_to[-1:])


def _running_sum(values: Any) -> Any:
    """As one reduction, which XLA makes one kernel with all that comes before; of very many values in the usual way."""
    count = values.shape[0]
    if count > _MANY:
        return jnp.cumsum(values, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    return jnp.sum(jnp.where(index <= index[:, None], values, 0), axis=1, dtype=jnp.int32)


def rows_with_matrix(bounds: Any, rows: int) -> Any:
    """`[b, m]`."""
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= bounds[:, :1]) & (row < bounds[:, -1:])


def matrix_of_rows(bounds: Any, rows: int) -> Any:
    """`[b, m]`: the member's own number of each row's matrix; any for rows without one."""
    row = jnp.arange(rows, dtype=jnp.int32)
    own = jax.vmap(lambda ends: jnp.searchsorted(ends, row, side="right", method="compare_all"))(bounds[:, 1:])
    return jnp.clip(own, 0, bounds.shape[1] - 2)
