"""`native_sparse_attention` in NumPy float64: one query of one head after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.operations.native_sparse_attention.interface import (
    NativeSparseAttentionCall,
    NativeSparseAttentionInputs,
    NativeSparseAttentionOutputs,
)


def _rows(call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs) -> Iterator[tuple[int, int, int, int, Any]]:
    """Row of the batch, query, head, key head and the keys that they see, where they see any."""
    batch, length, heads, _ = call.query.shape
    group = heads // call.key.shape[2]
    starts = np.zeros((1, length), int) if inputs.sequence_starts is None else inputs.sequence_starts
    for row, token, head in np.ndindex(batch, length, heads):
        blocks = inputs.block_indices[row, token, head // group]
        first = starts[row % len(starts), token] + blocks[blocks >= 0] * call.block_size
        keys = (first[:, None] + np.arange(call.block_size)).reshape(-1)
        keys = keys[keys <= token]
        if keys.size:
            yield row, token, head, head // group, keys


def _weights(query: Any, keys: Any, scale: float) -> tuple[Any, float]:
    logits = scale * keys @ query
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum(), logits.max() + np.log(exponentials.sum())


def forward(call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs) -> NativeSparseAttentionOutputs:
    batch, length, heads, _ = call.query.shape
    out = np.zeros((batch, length, heads, call.value.shape[3]))
    lse = np.full((batch, length, heads), -np.inf)
    for row, token, head, shared, keys in _rows(call, inputs):
        weights, lse[row, token, head] = _weights(
            inputs.query[row, token, head], inputs.key[row, keys, shared], call.softmax_scale
        )
        out[row, token, head] = weights @ inputs.value[row, keys, shared]
    return NativeSparseAttentionOutputs(out, lse)


def backward(
    call: NativeSparseAttentionCall,
    inputs: NativeSparseAttentionInputs,
    outputs: NativeSparseAttentionOutputs,
    cotangents: NativeSparseAttentionOutputs,
) -> NativeSparseAttentionInputs:
    d_query, d_key, d_value = (np.zeros(array.shape) for array in (inputs.query, inputs.key, inputs.value))
    for row, token, head, shared, keys in _rows(call, inputs):
        query, d_out = inputs.query[row, token, head], cotangents.out[row, token, head]
        weights, _ = _weights(query, inputs.key[row, keys, shared], call.softmax_scale)
        d_weights = inputs.value[row, keys, shared] @ d_out
        d_lse = 0.0 if cotangents.lse is None else cotangents.lse[row, token, head]
        d_logits = call.softmax_scale * weights * (d_weights - weights @ d_weights + d_lse)
        d_query[row, token, head] = d_logits @ inputs.key[row, keys, shared]
        d_key[row, keys, shared] += np.outer(d_logits, query)
        d_value[row, keys, shared] += np.outer(weights, d_out)
    return NativeSparseAttentionInputs(d_query, d_key, d_value, None)
