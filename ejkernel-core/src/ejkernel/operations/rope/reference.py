"""`rope` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs


def _turn(call: RopeCall, x: Any, sign: int = 1) -> Any:
    """Each pair (a, b) becomes (-b, a); with sign -1 the transpose of that, (b, -a)."""
    if call.interleaved:
        return np.stack([-sign * x[..., 1::2], sign * x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-sign * second, sign * first], axis=-1)


def _per_channel(call: RopeCall, angles: Any) -> Any:
    """cos or sin `[b, t, w]` as one number per channel, broadcastable to the heads."""
    if call.per_pair:
        angles = np.repeat(angles, 2, axis=-1) if call.interleaved else np.concatenate([angles, angles], axis=-1)
    return np.expand_dims(angles, 1 if call.heads_first else 2)


def _angle_gradient(call: RopeCall, like: Any, per_channel: Any) -> Any:
    """The gradient of cos or sin, from one per channel of every head."""
    total = per_channel.sum(axis=1 if call.heads_first else 2)
    if call.per_pair and call.interleaved:
        total = total[..., 0::2] + total[..., 1::2]
    elif call.per_pair:
        total = sum(np.split(total, 2, axis=-1))
    return total if like.shape[0] == total.shape[0] else total.sum(axis=0, keepdims=True)


def forward(call: RopeCall, inputs: RopeInputs) -> RopeOutputs:
    cos, sin = _per_channel(call, inputs.cos), _per_channel(call, inputs.sin)

    def rotate(x: Any) -> Any:
        part, rest = x[..., : call.rotary_dim], x[..., call.rotary_dim :]
        return np.concatenate([part * cos + _turn(call, part) * sin, rest], axis=-1)

    return RopeOutputs(rotate(inputs.query), None if inputs.key is None else rotate(inputs.key))


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs) -> RopeInputs:
    cos, sin = _per_channel(call, inputs.cos), _per_channel(call, inputs.sin)
    d_cos, d_sin = np.zeros_like(inputs.cos), np.zeros_like(inputs.sin)
    d_x: dict[str, Any] = {"query": None, "key": None}
    for name in ("query", "key") if inputs.key is not None else ("query",):
        x, grad = getattr(inputs, name)[..., : call.rotary_dim], getattr(cotangents, name)
        part, rest = grad[..., : call.rotary_dim], grad[..., call.rotary_dim :]
        d_x[name] = np.concatenate([part * cos + _turn(call, part * sin, -1), rest], axis=-1)
        d_cos = d_cos + _angle_gradient(call, inputs.cos, part * x)
        d_sin = d_sin + _angle_gradient(call, inputs.sin, part * _turn(call, x))
    return RopeInputs(d_x["query"], d_x["key"], d_cos, d_sin)
