"""The random numbers of `sample_tokens`: a counter-based rule, so that every platform draws the same token.

Each row has a stream of two words, made from its key before anything is folded or split over devices. Token i of the row gets an
exponential variable by inversion of `bits(stream, i)`; the token with the largest `log weight - log exponential` is drawn (the
Gumbel-max trick). All 32 bits count, and small exponentials, which decide, are the most precise.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.flash_attention import dropout

LARGEST = 1 - 2.0**-24
"""The largest uniform variable, below 1 in float32."""


def bits(streams: Any, tokens: Any) -> Any:
    """32 random bits of each token, of streams `[..., 2]` and tokens that broadcast against `[..., 1]`; all uint32."""
    return dropout.bits(streams[..., :1], streams[..., 1:], tokens, np.uint32(0))


def row_streams(key: Any, rows: tuple[int, ...]) -> Any:
    """The streams `[*rows, 2]` of one key, by the number of the row, or of keys `[*rows]`, each as if its row were alone."""
    if not hasattr(key, "dtype") or not hasattr(key, "shape"):
        raise wrong_type("key", type(key).__name__, "a key of jax.random, or one for each row")
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if words.dtype != np.uint32:
        raise wrong_type("key", f"dtype {words.dtype}", "a key of jax.random, or one for each row")
    if not words.ndim or words.shape[-1] not in (2, 4):
        raise invalid("key", f"uint32 of shape {tuple(words.shape)}", "2 or 4 words for each key")
    if words.shape[:-1] not in ((), rows):
        raise invalid("key", f"keys of shape {tuple(words.shape[:-1])}", f"one key, or {rows} = [...] of logits")
    words = jnp.asarray(words)
    if words.shape[-1] == 4:
        words = dropout.mix(words[..., :2]) ^ words[..., 2:]
    number = jnp.zeros(rows, jnp.uint32)
    if words.ndim == 1:
        number = jnp.arange(math.prod(rows), dtype=jnp.uint32).reshape(rows)
        words = jnp.broadcast_to(words, (*rows, 2))
    first = dropout.mix(dropout.mix(words[..., 0]) ^ (number * np.uint32(0x85EBCA6B)))
    return jnp.stack([first, dropout.mix(dropout.mix(words[..., 1] ^ (number * np.uint32(0x9E3779B9))) ^ first)], axis=-1)
