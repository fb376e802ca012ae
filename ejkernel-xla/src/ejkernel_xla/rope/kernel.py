"""Rotary position embedding, in float32 inside; XLA fuses it into one pass over each array."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs
from ejkernel_xla._numerics import accumulator


def _pairs(call: RopeCall, x: Any) -> tuple[Any, Any]:
    """Both members of every pair of channels."""
    if call.interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _joined(call: RopeCall, first: Any, second: Any) -> Any:
    """The inverse of `_pairs`."""
    if call.interleaved:
        return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    return jnp.concatenate([first, second], axis=-1)


def _angles(call: RopeCall, angles: Any, dtype: Any) -> tuple[Any, Any]:
    """cos or sin of both members of every pair, broadcastable to the heads."""
    wide = jnp.expand_dims(angles.astype(dtype), 1 if call.heads_first else 2)
    return (wide, wide) if call.per_pair else _pairs(call, wide)


def _split(call: RopeCall, x: Any) -> tuple[Any, Any, Any]:
    """Both members of every rotated pair in the accumulator's dtype, and the channels that pass through."""
    first, second = _pairs(call, x[..., : call.rotary_dim].astype(accumulator(x.dtype)))
    return first, second, x[..., call.rotary_dim :]


def _merged(call: RopeCall, first: Any, second: Any, rest: Any) -> Any:
    rotated = _joined(call, first, second).astype(rest.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def forward(call: RopeCall, inputs: RopeInputs, config: None) -> RopeOutputs:
    def rotate(x: Any) -> Any:
        first, second, rest = _split(call, x)
        (cos_1, cos_2), (sin_1, sin_2) = (_angles(call, value, first.dtype) for value in (inputs.cos, inputs.sin))
        return _merged(call, first * cos_1 - second * sin_1, second * cos_2 + first * sin_2, rest)

    return RopeOutputs(rotate(inputs.query), None if inputs.key is None else rotate(inputs.key))


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs, config: None) -> RopeInputs:
    def gradients(x: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        first, second, _ = _split(call, x)
        grad_1, grad_2, rest = _split(call, cotangent)
        (cos_1, cos_2), (sin_1, sin_2) = (_angles(call, value, first.dtype) for value in (inputs.cos, inputs.sin))
        d_x = _merged(call, grad_1 * cos_1 + grad_2 * sin_2, grad_2 * cos_2 - grad_1 * sin_1, rest)
        return (
            d_x,
            _summed(call, inputs.cos, grad_1 * first, grad_2 * second),
            _summed(call, inputs.sin, -grad_1 * second, grad_2 * first),
        )

    d_query, d_cos, d_sin = gradients(inputs.query, cotangents.query)
    d_key = None
    if inputs.key is not None:
        d_key, more_cos, more_sin = gradients(inputs.key, cotangents.key)
        d_cos, d_sin = d_cos + more_cos, d_sin + more_sin
    return RopeInputs(d_query, d_key, d_cos.astype(inputs.cos.dtype), d_sin.astype(inputs.sin.dtype))


def _summed(call: RopeCall, angles: Any, first: Any, second: Any) -> Any:
    """The gradient of cos or sin: sums over heads, over the batch that shares it, and over the pair that shares it."""
    heads = 1 if call.heads_first else 2
    axes = (heads,) if angles.shape[0] == first.shape[0] else (0, heads)

    def total(values: Any) -> Any:
        return jnp.sum(values, axis=axes).reshape(*angles.shape[:-1], values.shape[-1])

    return total(first + second) if call.per_pair else _joined(call, total(first), total(second))
