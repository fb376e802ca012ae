"""A top-k chooses; gradients reach the logits by comparing indices, without a scatter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.common.ranking import largest
from ejkernel.operations.moe_route.interface import TINY, MoeRouteCall, MoeRouteInputs, MoeRouteOutputs
from ejkernel.utils.dtypes import accumulator


def forward(call: MoeRouteCall, inputs: MoeRouteInputs, config: None) -> MoeRouteOutputs:
    logits = inputs.logits.astype(accumulator(inputs.logits.dtype))
    best, experts = largest(_rank(call, logits, inputs.bias), call.k)
    taken = best != -jnp.inf
    if call.scoring == "softmax" and not call.normalize:
        weights = _gather(_softmax(logits), experts)
    else:
        chosen = jnp.where(taken, _gather(logits, experts), -jnp.inf)
        weights = _softmax(chosen) if call.scoring == "softmax" else jax.nn.sigmoid(chosen)
    weights = jnp.where(taken, weights, 0)
    if call.scoring == "sigmoid" and call.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + TINY)
    return MoeRouteOutputs(call.scale * weights, jnp.where(taken, experts, -1))


def backward(
    call: MoeRouteCall, inputs: MoeRouteInputs, outputs: MoeRouteOutputs, cotangents: MoeRouteOutputs, config: None
) -> MoeRouteInputs:
    experts, dtype = outputs.experts, inputs.logits.dtype
    logits, taken = inputs.logits.astype(accumulator(dtype)), experts >= 0
    grad = jnp.where(taken, call.scale * cotangents.weights.astype(logits.dtype), 0)
    if call.scoring == "softmax" and not call.normalize:
        scores = _softmax(logits)
        total = jnp.sum(_gather(scores, experts) * grad, axis=-1, keepdims=True)
        d_logits = jnp.where(jnp.any(taken, axis=-1, keepdims=True), scores * (_placed(grad, experts, logits) - total), 0)
        return MoeRouteInputs(d_logits.astype(dtype))
    chosen = jnp.where(taken, _gather(logits, experts), -jnp.inf)
    if call.scoring == "softmax":
        scores = _softmax(chosen)
        d_chosen = scores * (grad - jnp.sum(scores * grad, axis=-1, keepdims=True))
    else:
        scores = jax.nn.sigmoid(chosen)
        if call.normalize:
            total = jnp.sum(scores, axis=-1, keepdims=True) + TINY
            grad = (grad - jnp.sum(grad * (scores / total), axis=-1, keepdims=True)) / total
        d_chosen = grad * scores * (1 - scores)
    return MoeRouteInputs(_placed(d_chosen, experts, logits).astype(dtype))


def _rank(call: MoeRouteCall, logits: Any, bias: Any) -> Any:
    """What is compared, `[b, t, e]`: -inf for experts that cannot be chosen."""
    rank = worth = logits
    if bias is not None or (call.scoring == "sigmoid" and call.num_groups > 1):
        worth = _softmax(logits) if call.scoring == "softmax" else jax.nn.sigmoid(logits)
        if bias is not None:
            worth = worth + bias.astype(worth.dtype)[:, None]
        worth = jnp.where(logits == -jnp.inf, -jnp.inf, _above_all(worth))
        rank = rank if bias is None else worth
    rank = _above_all(rank)
    if call.num_groups == 1:
        return rank
    groups = (worth if call.scoring == "sigmoid" else rank).reshape(*logits.shape[:2], call.num_groups, -1)
    best = largest(groups, min(2, groups.shape[-1]))[0]
    value = best[..., 0]
    if call.scoring == "sigmoid" and groups.shape[-1] > 1:
        value = value + jnp.where(best[..., 1] == -jnp.inf, 0, best[..., 1])
    admitted = largest(value, call.top_groups)[1]
    admitted = jnp.any(_at(admitted, call.num_groups), axis=-2)
    return jnp.where(jnp.repeat(admitted, groups.shape[-1], axis=-1), rank, -jnp.inf)


def _above_all(values: Any) -> Any:
    return jnp.where(jnp.isnan(values), jnp.inf, values)


def _softmax(logits: Any) -> Any:
    """Over the last axis; 0 where all are -inf."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1, total)


def _gather(values: Any, experts: Any) -> Any:
    return jnp.take_along_axis(values, jnp.maximum(experts, 0), axis=-1)


def _placed(values: Any, experts: Any, like: Any) -> Any:
    """`[b, t, e]`: each value at its expert, elsewhere 0."""
    return jnp.sum(jnp.where(_at(experts, like.shape[-1]), values[..., None], 0), axis=-2)


def _at(indices: Any, count: int) -> Any:
    """`[b, t, k, count]`: which place each index names."""
    return indices[..., None] == jnp.arange(count, dtype=indices.dtype)[None, None, None]
