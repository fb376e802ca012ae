"""Which attention probabilities dropout removes: a counter-based rule, the same on every platform.

Entry (i, j) of one head is dropped when `bits(stream, i, j) < rate * 2**32`. The stream of a head is made from the seed, the
batch index and the head index before anything is folded or split over devices, so neither changes the outcome. The mixing
function is a 32-bit integer finaliser with low bias (Wellons, "Prospecting for hash functions", 2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mix(x: Any) -> Any:
    """Scramble uint32 values (NumPy or JAX)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def bits(stream_0: Any, stream_1: Any, rows: Any, columns: Any) -> Any:
    """32 random bits for each (row, column) of the score matrix; all arguments uint32 and broadcast together."""
    row_key = mix(stream_0 ^ (rows * np.uint32(0x9E3779B9)))
    return mix(row_key ^ stream_1 ^ (columns * np.uint32(0x85EBCA6B)))


def threshold(rate: float) -> np.uint32:
    """Entries whose bits are below this are dropped."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))


def streams(seed: Any, batch: int, heads: int) -> Any:
    """The streams `[batch, heads, 2]` (uint32) of a seed given as two uint32 words."""
    import jax.numpy as jnp

    b = jnp.arange(batch, dtype=jnp.uint32)[:, None]
    h = jnp.arange(heads, dtype=jnp.uint32)[None, :]
    first = mix(mix(seed[0] ^ (b * np.uint32(0x9E3779B9))) ^ (h * np.uint32(0x85EBCA6B)))
    second = mix(mix(seed[1] ^ (h * np.uint32(0x9E3779B9))) ^ (b * np.uint32(0x85EBCA6B)))
    return jnp.stack([first, second], axis=-1)
