"""Which attention probabilities dropout removes: a counter-based rule, the same on every platform.

Entry (i, j) of one head is dropped when `bits(stream, i, j) < rate * 2**32`. The stream of a head is made from the seed, the
batch index and the head index before anything is folded or split over devices, so neither changes the outcome. The mixing
function is a 32-bit integer finaliser with low bias (Wellons, "Prospecting for hash functions", 2018).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import EjkernelWarning, invalid, wrong_type
from ejkernel.operations.common.options import as_number
from ejkernel.utils.warn_once import warn_once


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
    b = jnp.arange(batch, dtype=jnp.uint32)[:, None]
    h = jnp.arange(heads, dtype=jnp.uint32)[None, :]
    first = mix(mix(seed[0] ^ (b * np.uint32(0x9E3779B9))) ^ (h * np.uint32(0x85EBCA6B)))
    second = mix(mix(seed[1] ^ (h * np.uint32(0x9E3779B9))) ^ (b * np.uint32(0x85EBCA6B)))
    return jnp.stack([first, second], axis=-1)


def as_dropout_rate(value: Any) -> float:
    """A probability in [0, 1)."""
    rate = as_number("dropout_prob", value)
    if not 0 <= rate < 1:
        raise invalid("dropout_prob", rate, "a value in [0, 1)")
    return rate


def host_seed(seed: Any) -> Any:
    """A Python int seed as two uint32 words in NumPy, so that another seed is no other program; arrays as they are."""
    if isinstance(seed, (bool, float, complex, str)):
        raise wrong_type("dropout_seed", repr(seed), "an int, an integer scalar or a jax PRNG key")
    if isinstance(seed, int):
        if not 0 <= seed < 2**64:
            raise invalid("dropout_seed", seed, "a value in [0, 2**64)")
        return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return seed


def seed_words(seed: Any) -> Any:
    """The two uint32 words of a seed: an int, an integer scalar, a raw key `uint32[2]` or a typed PRNG key.

    Integer scalars fill the first word; 0 is the second. Longer keys are mixed into two words.
    """
    seed = host_seed(seed)
    if not hasattr(seed, "dtype") or not hasattr(seed, "shape"):
        raise wrong_type("dropout_seed", repr(seed), "an int, an integer scalar or a jax PRNG key")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape:
            raise invalid("dropout_seed", f"keys of shape {seed.shape}", "one key")
        seed = jax.random.key_data(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise wrong_type("dropout_seed", f"dtype {seed.dtype}", "an integer type or a jax PRNG key")
    if seed.shape in ((), (1,)):
        return jnp.stack([jnp.asarray(seed).reshape(()).astype(jnp.uint32), jnp.uint32(0)])
    if seed.dtype != np.uint32 or seed.shape not in ((2,), (4,)):
        raise invalid("dropout_seed", f"{seed.dtype} of shape {seed.shape}", "a scalar, or a raw key uint32[2] or uint32[4]")
    return mix(seed[:2]) ^ seed[2:] if seed.shape == (4,) else jnp.asarray(seed)


def streams_of_seed(rate: float, seed: Any, batch: int, heads: int, *, same: bool = False) -> Any:
    """The streams `[B, H, 2]` of a seed, with `same` one for all; None without dropout; seed 0 with one warning without a seed."""
    words = None if seed is None else seed_words(seed)  # checked where nothing is dropped, too
    if not rate:
        return None
    if words is None:
        remedy = "pass a seed or a PRNG key"
        warn_once("dropout_prob", f"without dropout_seed it drops the same entries at every call; {remedy}", EjkernelWarning)
        words = seed_words(0)
    if same:
        return jnp.broadcast_to(streams(words, 1, 1), (batch, heads, 2))
    return streams(words, batch, heads)


def check_dropout_streams(given: Any, batch: int, heads: int) -> None:
    """Refuse streams that are not uint32 `[B, H, 2]`."""
    if tuple(given.shape) != (batch, heads, 2) or given.dtype != np.uint32:
        raise invalid("dropout_streams", f"{given.dtype} of shape {tuple(given.shape)}", f"uint32 of shape {(batch, heads, 2)}")
