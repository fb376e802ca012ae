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


class Narrow(NamedTuple):
    """A weight `[K, N]` in float8, the same as `[N, K]`, its largest magnitude, and the three scales, each one number."""

    values: jax.Array
    transposed: jax.Array
    largest: jax.Array
    scales: tuple[jax.Array, jax.Array, jax.Array]


def narrow(operations: Float8, weight: jax.Array, scales: jax.Array) -> Narrow:
    """With scales `[3]`."""
    return Narrow(*operations.quantize(weight, scales[1], E4M3), (scales[0], scales[1], scales[2]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linears(
    operations: Float8,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    narrows: tuple[Narrow | None, ...],
) -> tuple[jax.Array, ...]:
    """`x [M, K] @ weight [K, N]` for each weight, in the dtype of x, with scales `[3]` of each.

    x is quantized once: what always reads the same x has the same scale of inputs, and the first one's is used. Weights are
    quantized here where `narrows` has None.
    """
    return _forward(operations, x, weights, scales, narrows)[0]


def _forward(operations: Float8, x: jax.Array, weights: Any, scales: Any, narrows: Any) -> tuple[tuple[jax.Array, ...], Any]:
    pairs = zip(weights, scales, narrows, strict=True)
    found = [narrow(operations, weight, own) if given is None else given for weight, own, given in pairs]
    scale = found[0].scales[0]
    rows, columns, largest = operations.quantize(x, scale, E4M3)
    out = tuple(
        operations.multiply(rows, weight.transposed, scale, weight.scales[1], transpose_rhs=True, dtype=x.dtype)
        for weight in found
    )
    dtypes = [jnp.zeros(0, weight.dtype) for weight in weights]
    return out, (columns, scale, largest, [(weight.values, weight.largest, weight.scales) for weight in found], dtypes)


def _backward(operations: Float8, saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Each product sums along the last axis of both sides, as float8 units read them."""
    columns, scale_x, largest_x, weights, dtypes = saved
    d_x, d_weights, found = None, [], []
    multiply = functools.partial(operations.multiply, transpose_rhs=True)
    for cotangent, (weight, largest_weight, (_, scale_weight, scale)), empty in zip(cotangents, weights, dtypes, strict=True):
        rows, transposed, largest = operations.quantize(cotangent, scale, E5M2)
        product = multiply(rows, weight, scale, scale_weight, dtype=cotangent.dtype)
        d_x = product if d_x is None else product + d_x  # in this order XLA adds within the product
        d_weights.append(multiply(columns, transposed, scale_x, scale, dtype=empty.dtype))
        found.append(jnp.stack([largest_x, largest_weight, largest]))
    return d_x, tuple(d_weights), tuple(found), None


linears.defvjp(_forward, _backward)
