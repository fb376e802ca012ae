"""Scores of some queries and pieces of the keys at a time, then the largest of each query's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import known_size
from ejkernel.operations.common.ranking import largest, over_rows
from ejkernel.operations.lightning_indexer.interface import (
    FLOAT8,
    NO_TOKEN,
    LightningIndexerCall,
    LightningIndexerInputs,
    LightningIndexerOutputs,
)
from ejkernel.utils.dtypes import accumulator

_KEYS = 512
"""Keys that are scored at once."""
_NUMBERS = 2**24
"""Scores, or products of single heads, that are held at once."""


def forward(call: LightningIndexerCall, inputs: LightningIndexerInputs, config: None) -> LightningIndexerOutputs:
    query, key, weights, ends, key_scale = inputs
    batch, length, heads, _ = query.shape
    tokens = key.shape[1]
    if not call.k:
        return LightningIndexerOutputs(jnp.zeros((batch, length, 0), jnp.int32))
    if call.query.dtype == FLOAT8:
        query, key = query.astype(jnp.bfloat16), key.astype(jnp.bfloat16)
    block = min(_KEYS, tokens)
    keys = jnp.pad(key, [(0, 0), (0, -tokens % block), (0, 0)])
    keys = jnp.moveaxis(keys.reshape(batch, keys.shape[1] // block, block, key.shape[2]), 1, 0)

    def tile(arrays: Any) -> Any:
        query, weights, ends = arrays
        scores = jax.lax.map(lambda keys: _scores(query, keys, weights), keys) if len(keys) > 1 else None
        scores = _scores(query, keys[0], weights)[None] if scores is None else scores
        scores = jnp.moveaxis(scores, 0, 2).reshape(*scores.shape[1:3], keys.shape[0] * block)[:, :, :tokens]
        if key_scale is not None:
            scores = scores * key_scale[None]
        lowest = jnp.finfo(jnp.float32).min
        scores = jnp.where(scores >= lowest, scores, lowest)
        scores = jnp.where(jnp.arange(tokens, dtype=jnp.int32)[None, None] < ends[..., None], scores, -jnp.inf)
        best, token = largest(scores, call.k)
        token = jnp.sort(jnp.where(best >= lowest, token.astype(jnp.int32), tokens), axis=-1)
        return jnp.where(token < tokens, token, NO_TOKEN)

    arrays = tuple(jnp.moveaxis(one, 1, 0) for one in (query, weights, ends))
    at_once = max(known_size(batch) * max(heads * block, tokens), 1)
    return LightningIndexerOutputs(jnp.moveaxis(over_rows(tile, arrays, max(_NUMBERS // at_once, 1)), 0, 1))


def _scores(query: Any, keys: Any, weights: Any) -> Any:
    """`[t,b,n]` of one piece of the keys."""
    wide = accumulator(query.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == query.dtype else jax.lax.Precision.DEFAULT
    products = jnp.einsum("tbie,bne->tbin", query, keys, precision=precision, preferred_element_type=wide)
    return jnp.sum(jax.nn.relu(products) * weights[..., None], axis=2)
