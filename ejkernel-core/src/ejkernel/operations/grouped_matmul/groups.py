"""Which rows belong to which matrix, made on the device from the sizes of the groups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_MANY = 4096


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
    sizes = jnp.clip(sizes, 0, rows)
    ends = jnp.pad(jnp.clip(running_sums(sizes), 0, rows), ((0, 0), (1, 0)))
    if groups * rows >= 2**31:  # sizes that no call may have could pass 32 bits; nothing outside of the arrays is read for them
        ends = jax.lax.cummax(ends, axis=1)
    if offset is None:
        return jnp.broadcast_to(ends, (batch, groups + 1))
    matrix = jnp.arange(matrices + 1, dtype=jnp.int32)[None]
    wanted = jnp.clip(matrix + jnp.clip(offset, -matrices, groups)[:, None], 0, groups)
    ends, wanted = (jnp.broadcast_to(values, (batch, values.shape[1])) for values in (ends, wanted))
    return jnp.take_along_axis(ends, wanted, axis=1)


def running_sums(values: Any) -> Any:
    """Along rows, as one reduction, which XLA makes one kernel with all that comes before; of very many values in the usual way."""
    count = values.shape[1]
    if count > _MANY:
        return jnp.cumsum(values, axis=1, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None] <= index[:, None], values[:, None], 0), axis=-1, dtype=jnp.int32)


def rows_with_matrix(bounds: Any, rows: int) -> Any:
    """`[b, m]`."""
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    return (row >= bounds[:, :1]) & (row < bounds[:, -1:])


def matrix_of_rows(bounds: Any, rows: int) -> Any:
    """`[b, m]`: the member's own number of each row's matrix; any for rows without one."""
    row = jnp.arange(rows, dtype=jnp.int32)
    own = jax.vmap(lambda ends: jnp.searchsorted(ends, row, side="right", method="compare_all"))(bounds[:, 1:])
    return jnp.clip(own, 0, bounds.shape[1] - 2)
