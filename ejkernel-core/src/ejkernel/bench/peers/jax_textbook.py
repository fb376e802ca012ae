"""What one writes in jax.numpy and leaves to `jax.jit`: the expression of the textbook, statistics in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.bench._program import Function
from ejkernel.bench.peers._peer import Peer, beyond
from ejkernel.operations._rows.interface import per_row


def _scaled(call: Any, inputs: Any, normal: Any) -> Mapping[str, Any]:
    if inputs.scale is not None:
        normal = normal * (per_row(inputs.scale, normal.ndim).astype(jnp.float32) + call.scale_offset)
    if inputs.offset is not None:
        normal = normal + per_row(inputs.offset, normal.ndim).astype(jnp.float32)
    return {"out": normal.astype(inputs.x.dtype)}


def _rms_norm(call: Any, inputs: Any) -> Function:
    def norm(inputs: Any) -> Mapping[str, Any]:
        x = inputs.x.astype(jnp.float32)
        return _scaled(call, inputs, x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + call.epsilon))

    return norm


def _layer_norm(call: Any, inputs: Any) -> Function:
    def norm(inputs: Any) -> Mapping[str, Any]:
        x = inputs.x.astype(jnp.float32)
        x = x - jnp.mean(x, -1, keepdims=True)
        return _scaled(call, inputs, x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + call.epsilon))

    return norm


def _softmax(call: Any, inputs: Any) -> Function:
    def softmax(inputs: Any) -> Mapping[str, Any]:
        x = call.scale * inputs.x.astype(jnp.float32)
        where = None if inputs.where is None else jnp.broadcast_to(inputs.where, x.shape)
        return {"out": jax.nn.softmax(x, axis=-1, where=where).astype(inputs.x.dtype)}

    return softmax


def _rope(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "query", "key", "cos", "sin", "rotary_dim")
    if reason or not call.per_pair:
        return reason or "takes one angle per pair of channels"

    def rope(inputs: Any) -> Mapping[str, Any]:
        cos, sin = (angle.astype(jnp.float32)[:, :, None] for angle in (inputs.cos, inputs.sin))

        def turned(x: Any) -> Any:
            left, right = jnp.split(x[..., : call.rotary_dim].astype(jnp.float32), 2, axis=-1)
            parts = [left * cos - right * sin, right * cos + left * sin, x[..., call.rotary_dim :]]
            return jnp.concatenate([part.astype(x.dtype) for part in parts], axis=-1)

        found = {"query": turned(inputs.query)}
        return found if inputs.key is None else {**found, "key": turned(inputs.key)}

    return rope


def _cross_entropy(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "targets", "head", "head_bias", "transpose_head", "soft_cap")
    if reason:
        return reason

    def cross_entropy(inputs: Any) -> Mapping[str, Any]:
        logits = inputs.x
        if inputs.head is not None:
            head = inputs.head[0].T if call.transpose_head else inputs.head[0]
            logits = jnp.matmul(inputs.x, head, preferred_element_type=jnp.float32)
        if inputs.head_bias is not None:
            logits = logits + inputs.head_bias[0]
        logits = logits.astype(jnp.float32)
        if call.soft_cap is not None:
            logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
        counts = inputs.targets >= 0
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(inputs.targets, 0)[..., None], axis=-1)[..., 0]
        return {"loss": jnp.where(counts, lse - chosen, 0.0), "lse": jnp.where(counts, lse, 0.0)}

    return cross_entropy


def _mean_pooling(call: Any, inputs: Any) -> Function | str:
    return beyond(call, "x") or (
        lambda inputs: {"out": jnp.mean(inputs.x, axis=1, keepdims=True, dtype=jnp.float32).astype(inputs.x.dtype)}
    )


PEERS = (
    Peer(
        "jax",
        {
            "rms_norm": _rms_norm,
            "layer_norm": _layer_norm,
            "softmax": _softmax,
            "rope": _rope,
            "cross_entropy": _cross_entropy,
            "mean_pooling": _mean_pooling,
        },
    ),
)
