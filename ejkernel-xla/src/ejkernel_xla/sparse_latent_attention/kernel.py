"""Both phases loop over tiles of queries; backward gathers again and recomputes weights from lse. All heads share one key head,
the latent."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.sparse_latent_attention.interface import (
    SparseLatentAttentionCall,
    SparseLatentAttentionInputs,
    SparseLatentAttentionOutputs,
)
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla import _sparse
from ejkernel_xla.sparse_latent_attention.config import SparseLatentAttentionConfig


def forward(
    call: SparseLatentAttentionCall, inputs: SparseLatentAttentionInputs, config: SparseLatentAttentionConfig
) -> SparseLatentAttentionOutputs:
    latents = _latents(inputs)

    def tile(arrays: Any) -> Any:
        query, chosen = arrays
        key, visible = _gathered(latents, chosen)
        out, lse = _sparse.attend(query, key, key[..., : call.value_size], visible, call.softmax_scale)
        return out.astype(query.dtype), lse

    out, lse = _sparse.by_tiles(tile, (_sparse.by_head(inputs.query, 1), _chosen(inputs)), config.block_q)
    wanted = call.return_lse or call.save_residuals
    return SparseLatentAttentionOutputs(_sparse.from_heads(out), _sparse.from_heads(lse) if wanted else None)


def backward(
    call: SparseLatentAttentionCall,
    inputs: SparseLatentAttentionInputs,
    outputs: SparseLatentAttentionOutputs,
    cotangents: SparseLatentAttentionOutputs,
    config: SparseLatentAttentionConfig,
) -> SparseLatentAttentionInputs:
    latents = _latents(inputs)
    tokens, size = inputs.key_value.shape[1:]
    beyond = latents.shape[2]
    rows = _sparse.rows_of(
        *(
            None if x is None else _sparse.by_head(x, 1)
            for x in (inputs.query, outputs.out, outputs.lse, cotangents.out, cotangents.lse)
        )
    )

    def tile(total: Any, arrays: Any) -> Any:
        rows, chosen = arrays
        key, visible = _gathered(latents, chosen)
        d_query, d_key, d_value = _sparse.tile_gradients(rows, key, key[..., : call.value_size], visible, call.softmax_scale)
        parts = d_key + jnp.pad(d_value, [(0, 0)] * 4 + [(0, size - call.value_size)])
        total = _sparse.added(total, jnp.where(visible, chosen - 1, beyond), parts)
        return total, d_query.astype(rows.query.dtype)

    total = _sparse.zeros(latents.shape, accumulator(latents.dtype), (rows, latents, inputs.token_indices))
    total, d_query = _sparse.fold_tiles(tile, total, (rows, _chosen(inputs)), config.block_q)
    return SparseLatentAttentionInputs(_sparse.from_heads(d_query), total[:, 0, :tokens].astype(inputs.key_value.dtype), None)


def _latents(inputs: SparseLatentAttentionInputs) -> Any:
    """`[b,1,s,c]` with at least one token, so that there is something to read."""
    latents = inputs.key_value[:, None]
    return latents if latents.shape[2] else jnp.pad(latents, [(0, 0), (0, 0), (0, 1), (0, 0)])


def _chosen(inputs: SparseLatentAttentionInputs) -> Any:
    """`[b,1,t,s]`: one more than the number of the token; 0, with which tiles are filled up, is none."""
    return jnp.maximum(inputs.token_indices + 1, 0)[:, None]


def _gathered(latents: Any, chosen: Any) -> tuple[Any, Any]:
    """The latents of a tile `[b,1,q,j,c]`, 0 where none is chosen, and where one is."""
    visible = chosen > 0
    found = _sparse.gathered(latents, jnp.maximum(chosen - 1, 0), 1)
    return jnp.where(visible[..., None], found, jnp.zeros((), found.dtype)), visible
