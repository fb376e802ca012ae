"""Helpers of the rotary operations on XLA. One pass over each array, in the accumulator's dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.common.rotary.interface import RotaryCall
from ejkernel.utils.dtypes import accumulator


def _pairs(call: RotaryCall, x: Any) -> tuple[Any, Any]:
    """Both members of every pair of channels."""
    if call.interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _joined(call: RotaryCall, first: Any, second: Any) -> Any:
    """The inverse of `_pairs`."""
    if call.interleaved:
        return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    return jnp.concatenate([first, second], axis=-1)


def _angles(call: RotaryCall, angles: Any, dtype: Any) -> tuple[Any, Any]:
    """cos or sin of both members of every pair, broadcastable to the heads."""
    wide = jnp.expand_dims(angles.astype(dtype), 1 if call.heads_first else 2)
    return (wide, wide) if call.per_pair else _pairs(call, wide)


def _split(call: RotaryCall, x: Any) -> tuple[Any, Any, Any]:
    """Both members of every rotated pair in the accumulator's dtype, and the channels that pass through."""
    first, second = _pairs(call, x[..., : call.rotary_dim].astype(accumulator(x.dtype)))
    return first, second, x[..., call.rotary_dim :]


def _merged(call: RotaryCall, first: Any, second: Any, rest: Any) -> Any:
    rotated = _joined(call, first, second).astype(rest.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def rotate(call: RotaryCall, x: Any, cos: Any, sin: Any) -> Any:
    """Heads with their rotated channels turned, in their own dtype."""
    first, second, rest = _split(call, x)
    (cos_1, cos_2), (sin_1, sin_2) = (_angles(call, value, first.dtype) for value in (cos, sin))
    return _merged(call, first * cos_1 - second * sin_1, second * cos_2 + first * sin_2, rest)


def rotation_gradients(call: RotaryCall, x: Any, cos: Any, sin: Any, grad: Any) -> tuple[Any, Any, Any]:
    """The gradients of x, in the dtype of `grad`, and of cos and sin, in the accumulator's, from that of `rotate`."""
    first, second, _ = _split(call, x)
    grad_1, grad_2, rest = _split(call, grad)
    (cos_1, cos_2), (sin_1, sin_2) = (_angles(call, value, first.dtype) for value in (cos, sin))
    d_x = _merged(call, grad_1 * cos_1 + grad_2 * sin_2, grad_2 * cos_2 - grad_1 * sin_1, rest)
    return (
        d_x,
        _summed(call, cos, grad_1 * first, grad_2 * second),
        _summed(call, sin, -grad_1 * second, grad_2 * first),
    )


def _summed(call: RotaryCall, angles: Any, first: Any, second: Any) -> Any:
    """The gradient of cos or sin: sums over heads, over the batch that shares it, and over the pair that shares it."""
    heads = 1 if call.heads_first else 2
    axes = (heads,) if angles.shape[0] == first.shape[0] else (0, heads)

    def total(values: Any) -> Any:
        return jnp.sum(values, axis=axes).reshape(*angles.shape[:-1], values.shape[-1])

    return total(first + second) if call.per_pair else _joined(call, total(first), total(second))
