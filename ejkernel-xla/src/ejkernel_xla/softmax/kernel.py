"""Softmax over the last axis, in float32 inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.operations.softmax.interface import SoftmaxCall, SoftmaxInputs, SoftmaxOutputs
from ejkernel.utils.dtypes import accumulator


def forward(call: SoftmaxCall, inputs: SoftmaxInputs, config: None) -> SoftmaxOutputs:
    x, where = inputs
    logits = x.astype(accumulator(x.dtype))
    if call.scale != 1:
        scaled = logits * call.scale
        logits = scaled if call.scale > 0 else jnp.where(logits == -jnp.inf, logits, scaled)
    if where is not None:
        logits = jnp.where(where, logits, -jnp.inf)
    # Starting from the lowest finite value keeps rows of -inf from becoming NaN; their total is 0, any other is at least 1.
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(logits.dtype).min)
    weights = jnp.exp(logits - jax.lax.stop_gradient(largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return SoftmaxOutputs((weights / jnp.maximum(total, 0.5)).astype(x.dtype))


def backward(
    call: SoftmaxCall, inputs: SoftmaxInputs, outputs: SoftmaxOutputs, cotangents: SoftmaxOutputs, config: None
) -> SoftmaxInputs:
    out = outputs.out.astype(accumulator(inputs.x.dtype))
    grad = cotangents.out.astype(out.dtype)
    if inputs.where is not None:
        grad = jnp.where(inputs.where, grad, 0)
    d_x = out * (grad - jnp.sum(out * grad, axis=-1, keepdims=True))
    return SoftmaxInputs((d_x if call.scale == 1 else d_x * call.scale).astype(inputs.x.dtype))
