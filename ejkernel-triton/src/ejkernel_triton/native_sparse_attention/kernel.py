"""Launches of both phases."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.native_sparse_attention.interface import (
    NativeSparseAttentionCall,
    NativeSparseAttentionInputs,
    NativeSparseAttentionOutputs,
)
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.native_sparse_attention.backward import (
    native_sparse_attention_combine_kernel,
    native_sparse_attention_key_gradient_kernel,
    native_sparse_attention_query_gradient_kernel,
)
from ejkernel_triton.native_sparse_attention.config import BackwardConfig, ForwardConfig
from ejkernel_triton.native_sparse_attention.forward import native_sparse_attention_forward_kernel
from ejkernel_triton.native_sparse_attention.params import Params, params_of
from ejkernel_triton.native_sparse_attention.visits import Visits, visits_of

_COMBINED = 4096
"""Numbers that a program of the combine kernel adds up."""


def forward(
    call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs, config: ForwardConfig
) -> NativeSparseAttentionOutputs:
    rows, wanted = call.query.shape[:3], call.return_lse or call.save_residuals
    shape = (*rows, call.value.shape[3])
    if not inputs.query.size or not inputs.value.size or not inputs.block_indices.size:
        lse = jnp.full(rows, -jnp.inf, jnp.float32)
        return NativeSparseAttentionOutputs(jnp.zeros(shape, inputs.query.dtype), lse if wanted else None)
    params = params_of(call, config.block_k)
    out, lse = call_kernel(
        native_sparse_attention_forward_kernel,
        (inputs.query, inputs.key, inputs.value, inputs.block_indices, _starts(inputs), rows[1]),
        ((shape, inputs.query.dtype), (rows if wanted else (1,), jnp.float32)),
        grid=_programs(call, params),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        P=params,
        HAS_LSE=wanted,
    )
    return NativeSparseAttentionOutputs(out, lse if wanted else None)


def backward(
    call: NativeSparseAttentionCall,
    inputs: NativeSparseAttentionInputs,
    outputs: NativeSparseAttentionOutputs,
    cotangents: NativeSparseAttentionOutputs,
    config: BackwardConfig,
) -> NativeSparseAttentionInputs:
    query, key, value = inputs.query, inputs.key, inputs.value
    if not query.size or not value.size or not inputs.block_indices.size:
        return NativeSparseAttentionInputs(jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value), None)
    rows, d_lse = call.query.shape[:3], cotangents.lse
    params = params_of(call, config.query_block_k)
    d_query, shift, delta = call_kernel(
        native_sparse_attention_query_gradient_kernel,
        (
            *(query, key, value, inputs.block_indices, _starts(inputs), outputs.out, outputs.lse, cotangents.out),
            *(outputs.lse if d_lse is None else d_lse, rows[1]),
        ),
        ((query.shape, query.dtype), (rows, jnp.float32), (rows, jnp.float32)),
        grid=_programs(call, params),
        num_warps=config.query_num_warps,
        num_stages=config.query_num_stages,
        P=params,
        HAS_DLSE=d_lse is not None,
    )
    params = params_of(call, config.key_block_k)
    visits = visits_of(call, inputs, config.key_block_k, max(config.key_chunk // params.groups, 1))
    length, chunks, tiles = rows[1], visits.tiles.shape[1], visits.chunks_up_to.shape[1]
    partial = (*visits.tiles.shape, params.block_k)
    d_key, d_value = call_kernel(
        native_sparse_attention_key_gradient_kernel,
        (
            *(query, key, value, cotangents.out, shift, delta, visits.tokens, visits.starts),
            *(visits.tiles, visits.begin, visits.end, length, chunks, tiles),
        ),
        (((*partial, params.size), jnp.float32), ((*partial, params.value_size), jnp.float32)),
        grid=visits.tiles.size,
        num_warps=config.key_num_warps,
        num_stages=config.key_num_stages,
        P=params,
        ROWS=config.key_rows,
        INSIDE=params.sequences == 0 and params.block_size % params.block_k == 0,
    )
    return NativeSparseAttentionInputs(
        d_query, _combined(d_key, visits, params, key), _combined(d_value, visits, params, value), None
    )


def _combined(partial: Any, visits: Visits, params: Params, like: Any) -> Any:
    """Sums of the chunks of each tile, in the order and dtype of `like`."""
    tiles, size = visits.chunks_up_to.shape[1], like.shape[3]
    block = max(1 << (size - 1).bit_length(), 1)
    part = min(max(_COMBINED // block, 1), params.block_k)
    (total,) = call_kernel(
        native_sparse_attention_combine_kernel,
        (partial, visits.chunks_up_to, like.shape[1], visits.tiles.shape[1], tiles),
        ((like.shape, like.dtype),),
        grid=visits.chunks_up_to.size * (params.block_k // part),
        num_warps=4,
        num_stages=2,
        KEY_HEADS=params.key_heads,
        SIZE=size,
        BLOCK=block,
        KEYS=params.block_k,
        PART=part,
    )
    return total


def _programs(call: NativeSparseAttentionCall, params: Params) -> int:
    batch, length, _, _ = call.query.shape
    return batch * length * params.key_heads * params.tiles_of_heads


def _starts(inputs: NativeSparseAttentionInputs) -> Any:
    """First tokens of sequences, or any integers where there are none."""
    return inputs.block_indices if inputs.sequence_starts is None else inputs.sequence_starts
