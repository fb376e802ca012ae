"""Batches a function over arrays that the batch may share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def over_batch(function: Callable[..., Any], batch: int, *arrays: Any) -> Any:
    """`function(*member)` for every member of the batch; arrays that the batch shares (leading size 1) are not copied."""
    if batch == 1:
        found = function(*jax.tree.map(lambda leaf: leaf[0], arrays))
        return jax.tree.map(lambda leaf: leaf[None], found)
    shared = jax.tree.map(lambda leaf: leaf.shape[0] != batch, arrays)
    arrays = jax.tree.map(lambda leaf, alone: leaf[0] if alone else leaf, arrays, shared)
    axes = jax.tree.map(lambda alone: None if alone else 0, shared)
    return jax.vmap(function, in_axes=axes)(*arrays)
