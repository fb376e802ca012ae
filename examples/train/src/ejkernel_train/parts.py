"""What blocks are made of: what they share, and linear layers. What is computed between the products comes from `operations.py`.

Shapes: B batch, T tokens, d width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel_train import plain
from ejkernel_train.float8 import Float8, Narrow, initial_scales, linears
from ejkernel_train.operations import Operations
from ejkernel_train.sharding import Layout

Arrays: TypeAlias = tuple[jax.Array, ...]


class Context(NamedTuple):
    """What all blocks share: the operations, the mesh, cosine and sine of every position `[T, D / 2]`, and of packed rows
    which document each token is of, `[B, T]`; then cosine and sine are `[B, T, D / 2]`."""

    operations: Operations
    layout: Layout
    cos: jax.Array
    sin: jax.Array
    documents: jax.Array | None = None

    @property
    def float8(self) -> Float8:
        """On a mesh XLA quantizes: a scale is that of an array that devices share."""
        operations = self.operations
        quantize = operations.quantize_float8 if self.layout.mesh is None else plain.quantize_float8
        return Float8(operations.scaled_matmul, quantize)

    def project(self, x: jax.Array, *layers: Linear) -> Arrays:
        """x through each of some layers, all in float8 or none: then they share one quantized x."""
        if not isinstance(layers[0], Linear) or layers[0].scales is None:  # or what reads its rows of joint weights
            return tuple(layer(x, self) for layer in layers)
        weights, scales, narrows = zip(*((layer.weight, layer.scales, layer.narrow) for layer in layers), strict=True)
        rows: Any = linears(self.float8, x.reshape(-1, x.shape[-1]), weights, scales, narrows)
        shaped = (each.reshape(*x.shape[:-1], -1) for each in rows)
        return tuple(plus(each, layer.bias) for each, layer in zip(shaped, layers, strict=True))

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None = None, window: int = 0
    ) -> jax.Array:
        borders = () if self.documents is None else (self.documents,)
        others: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        return self.operations.attention(query, key, value, *borders, **others, **({"window": window} if window else {}))


def matrix(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / fan_in**0.5


def heads(x: jax.Array, number: int) -> jax.Array:
    """`[B, T, number * D] -> [B, T, number, D]`."""
    return x.reshape(*x.shape[:2], number, -1)


def plus(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Added in float32."""
    return x if bias is None else (x + bias).astype(x.dtype)


class Linear(eqx.Module):
    """`x @ weight + bias`, weight `[inputs, outputs]`; in float8 where there are scales.

    Attributes:
        bias: None for none.
        narrow: the weight in float8; None: it is quantized anew wherever it is used.
    """

    weight: jax.Array
    bias: jax.Array | None
    scales: jax.Array | None
    narrow: Narrow | None

    def __init__(self, key: jax.Array, inputs: int, outputs: int, float8: bool = False, bias: bool = False) -> None:
        self.weight = matrix(key, inputs, inputs, outputs)
        self.bias = jnp.zeros(outputs) if bias else None
        self.scales = initial_scales(self.weight) if float8 else None
        self.narrow = None

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return plus(x @ self.weight, self.bias) if self.scales is None else context.project(x, self)[0]
