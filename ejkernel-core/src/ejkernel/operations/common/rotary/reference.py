"""What the NumPy references of the operations that rotate queries and keys share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.common.rotary.interface import RotaryCall


def _turn(call: RotaryCall, x: Any, sign: int = 1) -> Any:
    """Each pair (a, b) becomes (-b, a); with sign -1 the transpose of that, (b, -a)."""
    if call.interleaved:
        return np.stack([-sign * x[..., 1::2], sign * x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-sign * second, sign * first], axis=-1)


def _per_channel(call: RotaryCall, angles: Any) -> Any:
    """cos or sin `[b, t, w]` as one number per channel, broadcastable to the heads."""
    if call.per_pair:
        angles = np.repeat(angles, 2, axis=-1) if call.interleaved else np.concatenate([angles, angles], axis=-1)
    return np.expand_dims(angles, 1 if call.heads_first else 2)


def _angle_gradient(call: RotaryCall, like: Any, per_channel: Any) -> Any:
    """The gradient of cos or sin, from one per channel of every head."""
    total = per_channel.sum(axis=1 if call.heads_first else 2)
    if call.per_pair and call.interleaved:
        total = total[..., 0::2] + total[..., 1::2]
    elif call.per_pair:
        total = np.add(*np.split(total, 2, axis=-1))
    return total if like.shape[0] == total.shape[0] else total.sum(axis=0, keepdims=True)


def rotate(call: RotaryCall, x: Any, cos: Any, sin: Any) -> Any:
    """`x * cos + turn(x) * sin` on the rotated channels of heads; the others as they are."""
    part, rest = x[..., : call.rotary_dim], x[..., call.rotary_dim :]
    turned = part * _per_channel(call, cos) + _turn(call, part) * _per_channel(call, sin)
    return np.concatenate([turned, rest], axis=-1)


def rotation_gradients(call: RotaryCall, x: Any, cos: Any, sin: Any, grad: Any) -> tuple[Any, Any, Any]:
    """The gradients of x, cos and sin from that of `rotate`."""
    part, rest = grad[..., : call.rotary_dim], grad[..., call.rotary_dim :]
    back = part * _per_channel(call, cos) + _turn(call, part * _per_channel(call, sin), -1)
    rotated = x[..., : call.rotary_dim]
    d_cos = _angle_gradient(call, cos, part * rotated)
    d_sin = _angle_gradient(call, sin, part * _turn(call, rotated))
    return np.concatenate([back, rest], axis=-1), d_cos, d_sin
