"""What one writes in jax.numpy and leaves to `jax.jit`: the expression of the textbook, statistics in float32."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.common.rows.interface import per_row
from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond


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


def _add_rms_norm(call: Any, inputs: Any) -> Function:
    def norm(inputs: Any) -> Mapping[str, Any]:
        total = (inputs.x + inputs.residual).astype(inputs.residual.dtype)
        wide = total.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + call.epsilon)
        if inputs.scale is not None:
            normal = normal * (per_row(inputs.scale, normal.ndim).astype(jnp.float32) + call.scale_offset)
        return {"out": normal.astype(inputs.x.dtype), "sum": total}

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
        present = {"query": inputs.query} if inputs.key is None else {"query": inputs.query, "key": inputs.key}
        return {name: _turned(call, inputs, x).astype(x.dtype) for name, x in present.items()}

    return rope


def _turned(call: Any, inputs: Any, x: Any) -> Any:
    """Halves of the first channels, turned in float32."""
    cos, sin = (angle.astype(jnp.float32)[:, :, None] for angle in (inputs.cos, inputs.sin))
    left, right = jnp.split(x[..., : call.rotary_dim].astype(jnp.float32), 2, axis=-1)
    parts = [left * cos - right * sin, right * cos + left * sin, x[..., call.rotary_dim :].astype(jnp.float32)]
    return jnp.concatenate(parts, axis=-1)


def _qk_norm_rope(call: Any, inputs: Any) -> Function | str:
    known = ("query", "key", "cos", "sin", "rotary_dim", "query_scale", "key_scale", "epsilon", "scale_offset")
    reason = beyond(call, *known)
    if reason or not call.per_pair:
        return reason or "takes one angle per pair of channels"

    def norm_rope(inputs: Any) -> Mapping[str, Any]:
        def one(x: Any, scale: Any) -> Any:
            wide = x.astype(jnp.float32)
            normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + call.epsilon)
            if scale is not None:
                normal = normal * (per_row(scale, 4).astype(jnp.float32) + call.scale_offset)
            return _turned(call, inputs, normal).astype(x.dtype)

        return {"query": one(inputs.query, inputs.query_scale), "key": one(inputs.key, inputs.key_scale)}

    return norm_rope


def _cross_entropy(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "targets", "head", "head_bias", "transpose_head", "logit_softcap")
    if reason:
        return reason

    def cross_entropy(inputs: Any) -> Mapping[str, Any]:
        loss, lse = _losses(call, inputs, inputs.x if inputs.head is None else _products(call, inputs, jnp.float32))
        return {"loss": loss, "lse": lse}

    return cross_entropy


def _linear_cross_entropy(call: Any, inputs: Any) -> Function | str:
    """As most training code has it: logits in the dtype of the hidden states, which costs less memory and less time."""
    reason = beyond(call, "x", "targets", "head", "head_bias", "transpose_head", "logit_softcap")
    if reason or call.head.shape[0] != 1:
        return reason or "takes one head for the whole batch"
    return lambda inputs: {
        "total": jnp.sum(_losses(call, inputs, _products(call, inputs, None))[0], axis=tuple(range(1, len(call.targets.shape))))
    }


def _products(call: Any, inputs: Any, dtype: Any) -> Any:
    head = inputs.head[0].T if call.transpose_head else inputs.head[0]
    return jnp.matmul(inputs.x, head, preferred_element_type=dtype)


def _losses(call: Any, inputs: Any, logits: Any) -> tuple[Any, Any]:
    if inputs.head_bias is not None:
        logits = logits + per_row(inputs.head_bias, logits.ndim)
    logits = logits.astype(jnp.float32)
    if call.logit_softcap is not None:
        logits = call.logit_softcap * jnp.tanh(logits / call.logit_softcap)
    counts = inputs.targets >= 0
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(inputs.targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(counts, lse - chosen, 0.0), jnp.where(counts, lse, 0.0)


def _mean_pooling(call: Any, inputs: Any) -> Function | str:
    return beyond(call, "x") or (
        lambda inputs: {"out": jnp.mean(inputs.x, axis=1, keepdims=True, dtype=jnp.float32).astype(inputs.x.dtype)}
    )


def _causal_conv1d(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "weight", "bias", "activation")
    if reason:
        return reason

    def convolution(inputs: Any) -> Mapping[str, Any]:
        out = jax.lax.conv_general_dilated(
            inputs.x,
            inputs.weight[0].T[:, None],
            window_strides=(1,),
            padding=[(call.width - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=inputs.x.shape[2],
        )
        out = out if inputs.bias is None else out + inputs.bias[:, None]
        return {"out": out if call.activation is None else jax.nn.silu(out)}

    return convolution


def _gated_linear_unit(call: Any, inputs: Any) -> Function | str:
    """In the arrays' own dtype."""
    if (call.alpha, call.limit, call.up_offset) != (1.0, None, 0.0):
        return "has alpha, limit or up_offset"
    activations = {"silu": jax.nn.silu, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid}
    for name in ("gelu", "gelu_tanh"):
        activations[name] = functools.partial(jax.nn.gelu, approximate=name == "gelu_tanh")

    def unit(inputs: Any) -> Mapping[str, Any]:
        gate, up = jnp.split(inputs.gate, 2, axis=-1) if inputs.up is None else inputs
        return {"out": activations[call.activation](gate) * up}

    return unit


def _scaled_matmul(call: Any, inputs: Any) -> Function:
    """The plain product in bfloat16, which holds what is stored."""

    def product(inputs: Any) -> Mapping[str, Any]:
        lhs, rhs = inputs.lhs.astype(jnp.bfloat16), inputs.rhs.astype(jnp.bfloat16)
        rhs = jnp.swapaxes(rhs, 1, 2) if call.transpose_rhs else rhs
        out = jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32)
        lhs_scale, rhs_scale = inputs.lhs_scale.astype(jnp.float32), inputs.rhs_scale.astype(jnp.float32)
        return {"out": (out * lhs_scale[:, :, None] * rhs_scale[:, None, :]).astype(call.out_dtype)}

    return product


def _moe_route(call: Any, inputs: Any) -> Function | str:
    if call.scoring != "softmax" or call.bias is not None or call.num_groups > 1:
        return "written out for softmax without bias and groups only"

    def route(inputs: Any) -> Mapping[str, Any]:
        scores = jax.nn.softmax(inputs.logits.astype(jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(scores, call.k)
        if call.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return {"weights": call.scale * weights, "experts": experts}

    return route


def _moe_permute(call: Any, inputs: Any) -> Function:
    """Every copy has an expert."""

    def permute(inputs: Any) -> Mapping[str, Any]:
        experts = inputs.experts[0].reshape(-1)
        order = jnp.argsort(experts, stable=True)
        return {
            "rows": inputs.x[0][order // call.experts.shape[2]][None],
            "group_sizes": jnp.bincount(experts, length=call.num_experts).astype(jnp.int32)[None],
            "positions": jnp.argsort(order).astype(jnp.int32).reshape(call.experts.shape),
        }

    return permute


def _moe_unpermute(call: Any, inputs: Any) -> Function:
    """Every copy has a row."""

    def unpermute(inputs: Any) -> Mapping[str, Any]:
        parts = inputs.rows[0][inputs.positions[0]].astype(jnp.float32)
        if inputs.weights is not None:
            parts = parts * inputs.weights[0].astype(jnp.float32)[:, :, None]
        return {"out": jnp.sum(parts, axis=1).astype(inputs.rows.dtype)[None]}

    return unpermute


PEERS = (
    Peer(
        "jax",
        {
            "rms_norm": _rms_norm,
            "add_rms_norm": _add_rms_norm,
            "layer_norm": _layer_norm,
            "softmax": _softmax,
            "rope": _rope,
            "qk_norm_rope": _qk_norm_rope,
            "cross_entropy": _cross_entropy,
            "linear_cross_entropy": _linear_cross_entropy,
            "mean_pooling": _mean_pooling,
            "causal_conv1d": _causal_conv1d,
            "gated_linear_unit": _gated_linear_unit,
            "scaled_matmul": _scaled_matmul,
            "moe_route": _moe_route,
            "moe_permute": _moe_permute,
            "moe_unpermute": _moe_unpermute,
        },
    ),
)
