"""The model's operations by ejkernel, which picks the best installed kernel. `plain.py` has the same functions in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel_train.plain import EPSILON


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return ejkernel.rms_norm(x, scale, epsilon=EPSILON)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ejkernel.fused_add_rms_norm(x, residual, scale, epsilon=EPSILON)


def rope(query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ejkernel.llama_rope(query, key, cos, sin)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return ejkernel.flash_attention(query, key, value, causal=True)


def cross_entropy(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    # from logits: on a GPU faster than with the head, which saves their memory instead
    return ejkernel.fused_cross_entropy(jnp.einsum("btd,vd->btv", hidden, head), labels).loss
