"""The model's operations in plain JAX, written as XLA runs them best. `fast.py` has the same functions by ejkernel.

Products have the dtype of their operands; norms, softmax and states are float32 inside. B batch, T tokens, d channels; H and K
query and key heads of D channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

EPSILON = 1e-6
FLOAT32 = jnp.float32


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x [..., d], scale [d] -> [..., d]`."""
    wide = x.astype(FLOAT32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (normed * scale).astype(x.dtype)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of `x + residual`, and that sum."""
    total = x + residual
    return rms_norm(total, scale), total


def rope(query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]`, turned by the angles `[T, D / 2]` of their positions."""

    def turn(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(FLOAT32), 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)

    return turn(query), turn(key)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal: `[B, T, H, D], [B, T, K, D], [B, T, K, D] -> [B, T, H, D]`."""
    cudnn = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn" if cudnn else "xla")


def cross_entropy(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over tokens of `hidden [B, T, d]`, `head [V, d]`, `labels [B, T]`."""

    @jax.checkpoint  # the backward reads the logits again instead of float32 weights, twice their size
    def mean(logits: jax.Array) -> jax.Array:
        wide = logits.astype(FLOAT32)
        chosen = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 2) == labels[..., None]  # fuses, unlike a gather's gradient
        return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - jnp.sum(jnp.where(chosen, wide, 0), axis=-1))

    return mean(jnp.einsum("btd,vd->btv", hidden, head))
