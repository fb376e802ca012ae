"""Normalisation and rotation of queries and keys: the arrays as the library's handlers take them.

cos, sin and the scales are passed in float32, an absent scale as `[0, d]`. In backward every block writes one partial sum of a
scale's gradient, and a second kernel reduces them in a fixed order. The gradients of cos and sin are a separate call, which XLA
removes if they are unused.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall, QkNormRopeInputs, QkNormRopeOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.qk_norm_rope.capability import MOST_BLOCKS, WIDEST
from ejkernel_cuda.qk_norm_rope.config import BackwardConfig, ForwardConfig

_FLOAT = jnp.float32


def _scale(value: Any, like: Any) -> Any:
    return jnp.zeros((0, like.shape[3]), _FLOAT) if value is None else value.astype(_FLOAT)


def _geometry(call: QkNormRopeCall) -> dict[str, Any]:
    return {"rotary_dim": np.int64(call.rotary_dim), "interleaved": call.interleaved, "heads_first": call.heads_first}


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def forward(call: QkNormRopeCall, inputs: QkNormRopeInputs, config: ForwardConfig) -> QkNormRopeOutputs:
    query, key = inputs.query, inputs.key
    if not query.size and not key.size:
        # The barrier marks in the program that this platform served the call.
        query, key = jax.lax.optimization_barrier((query, key))
        statistics = [jnp.zeros(x.shape[:-1], _FLOAT) if call.save_residuals else None for x in (query, key)]
        return QkNormRopeOutputs(query, key, *statistics)
    saved = [math.prod(x.shape[:-1]) if call.save_residuals else 0 for x in (query, key)]
    query_out, key_out, *statistics = jax.ffi.ffi_call(
        handler("qk_norm_rope_forward"),
        (_like(query), _like(key), *(jax.ShapeDtypeStruct((count,), _FLOAT) for count in saved)),
    )(
        query,
        key,
        inputs.cos.astype(_FLOAT),
        inputs.sin.astype(_FLOAT),
        _scale(inputs.query_scale, query),
        _scale(inputs.key_scale, query),
        **_geometry(call),
        epsilon=np.float32(call.epsilon),
        scale_offset=np.float32(call.scale_offset),
        span=np.int64(config.span),
        threads=np.int64(config.threads),
    )
    if not call.save_residuals:
        return QkNormRopeOutputs(query_out, key_out)
    query_rstd, key_rstd = (value.reshape(x.shape[:-1]) for value, x in zip(statistics, (query, key), strict=True))
    return QkNormRopeOutputs(query_out, key_out, query_rstd, key_rstd)


def backward(
    call: QkNormRopeCall,
    inputs: QkNormRopeInputs,
    outputs: QkNormRopeOutputs,
    cotangents: QkNormRopeOutputs,
    config: BackwardConfig,
) -> QkNormRopeInputs:
    query, key, cos, sin, *given = inputs
    if not query.size and not key.size:
        return QkNormRopeInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    scales = [_scale(value, query) for value in given]
    heads = (query, key, outputs.query_rstd.reshape(-1), outputs.key_rstd.reshape(-1), cotangents.query, cotangents.key)
    count = _partials(config, scales, (query, key))
    totals = [_like(scale if value is None else value) for scale, value in zip(scales, given, strict=True)]
    partials = [jax.ShapeDtypeStruct((len(value), count, query.shape[3]), _FLOAT) for value in scales]
    scale_offset = np.float32(call.scale_offset)
    d_query, d_key, *d_scales, _, _ = jax.ffi.ffi_call(
        handler("qk_norm_rope_backward"), (_like(query), _like(key), *totals, *partials)
    )(
        *heads,
        cos.astype(_FLOAT),
        sin.astype(_FLOAT),
        *scales,
        **_geometry(call),
        scale_offset=scale_offset,
        span=np.int64(config.span),
        partials=np.int64(count),
    )
    angles = jax.ShapeDtypeStruct((max(len(cos), len(sin)), *cos.shape[1:]), _FLOAT)
    d_cos, d_sin = jax.ffi.ffi_call(handler("qk_norm_rope_angle_gradients"), (angles, angles))(
        *heads, *scales, **_geometry(call), scale_offset=scale_offset
    )
    return QkNormRopeInputs(
        d_query,
        d_key,
        _shared(d_cos, cos),
        _shared(d_sin, sin),
        *(None if value is None else found for found, value in zip(d_scales, given, strict=True)),
    )


def _partials(config: BackwardConfig, scales: list[Any], arrays: tuple[Any, Any]) -> int:
    """Partial sums of one scale: fewer if batch members have their own scales, and at most one per head."""
    groups = max(1, *map(len, scales))
    heads = max(math.prod(x.shape[:-1]) for x in arrays) // groups
    most = MOST_BLOCKS // (groups * 2 * -(-WIDEST // 32))
    return max(1, min(-(-config.partials // groups), heads, most))


def _shared(gradient: Any, angles: Any) -> Any:
    """Reduce a gradient to the angles' shape: the call computes both per batch member if only one of cos and sin is shared."""
    return (gradient.sum(0, keepdims=True) if len(gradient) > len(angles) else gradient).astype(angles.dtype)
