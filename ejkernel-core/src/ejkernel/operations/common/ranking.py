"""The largest of many scores, for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import mesh_of


def largest(scores: Any, count: int) -> tuple[Any, Any]:
    """The `count` largest along the last axis, in descending order, and their places; the earlier one of equals. No NaN."""
    scores = jnp.where(scores == 0, 0, scores)  # -0 ranks below 0 in some implementations
    if mesh_of(scores) is None:
        return jax.lax.top_k(scores, count)
    # XLA gathers the operand of top_k on one device, but splits a sort along its other axes.
    places = jnp.arange(scores.shape[-1], dtype=jnp.int32).reshape(*[1] * (scores.ndim - 1), -1)
    places = jnp.zeros_like(scores, jnp.int32) + places
    descending, places = jax.lax.sort((-scores, places), dimension=-1, num_keys=1, is_stable=True)
    return -descending[..., :count], places[..., :count]


def over_rows(function: Callable[[Any], Any], arrays: Any, block: int) -> Any:
    """`function` of tiles of at most `block` rows (axis 0) of every array, its results put together; one tile is no loop."""
    length = jax.tree.leaves(arrays)[0].shape[0]
    if length <= block:
        return function(arrays)

    def tiles(x: Any) -> Any:
        x = jnp.pad(x, [(0, -length % block)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(x.shape[0] // block, block, *x.shape[1:])

    found = jax.lax.map(function, jax.tree.map(tiles, arrays))
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * block, *x.shape[2:])[:length], found)
