"""`sparse_latent_attention` in NumPy float64: one query after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.operations.sparse_latent_attention.interface import (
    SparseLatentAttentionCall,
    SparseLatentAttentionInputs,
    SparseLatentAttentionOutputs,
)


def _rows(inputs: SparseLatentAttentionInputs) -> Iterator[tuple[int, int, Any]]:
    """Row of the batch, query and the tokens that it names, where it names any."""
    for row, token in np.ndindex(inputs.token_indices.shape[:2]):
        named = inputs.token_indices[row, token]
        named = named[named >= 0]
        if named.size:
            yield row, token, named


def _weights(call: SparseLatentAttentionCall, query: Any, latents: Any) -> tuple[Any, Any]:
    """Weights `[h, k]` and their log-sum-exp `[h]`."""
    logits = call.softmax_scale * query @ latents.T
    largest = logits.max(-1, keepdims=True)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / total, (largest + np.log(total))[:, 0]


def forward(call: SparseLatentAttentionCall, inputs: SparseLatentAttentionInputs) -> SparseLatentAttentionOutputs:
    rows = call.query.shape[:3]
    out, lse = np.zeros((*rows, call.value_size)), np.full(rows, -np.inf)
    for row, token, named in _rows(inputs):
        latents = inputs.key_value[row, named]
        weights, lse[row, token] = _weights(call, inputs.query[row, token], latents)
        out[row, token] = weights @ latents[:, : call.value_size]
    return SparseLatentAttentionOutputs(out, lse)


def backward(
    call: SparseLatentAttentionCall,
    inputs: SparseLatentAttentionInputs,
    outputs: SparseLatentAttentionOutputs,
    cotangents: SparseLatentAttentionOutputs,
) -> SparseLatentAttentionInputs:
    d_query, d_key_value = np.zeros(inputs.query.shape), np.zeros(inputs.key_value.shape)
    for row, token, named in _rows(inputs):
        query, latents, d_out = inputs.query[row, token], inputs.key_value[row, named], cotangents.out[row, token]
        weights, _ = _weights(call, query, latents)
        d_weights = d_out @ latents[:, : call.value_size].T
        d_lse = 0.0 if cotangents.lse is None else cotangents.lse[row, token][:, None]
        d_logits = call.softmax_scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True) + d_lse)
        d_query[row, token] = d_logits @ latents
        d_key_value[row, named] += d_logits.T @ query
        d_key_value[row, named, : call.value_size] += weights.T @ d_out
    return SparseLatentAttentionInputs(d_query, d_key_value, None)
