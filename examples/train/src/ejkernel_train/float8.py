"""Linear layers whose three products are of float8: e4m3 forward, e5m2 for cotangents, one scale for each array.

Scales are delayed (Micikevicius et al., FP8 Formats for Deep Learning, 2022): an array is cast with a scale from the largest
values of earlier steps, so the cast needs no pass of its own before it. The step's own largest values leave the backward in the
place of the scales' gradients, and `next_scales` makes the next step's scales of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Float8(NamedTuple):
    """What a layer calls: `scaled_matmul` and `quantize_float8` of `plain.py`, or in their place."""

    multiply: Callable[..., jax.Array]
    quantize: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(operations: Float8, x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """`x [M, K] @ weight [K, N]` in the dtype of x, with scales `[3]`."""
    return _forward(operations, x, weight, scales)[0]


def _forward(operations: Float8, x: jax.Array, weight: jax.Array, scales: jax.Array) -> tuple[jax.Array, Any]:
    rows, columns, largest_x = operations.quantize(x, scales[0], E4M3)
    narrow, transposed, largest_weight = operations.quantize(weight, scales[1], E4M3)
    out = operations.multiply(rows, transposed, scales[0], scales[1], transpose_rhs=True, dtype=x.dtype)
    return out, (columns, narrow, scales, largest_x, largest_weight)


def _backward(operations: Float8, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each product sums along the last axis of both sides, as float8 units read them."""
    columns, weight, scales, largest_x, largest_weight = saved
    rows, transposed, largest = operations.quantize(cotangent, scales[2], E5M2)
    d_x = operations.multiply(rows, weight, scales[2], scales[1], transpose_rhs=True, dtype=cotangent.dtype)
    d_weight = operations.multiply(columns, transposed, scales[0], scales[2], transpose_rhs=True, dtype=cotangent.dtype)
    return d_x, d_weight, jnp.stack([largest_x, largest_weight, largest])


linear.defvjp(_forward, _backward)
