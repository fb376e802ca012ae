"""Copies of tokens at positions among sorted rows: the two gathers of a mixture of experts, each the other's gradient.

Nothing is added up by a scatter: a token gathers its rows, a row its token. A position below 0 is `~row` of a copy without part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._batch import over_batch


def sources(positions: Any) -> Any:
    """The copy `t * k + j` that stands at each row `[b, m]`; `positions [b, t, k]`."""
    flat = positions.reshape(positions.shape[0], -1)
    row = jnp.where(flat < 0, ~flat, flat)
    copies = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32), flat.shape)
    place = jax.vmap(lambda row, copy: jnp.zeros_like(copy).at[row].set(copy, unique_indices=True, mode="drop"))
    return place(row, copies)


def spread(x: Any, positions: Any, source: Any, weights: Any = None) -> Any:
    """`rows[positions[t, j]] = weights[t, j] * x[t]` `[b, m, d]` in the dtype of x, other rows 0."""
    k = positions.shape[2]

    def one(x: Any, positions: Any, source: Any, weights: Any) -> Any:
        rows = x.at[source // k].get(mode="promise_in_bounds")
        if weights is not None:
            factor = weights.reshape(-1).at[source].get(mode="promise_in_bounds")
            rows = rows.astype(accumulator(x.dtype)) * factor.astype(accumulator(x.dtype))[:, None]
        taken = positions.reshape(-1).at[source].get(mode="promise_in_bounds") >= 0
        return jnp.where(taken[:, None], rows, jnp.zeros((), rows.dtype)).astype(x.dtype)

    return over_batch(one, x.shape[0], x, positions, source, weights)


def collect(rows: Any, positions: Any, weights: Any = None) -> Any:
    """`sum_j weights[t, j] * rows[positions[t, j]]` `[b, t, d]` in the dtype of rows."""
    wide = accumulator(rows.dtype)

    def one(rows: Any, positions: Any, weights: Any) -> Any:
        total = jnp.zeros((positions.shape[0], rows.shape[1]), wide)
        for choice in range(positions.shape[1]):
            part = pick(rows, positions[:, choice]).astype(wide)
            if weights is not None:
                factor = jnp.where(positions[:, choice] >= 0, weights[:, choice], jnp.zeros((), weights.dtype))
                part = part * factor.astype(wide)[:, None]
            total = total + part
        return total.astype(rows.dtype)

    return over_batch(one, rows.shape[0], rows, positions, weights)


def pick(rows: Any, position: Any) -> Any:
    """`rows[position]`, 0 where it is below 0; of one member of the batch."""
    if not rows.shape[0]:
        return jnp.zeros((*position.shape, rows.shape[1]), rows.dtype)
    found = rows.at[jnp.maximum(position, 0)].get(mode="clip")
    return jnp.where((position >= 0)[:, None], found, jnp.zeros((), rows.dtype))
