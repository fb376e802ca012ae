"""The indexer of sparse latent attention: which tokens each query reads (DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import known_size
from ejkernel.operations.common.ranking import largest, over_rows
from ejkernel.utils.dtypes import accumulator

_KEYS = 512
"""Keys that are scored at once."""
_NUMBERS = 2**24
"""Scores, or products of single index heads, that are held at once."""


@functools.partial(jax.jit, static_argnames=("count", "scale", "causal"))
def chosen_tokens(query: Any, key: Any, weights: Any, kv_lens: Any = None, *, count: int, scale: float, causal: bool) -> Any:
    """The `count` tokens with the largest `sum_h weights[t,h] relu(scale * query[t,h] . key[s])`, int32 `[B,T,count]`, best
    first; -1 where there are fewer. The earlier one of equals; a score that is NaN comes last. There is no gradient.

    Args:
        query: `[B,T,I,E]`.
        key: `[B,S,E]`.
        weights: `[B,T,I]`.
        kv_lens: int `[B]`: how many of the S tokens exist; query t is token `kv_lens - T + t`. None: all, and query t is token t.
        count: at most S.
        scale: factor on the products.
        causal: only tokens up to the query's own number.
    """
    batch, length, heads, _ = query.shape
    tokens = key.shape[1]
    query, key, weights = jax.lax.stop_gradient((query, key, weights))
    ends = jnp.full(batch, tokens, jnp.int32) if kv_lens is None else jnp.minimum(kv_lens.astype(jnp.int32), tokens)
    first = jnp.zeros(batch, jnp.int32) if kv_lens is None else ends - length
    block = min(_KEYS, max(tokens, 1))
    keys = jnp.pad(key, [(0, 0), (0, -tokens % block), (0, 0)])
    keys = jnp.moveaxis(keys.reshape(batch, keys.shape[1] // block, block, key.shape[2]), 1, 0)

    def tile(arrays: Any) -> Any:
        query, weights, position = arrays
        scores = jax.lax.map(lambda keys: _scores(query, keys, weights, scale), keys) if len(keys) > 1 else None
        scores = _scores(query, keys[0], weights, scale)[None] if scores is None else scores
        scores = jnp.moveaxis(scores, 0, 2).reshape(*scores.shape[1:3], keys.shape[0] * block)[:, :, :tokens]
        lowest = jnp.finfo(scores.dtype).min
        scores = jnp.where(scores >= lowest, scores, lowest)
        if causal or kv_lens is not None:
            end = jnp.minimum(position[:, None] + first[None] + 1, ends[None]) if causal else ends[None]
            scores = jnp.where(jnp.arange(tokens, dtype=jnp.int32)[None, None] < end[..., None], scores, -jnp.inf)
        best, token = largest(scores, count)
        return jnp.where(best >= lowest, token, -1).astype(jnp.int32)

    if not tokens or not count:
        return jnp.zeros((batch, length, 0), jnp.int32)
    arrays = (jnp.moveaxis(query, 1, 0), jnp.moveaxis(weights, 1, 0), jnp.arange(length, dtype=jnp.int32))
    at_once = max(known_size(batch) * max(heads * block, tokens), 1)
    return jnp.moveaxis(over_rows(tile, arrays, max(_NUMBERS // at_once, 1)), 0, 1)


def _scores(query: Any, keys: Any, weights: Any, scale: float) -> Any:
    """`[t,b,n]` of one piece of the keys."""
    wide = accumulator(query.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == query.dtype else jax.lax.Precision.DEFAULT
    products = jnp.einsum("tbie,bne->tbin", query, keys, precision=precision, preferred_element_type=wide)
    return jnp.sum(jax.nn.relu(products * scale) * weights.astype(wide)[..., None], axis=2)
