"""Rotary position embedding: the arrays as the library's handlers take them. cos and sin are passed in float32.

The gradient of query and key is the inverse rotation. The gradients of cos and sin are a separate call, which XLA removes if they
are unused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.rope.config import Config

_FLOAT = jnp.float32


def _present(call: RopeCall, like: Any, key: Any) -> Any:
    """key; an absent one becomes an array without heads."""
    if key is not None:
        return key
    axis = 1 if call.heads_first else 2
    return jnp.zeros((*like.shape[:axis], 0, *like.shape[axis + 1 :]), like.dtype)


def _geometry(call: RopeCall) -> dict[str, Any]:
    return {"rotary_dim": np.int64(call.rotary_dim), "interleaved": call.interleaved, "heads_first": call.heads_first}


def _rotate(call: RopeCall, query: Any, key: Any, cos: Any, sin: Any, config: Config, *, inverse: bool) -> tuple[Any, Any]:
    """query and key, rotated; key may be None."""
    if not call.rotary_dim or not (query.size or (key is not None and key.size)):
        # The barrier marks in the program that this platform served the call.
        return jax.lax.optimization_barrier((query, key))
    arrays = (query, _present(call, query, key))
    knobs = {"span": np.int64(config.span), "threads": np.int64(config.threads)}
    query_out, key_out = jax.ffi.ffi_call(
        handler("rope_rotate"), tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    )(*arrays, cos.astype(_FLOAT), sin.astype(_FLOAT), **_geometry(call), inverse=inverse, **knobs)
    return query_out, None if key is None else key_out


def forward(call: RopeCall, inputs: RopeInputs, config: Config) -> RopeOutputs:
    return RopeOutputs(*_rotate(call, *inputs, config, inverse=False))


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs, config: Config) -> RopeInputs:
    query, key, cos, sin = inputs
    d_query, d_key = _rotate(call, cotangents.query, cotangents.key, cos, sin, config, inverse=True)
    if not call.rotary_dim or not cos.size or not (query.size or (key is not None and key.size)):
        return RopeInputs(d_query, d_key, jnp.zeros_like(cos), jnp.zeros_like(sin))
    angles = jax.ShapeDtypeStruct((max(len(cos), len(sin)), *cos.shape[1:]), _FLOAT)
    d_cos, d_sin = jax.ffi.ffi_call(handler("rope_angle_gradients"), (angles, angles))(
        query,
        _present(call, query, key),
        cotangents.query,
        _present(call, cotangents.query, cotangents.key),
        **_geometry(call),
    )
    return RopeInputs(d_query, d_key, _shared(d_cos, cos), _shared(d_sin, sin))


def _shared(gradient: Any, angles: Any) -> Any:
    """Reduce a gradient to the angles' shape: the call computes both per batch member if only one of cos and sin is shared."""
    return (gradient.sum(0, keepdims=True) if len(gradient) > len(angles) else gradient).astype(angles.dtype)
