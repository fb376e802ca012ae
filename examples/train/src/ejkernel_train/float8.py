"""Linear layers whose three products are of float8: e4m3 forward, e5m2 for cotangents, one scale for each array.

Scales are delayed (Micikevicius et al., FP8 Formats for Deep Learning, 2022): an array is cast with a scale from the largest
values of earlier steps, so the cast needs no pass of its own before it. The step's own largest values leave the backward in the
place of the scales' gradients, and `next_scales` makes the next step's scales of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MOST = (float(jnp.finfo(E4M3).max), float(jnp.finfo(E4M3).max), float(jnp.finfo(E5M2).max))
"""The largest numbers of inputs, weights and cotangents."""

FORGET = 0.9
"""A step's share of what was the largest before, so that one small batch does not make the next overflow."""


def initial_scales(weight: jax.Array) -> jax.Array:
    """`[3]` of inputs, weights and cotangents: normed inputs stay below 8; cotangents of a mean over tokens below 0.05."""
    return jnp.stack([jnp.float32(8), jnp.max(jnp.abs(weight)), jnp.float32(0.05)]) / jnp.array(MOST)


def next_scales(scales: jax.Array, largest: jax.Array) -> jax.Array:
    """Of a step's scales and largest values, `[..., 3]` each."""
    return jnp.maximum(FORGET * scales, largest / jnp.array(MOST))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(multiply: Callable[..., jax.Array], x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """`x [M, K] @ weight [K, N]` in the dtype of x, by `multiply` (`scaled_matmul` of `plain.py`) and scales `[3]`."""
    return _forward(multiply, x, weight, scales)[0]


def _cast(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(values.astype(jnp.float32) / scale, -most, most).astype(dtype)


def _largest(values: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(values)).astype(jnp.float32)


def _forward(multiply: Callable[..., jax.Array], x: jax.Array, weight: jax.Array, scales: jax.Array) -> tuple[jax.Array, Any]:
    narrow_x, narrow_weight = _cast(x, scales[0], E4M3), _cast(weight, scales[1], E4M3)
    out = multiply(narrow_x, narrow_weight, scales[0], scales[1], dtype=x.dtype)
    return out, (narrow_x, narrow_weight, scales, _largest(x), _largest(weight))


def _backward(multiply: Callable[..., jax.Array], saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, weight, scales, largest_x, largest_weight = saved
    narrow = _cast(cotangent, scales[2], E5M2)
    d_x = multiply(narrow, weight, scales[2], scales[1], transpose_rhs=True, dtype=cotangent.dtype)
    d_weight = multiply(x.T, narrow, scales[0], scales[2], dtype=cotangent.dtype)
    return d_x, d_weight, jnp.stack([largest_x, largest_weight, _largest(cotangent)])


linear.defvjp(_forward, _backward)
