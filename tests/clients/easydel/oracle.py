"""Attention in a dozen lines of `jax.numpy`, in the place where EasyDeL's vanilla mechanism calls `ejkernel.modules.attention`.

It shares no code with ejkernel's kernels, so that a mistake common to all of these would show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    dropout_rng: Any,
    softmax_aux: Any,
    *,
    mask_info: Any,
    sliding_window: Any,
    softmax_scale: Any,
    causal: bool,
    logits_soft_cap: Any,
    **rest: Any,
) -> tuple[Any, Any]:
    """`softmax(mask(cap(scale q.k))) v` in float32, with sinks in the denominator."""
    del dropout_rng, rest
    batch, queries, heads, size = query.shape
    keys, groups = key.shape[1], heads // key.shape[2]
    q, k, v = (array.astype(jnp.float32) for array in (query, jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)))
    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * (softmax_scale or size**-0.5)
    logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap) if logits_soft_cap else logits
    logits = logits if bias is None else logits + bias
    visible = jnp.ones((batch, 1, queries, keys), bool)
    if mask_info is not None:
        visible &= mask_info.attention_mask.astype(bool)
    ahead = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    visible &= (ahead <= 0) if causal else True
    if sliding_window is not None:
        left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
        visible &= (ahead >= -left) & (ahead <= right)
    weights = jnp.where(visible, jnp.exp(logits - jax.lax.stop_gradient(logits).max(-1, keepdims=True)), 0.0)
    denominator = weights.sum(-1, keepdims=True)
    if softmax_aux is not None:
        sinks = softmax_aux.astype(jnp.float32).reshape(softmax_aux.shape[0], -1)
        sinks = jnp.broadcast_to(sinks, (heads, sinks.shape[1]))[None, :, None, :]
        denominator += jnp.exp(sinks - jax.lax.stop_gradient(logits).max(-1, keepdims=True)).sum(-1, keepdims=True)
    weights = weights / jnp.where(denominator > 0, denominator, 1.0)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest").astype(query.dtype), weights


@contextlib.contextmanager
def in_place_of_vanilla() -> Generator[None]:
    """Let EasyDeL's vanilla mechanism call the function above."""
    from easydel.operations.kernels import vanilla_attention

    before = vanilla_attention.attention
    vanilla_attention.attention = attention
    try:
        yield
    finally:
        vanilla_attention.attention = before
