"""Query heads of key heads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def repeat_heads(array: Any, count: int, axis: int) -> Any:
    """Every head `count` times, one copy beside the other; unlike `jnp.repeat`, also where an explicit mesh splits the heads."""
    before, heads, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    copies = jnp.broadcast_to(jnp.expand_dims(array, axis + 1), (*before, heads, count, *after))
    return copies.reshape(*before, heads * count, *after)
