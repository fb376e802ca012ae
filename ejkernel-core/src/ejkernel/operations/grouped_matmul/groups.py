"""Which rows belong to which matrix: the arguments that say it, and what is made of them on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ejkernel.call.arrays import ArraySpec
from ejkernel.call.random import shares
from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_array
from ejkernel.utils.integers import as_int32

_MANY = 4096


def check_groups(group_sizes: Any, group_offset: Any, held: int, name: str) -> None:
    """Refuse groups that are not those of the `held` matrices of the argument `name`."""
    check_array("group_sizes", group_sizes, ndim=1, floating=False)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise wrong_type("group_sizes", f"dtype {group_sizes.dtype}", "integers")
    if group_offset is None:
        if group_sizes.shape[0] != held:
            remedy = f"group_offset= says which groups {name} holds" if group_sizes.shape[0] > held else ""
            raise invalid("group_sizes", f"{group_sizes.shape[0]} groups", f"{held} as in {name}", remedy=remedy)
        return
    if group_sizes.shape[0] < held:
        raise invalid("group_sizes", f"{group_sizes.shape[0]} groups", f"at least {held} as in {name}")
    if not jnp.issubdtype(jnp.result_type(group_offset), jnp.integer):
        raise wrong_type("group_offset", f"dtype {jnp.result_type(group_offset)}", "an integer")
    if jnp.shape(group_offset) not in ((), (1,)):
        raise invalid("group_offset", f"shape {jnp.shape(group_offset)}", "a scalar or [1]")


def check_sizes(group_sizes: Any, rows: Any, name: str) -> None:
    """Refuse concrete sizes that are negative or more than the rows of the argument `name`."""
    if group_sizes is None or rows is None or isinstance(group_sizes, jax.core.Tracer) or getattr(rows, "ndim", 0) != 2:
        return
    values = np.asarray(group_sizes)
    if values.ndim == 1 and ((values < 0).any() or values.sum() > rows.shape[0]):
        raise invalid("group_sizes", values, f"values >= 0 with a sum of at most {rows.shape[0]} = rows of {name}")


def grouping(group_sizes: Any, group_offset: Any) -> tuple[Any, Any]:
    """Both with a batch axis, int32; the offset may be None."""
    offset = None if group_offset is None else as_int32(group_offset).reshape(1)
    return as_int32(group_sizes)[None], offset


def random_grouping(
    rng: np.random.Generator, sizes: ArraySpec, offset: ArraySpec | None, rows: int, held: int
) -> dict[str, Any]:
    """Uneven groups of all rows; with an offset, the matrices are those of the middle."""
    made: dict[str, Any] = {"group_sizes": shares(rng, sizes, rows)}
    if offset is not None:
        made["group_offset"] = np.full(offset.shape, (sizes.shape[1] - held) // 2, np.int32)
    return made


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
