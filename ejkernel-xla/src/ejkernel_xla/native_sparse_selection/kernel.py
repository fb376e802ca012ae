"""Scores of some queries at a time, then the largest of each query's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import known_size
from ejkernel.operations.common.ranking import largest, over_rows
from ejkernel.operations.common.selected import NOTHING
from ejkernel.operations.native_sparse_selection.interface import (
    LARGEST,
    NativeSparseSelectionCall,
    NativeSparseSelectionInputs,
    NativeSparseSelectionOutputs,
)
from ejkernel.utils.dtypes import accumulator

_NUMBERS = 2**24
"""Scores of blocks that are held at once."""


def forward(call: NativeSparseSelectionCall, inputs: NativeSparseSelectionInputs, config: None) -> NativeSparseSelectionOutputs:
    query, means, lse, own_blocks, first_blocks, block_counts = inputs
    batch, length, heads, size = query.shape
    entries, key_heads = means.shape[1:3]
    groups = heads // key_heads
    wide = accumulator(query.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == query.dtype else jax.lax.Precision.DEFAULT
    order = jnp.arange(call.count, dtype=jnp.int32)[None, None, None]

    def tile(arrays: Any) -> Any:
        query, lse, own, first, counts = arrays
        logits = (
            jnp.einsum("tbkgd,bnkd->tbkgn", query, means, precision=precision, preferred_element_type=wide) * call.softmax_scale
        )
        weights = jnp.exp(logits - lse[..., None])
        scores = jnp.minimum(jnp.sum(jnp.where(weights >= 0, weights, 0), axis=3), LARGEST)
        numbers = jnp.arange(entries, dtype=jnp.int32)[None, None] - first[..., None]  # [t, 1 or b, n]
        behind = own[..., None] - numbers
        forced = jnp.where(numbers == 0, 2 * LARGEST, 0)
        forced = jnp.where(behind == 1, 4 * LARGEST, forced)
        forced = jnp.where(behind == 0, 8 * LARGEST, forced)[:, :, None]
        scores = jnp.where(forced > 0, forced, scores)
        scores = jnp.where(((numbers >= 0) & (behind >= 0))[:, :, None], scores, -1)
        best, entry = largest(scores, call.count)
        number = jnp.where(best >= 0, entry.astype(jnp.int32) - first[..., None, None], entries)
        if counts is not None:
            number = jnp.where(order < counts[..., None], number, entries)
        number = jnp.sort(number, axis=-1)
        return jnp.where(number < entries, number, NOTHING)

    query = query.reshape(batch, length, key_heads, groups, size)
    lse = lse.reshape(batch, length, key_heads, groups)
    first_blocks = jnp.zeros_like(own_blocks) if first_blocks is None else first_blocks
    arrays = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (query, lse, own_blocks, first_blocks, block_counts))
    at_once = max(known_size(batch) * heads * entries, 1)
    return NativeSparseSelectionOutputs(jnp.moveaxis(over_rows(tile, arrays, max(_NUMBERS // at_once, 1)), 0, 1))
