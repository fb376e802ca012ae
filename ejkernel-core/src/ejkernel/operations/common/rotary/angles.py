"""Angles of rotary embeddings, reduced to one turn in fixed point before they are rounded."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def per_position(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair `[pairs]` per position: turns modulo 1 in units of 2^-32, the next 16 bits of that, and radians."""
    units = np.round(np.mod(frequencies / (2 * math.pi), 1) * 2.0**48).astype(np.uint64)
    return (
        (units >> np.uint64(16)).astype(np.uint32),
        (units & np.uint64(0xFFFF)).astype(np.uint32),
        frequencies.astype(np.float32),
    )


def reduced_angles(positions: jax.Array, high: Any, low: Any, radians: Any) -> jax.Array:
    """`positions * frequency` modulo 2 pi, in [-pi, pi) for integers. positions `[..., 1 or pairs]`, tables `[pairs]`.

    uint32 arithmetic wraps modulo whole turns, so nothing is lost, however large the product is.
    """
    high, low, radians = (jnp.asarray(table).reshape((1,) * (positions.ndim - 1) + (-1,)) for table in (high, low, radians))
    fraction = None
    if jnp.issubdtype(positions.dtype, jnp.floating):
        floats = positions.astype(jnp.float32)
        positions = jnp.floor(floats)
        fraction = floats - positions
    integers = positions.astype(jnp.int32)
    whole = jax.lax.bitcast_convert_type(integers, jnp.uint32)
    upper = jax.lax.bitcast_convert_type(integers >> 16, jnp.uint32)  # with the sign
    turns = whole * high + upper * low + (((whole & 0xFFFF) * low) >> 16)
    angles = jax.lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
    return angles if fraction is None else angles + fraction * radians
