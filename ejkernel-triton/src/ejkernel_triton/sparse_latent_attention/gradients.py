"""The launches of the backward phase, and the work that XLA does before and after."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.sparse_latent_attention.interface import (
    SparseLatentAttentionCall,
    SparseLatentAttentionInputs,
    SparseLatentAttentionOutputs,
)
from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._latents.config import LatentGradientConfig
from ejkernel_triton._numerics import DotPrecision, dot_precision
from ejkernel_triton.sparse_latent_attention.backward import (
    sparse_part_kernel,
    sparse_query_gradient_kernel,
    sparse_sum_kernel,
)
from ejkernel_triton.sparse_latent_attention.config import queries_of_chunk


@dataclasses.dataclass(frozen=True)
class SparseParams:
    """The static parameters of the kernels, tiles aside.

    Attributes:
        scale: of the logits.
        latent, rest: channels that are values, and those beside them.
        heads: of a query.
        precision: `input_precision` of float32 dots.
        soft_cap: there is none.
    """

    scale: float
    latent: int
    rest: int
    heads: int
    precision: DotPrecision
    soft_cap: float = 0.0


def backward(
    call: SparseLatentAttentionCall,
    inputs: SparseLatentAttentionInputs,
    outputs: SparseLatentAttentionOutputs,
    cotangents: SparseLatentAttentionOutputs,
    config: LatentGradientConfig,
) -> SparseLatentAttentionInputs:
    batch, queries, heads, size = call.query.shape
    tokens, slots = call.key_value.shape[1], call.token_indices.shape[2]
    if batch * queries * tokens * slots == 0:
        return SparseLatentAttentionInputs(jnp.zeros_like(inputs.query), jnp.zeros_like(inputs.key_value), None)
    out, lse = outputs
    grad = jnp.zeros_like(out) if cotangents.out is None else cotangents.out
    mean = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if cotangents.lse is not None:
        mean -= jnp.where(lse == -jnp.inf, 0, cotangents.lse)
    rest = size - call.value_size
    shared: dict[str, Any] = {
        "P": SparseParams(call.softmax_scale, call.value_size, rest, heads, dot_precision(None, call.query.dtype)),
        "BLOCK_V": dot_block(call.value_size),
        "BLOCK_REST": dot_block(rest),
        "BLOCK_M": config.rows,
        "BLOCK_K": config.block_k,
        "HEADS_OF_TILE": config.block_h,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    (d_query,) = call_kernel(
        sparse_query_gradient_kernel,
        (*inputs, grad, lse, mean, queries, tokens, slots),
        ((call.query.shape, call.query.dtype),),
        grid=batch * queries * -(-heads // config.block_h),
        **shared,
    )
    total = _by_token(call, inputs, (grad, lse, mean), shared)
    return SparseLatentAttentionInputs(d_query, total.reshape(call.key_value.shape).astype(call.key_value.dtype), None)


def _by_token(
    call: SparseLatentAttentionCall, inputs: SparseLatentAttentionInputs, rows: tuple[Any, Any, Any], shared: dict[str, Any]
) -> Any:
    """The gradient of key_value, `[b s, c]` in float32, of some queries at a time."""
    batch, queries = call.query.shape[:2]
    tokens, size = call.key_value.shape[1:]
    every = batch * queries
    chunk = queries_of_chunk(call)
    chunks = -(-every // chunk)
    member = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, queries))
    arrays = (inputs.query, inputs.token_indices, member, *rows)
    flat = [array.reshape(every, *array.shape[2:]) for array in arrays]
    # Queries that fill up the last chunk name nothing.
    padded = [
        jnp.pad(array, [(0, chunks * chunk - every), *[(0, 0)] * (array.ndim - 1)], constant_values=value)
        for array, value in zip(flat, (0, -1, 0, 0, 0, 0), strict=True)
    ]
    total = vary_like(jnp.zeros((batch * tokens, size), jnp.float32), (*inputs, rows[0]))

    def one(total: Any, arrays: Any) -> tuple[Any, None]:
        return _added(call, inputs.key_value, total, arrays, shared), None

    if chunks == 1:
        return one(total, padded)[0]
    return jax.lax.scan(one, total, [array.reshape(chunks, chunk, *array.shape[1:]) for array in padded])[0]


def _added(call: SparseLatentAttentionCall, key_value: Any, total: Any, arrays: Any, shared: dict[str, Any]) -> Any:
    query, indices, member, *rows = arrays
    tokens, size = call.key_value.shape[1:]
    chunk, slots = indices.shape
    (parts,) = call_kernel(
        sparse_part_kernel,
        (query, key_value, indices, member, *rows, tokens, slots),
        (((chunk, slots, size), jnp.float32),),
        grid=chunk * -(-slots // shared["BLOCK_K"]),
        **shared,
    )
    beyond = total.shape[0]
    token = jnp.where(indices >= 0, member[:, None] * tokens + indices, beyond).reshape(-1)
    order = jnp.argsort(token, stable=True).astype(jnp.int32)
    up_to = jnp.searchsorted(token[order], jnp.arange(beyond + 1, dtype=token.dtype)).astype(jnp.int32)
    (found,) = call_kernel(
        sparse_sum_kernel,
        (parts, order, up_to, total),
        ((total.shape, total.dtype),),
        grid=beyond,
        num_warps=4,
        input_output_aliases={3: 0},
        CHANNELS=size,
        BLOCK=next_power_of_2(size),
    )
    return found
