"""Mean over whole rows, or over packed sequences by a sum over sorted segment ids."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.mean_pooling.interface import MeanPoolingCall, MeanPoolingInputs, MeanPoolingOutputs
from ejkernel.utils.dtypes import accumulator


def forward(call: MeanPoolingCall, inputs: MeanPoolingInputs, config: None) -> MeanPoolingOutputs:
    x, cu_seqlens = inputs
    wide = x.astype(accumulator(x.dtype))
    if cu_seqlens is None:
        total, counts = jnp.sum(wide, axis=1, keepdims=True), max(x.shape[1], 1)
    else:
        sum_segments = functools.partial(jax.ops.segment_sum, num_segments=call.sequences, indices_are_sorted=True)
        total, counts = jax.vmap(sum_segments)(wide, _segment_ids(call, cu_seqlens)), _counts(cu_seqlens, wide.dtype)
    return MeanPoolingOutputs((total / counts).astype(x.dtype))


def backward(
    call: MeanPoolingCall, inputs: MeanPoolingInputs, outputs: MeanPoolingOutputs, cotangents: MeanPoolingOutputs, config: None
) -> MeanPoolingInputs:
    x, cu_seqlens = inputs
    grad = cotangents.out.astype(accumulator(x.dtype))
    if cu_seqlens is None:
        d_x = jnp.broadcast_to(grad / max(x.shape[1], 1), x.shape)
    elif call.sequences == 0:
        d_x = jnp.zeros(x.shape)
    else:
        per_token = (grad / _counts(cu_seqlens, grad.dtype)).astype(x.dtype)
        pick = jax.vmap(lambda rows, ids: rows.at[ids].get(mode="fill", fill_value=0))
        d_x = pick(per_token, _segment_ids(call, cu_seqlens))
    return MeanPoolingInputs(d_x.astype(x.dtype))


def _segment_ids(call: MeanPoolingCall, cu_seqlens: Any) -> Any:
    """The sequence of every token `[b, t]`; `call.sequences` for tokens outside of all, which scatter and gather then drop."""
    tokens = jnp.arange(call.x.shape[1], dtype=jnp.int32)
    bounds = jnp.broadcast_to(cu_seqlens, (call.x.shape[0], cu_seqlens.shape[1]))
    ids = jax.vmap(lambda row: jnp.searchsorted(row, tokens, side="right"))(bounds) - 1
    return jnp.where(ids < 0, call.sequences, ids)


def _counts(cu_seqlens: Any, dtype: Any) -> Any:
    """How many tokens each sequence has, at least 1, `[1 or b, n, 1, 1]`."""
    return jnp.maximum(jnp.diff(cu_seqlens, axis=1), 1).astype(dtype)[:, :, None, None]
