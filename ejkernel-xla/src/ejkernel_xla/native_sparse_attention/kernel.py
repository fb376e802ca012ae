"""Both phases loop over tiles of queries; backward gathers again and recomputes weights from lse (Dao et al., FlashAttention,
2022)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.native_sparse_attention.interface import (
    NativeSparseAttentionCall,
    NativeSparseAttentionInputs,
    NativeSparseAttentionOutputs,
)
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla import _sparse
from ejkernel_xla.native_sparse_attention.config import NativeSparseAttentionConfig


class _Selection(NamedTuple):
    """starts `[b,k,t,s]`: first token of each block, or `length` for none; limit `[1,1,t]`: first token after the query."""

    starts: Any
    limit: Any


def forward(
    call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs, config: NativeSparseAttentionConfig
) -> NativeSparseAttentionOutputs:
    key, value = _padded(call, inputs.key), _padded(call, inputs.value)

    def tile(arrays: Any) -> Any:
        query, selection = arrays
        out, lse = _sparse.attend(query, *_gathered(call, key, value, selection), call.softmax_scale)
        return out.astype(query.dtype), lse.astype(_lse_dtype(call))

    query = _sparse.by_head(inputs.query, key.shape[1])
    out, lse = _sparse.by_tiles(tile, (query, _selection(call, inputs)), config.block_q)
    wanted = call.return_lse or call.save_residuals
    return NativeSparseAttentionOutputs(_sparse.from_heads(out), _sparse.from_heads(lse) if wanted else None)


def backward(
    call: NativeSparseAttentionCall,
    inputs: NativeSparseAttentionInputs,
    outputs: NativeSparseAttentionOutputs,
    cotangents: NativeSparseAttentionOutputs,
    config: NativeSparseAttentionConfig,
) -> NativeSparseAttentionInputs:
    key, value = _padded(call, inputs.key), _padded(call, inputs.value)
    size, wide = inputs.key.shape[3], accumulator(inputs.key.dtype)
    rows = _sparse.rows_of(
        *(
            None if x is None else _sparse.by_head(x, key.shape[1])
            for x in (inputs.query, outputs.out, outputs.lse, cotangents.out, cotangents.lse)
        )
    )

    def tile(total: Any, arrays: Any) -> Any:
        rows, selection = arrays
        d_query, d_key, d_value = _sparse.tile_gradients(rows, *_gathered(call, key, value, selection), call.softmax_scale)
        beyond = jnp.where(selection.starts >= call.key.shape[1], total.shape[2], selection.starts)
        total = _sparse.added(total, beyond, jnp.concatenate([d_key, d_value], axis=-1))
        return total, d_query.astype(rows.query.dtype)

    total = _sparse.zeros((*key.shape[:3], size + value.shape[3]), wide, (rows, key, value, inputs.block_indices))
    total, d_query = _sparse.fold_tiles(tile, total, (rows, _selection(call, inputs)), config.block_q)
    total = jnp.swapaxes(total, 1, 2)[:, : call.key.shape[1]]
    return NativeSparseAttentionInputs(
        _sparse.from_heads(d_query),
        total[..., :size].astype(inputs.key.dtype),
        total[..., size:].astype(inputs.value.dtype),
        None,
    )


def _lse_dtype(call: NativeSparseAttentionCall) -> Any:
    return accumulator(call.query.dtype)


def _padded(call: NativeSparseAttentionCall, x: Any) -> Any:
    """`[b,k,n,d]`, one block longer than the sequence, so that every block can be read whole."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), [(0, 0), (0, 0), (0, call.block_size), (0, 0)])


def _selection(call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs) -> _Selection:
    length = call.query.shape[1]
    indices = jnp.swapaxes(inputs.block_indices, 1, 2)
    starts = indices * call.block_size
    if inputs.sequence_starts is not None:
        starts = starts + inputs.sequence_starts[:, None, :, None]
    limit = jnp.arange(1, length + 1, dtype=jnp.int32)[None, None]
    return _Selection(jnp.where(indices < 0, length, starts), limit)


def _gathered(call: NativeSparseAttentionCall, key: Any, value: Any, selection: _Selection) -> tuple[Any, Any, Any]:
    """Keys and values of a tile `[b,k,q,j,...]`, 0 where invisible, and where they are visible."""
    tokens = selection.starts[..., None] + jnp.arange(call.block_size, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    tokens = tokens.reshape(*tokens.shape[:3], tokens.shape[3] * tokens.shape[4])
    visible = tokens < selection.limit[..., None]
    shown = visible[..., None]
    key, value = (_sparse.gathered(x, selection.starts, call.block_size) for x in (key, value))
    return jnp.where(shown, key, jnp.zeros((), key.dtype)), jnp.where(shown, value, jnp.zeros((), value.dtype)), visible
