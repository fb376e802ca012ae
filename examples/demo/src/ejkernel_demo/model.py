"""A byte-level transformer in plain JAX, whose attention, norms and rotary embedding are passed in.

Pre-norm blocks with grouped-query attention and a SwiGLU layer, as in Llama, with tied embeddings; small enough for a laptop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_demo.data import VOCABULARY

Parameters = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model; every parameter of a block is stacked over the layers."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    hidden: int = 320
    length: int = 128

    @property
    def head_size(self) -> int:
        return self.width // self.heads


class Primitives(NamedTuple):
    """The three operations that the comparison exchanges.

    Attributes:
        attention: causal, `q [B,T,H,D], k [B,T,K,D], v [B,T,K,D] -> [B,T,H,D]`.
        norm: `x [..., d], scale [d] -> [..., d]`.
        rotate: `q, k -> q, k` with positions 0, 1, ... along axis 1.
    """

    attention: Callable[..., jax.Array]
    norm: Callable[..., jax.Array]
    rotate: Callable[..., tuple[jax.Array, jax.Array]]


def initialise(shape: Shape, seed: int) -> dict[str, jax.Array]:
    """Parameters in float32, drawn with NumPy so that every machine starts from the same ones."""
    rng = np.random.default_rng(seed)
    layers, width, key_width = shape.layers, shape.width, shape.key_heads * shape.head_size

    def normal(*size: int, fan_in: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size) / np.sqrt(fan_in), jnp.float32)

    shrink = 2 * layers  # residual branches start small
    return {
        "embedding": normal(VOCABULARY, width, fan_in=4 * width),
        "query": normal(layers, width, width, fan_in=width),
        "key": normal(layers, width, key_width, fan_in=width),
        "value": normal(layers, width, key_width, fan_in=width),
        "output": normal(layers, width, width, fan_in=width * shrink),
        "gate": normal(layers, width, shape.hidden, fan_in=width),
        "up": normal(layers, width, shape.hidden, fan_in=width),
        "down": normal(layers, shape.hidden, width, fan_in=shape.hidden * shrink),
        "attention_norm": jnp.ones((layers, width)),
        "feed_forward_norm": jnp.ones((layers, width)),
        "final_norm": jnp.ones(width),
    }


def logits(parameters: Parameters, tokens: jax.Array, shape: Shape, primitives: Primitives) -> jax.Array:
    """Scores of the next byte: tokens `[B, T]` -> `[B, T, 256]`."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return primitives.attention(*primitives.rotate(query, key), value)

    def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return block(x, layer, shape, primitives.norm, attend), None

    x, _ = jax.lax.scan(step, parameters["embedding"][tokens], stacked(parameters))
    return primitives.norm(x, parameters["final_norm"]) @ parameters["embedding"].T


def stacked(parameters: Parameters) -> dict[str, jax.Array]:
    """The parameters that every block has its own of, `[layers, ...]`."""
    return {name: value for name, value in parameters.items() if name not in ("embedding", "final_norm")}


def block(
    x: jax.Array, layer: Parameters, shape: Shape, norm: Callable[..., jax.Array], attend: Callable[..., jax.Array]
) -> jax.Array:
    """One block on `x [B, T, width]`; `attend(query, key, value)` rotates by position and attends."""
    batch, length, width = x.shape
    h = norm(x, layer["attention_norm"])
    query = (h @ layer["query"]).reshape(batch, length, shape.heads, shape.head_size)
    key = (h @ layer["key"]).reshape(batch, length, shape.key_heads, shape.head_size)
    value = (h @ layer["value"]).reshape(batch, length, shape.key_heads, shape.head_size)
    x = x + attend(query, key, value).reshape(batch, length, width) @ layer["output"]
    h = norm(x, layer["feed_forward_norm"])
    return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


def loss(parameters: Parameters, window: jax.Array, shape: Shape, primitives: Primitives) -> jax.Array:
    """Mean cross entropy in nats per byte over windows `[B, T + 1]`."""
    scores = jax.nn.log_softmax(logits(parameters, window[:, :-1], shape, primitives))
    return -jnp.mean(jnp.take_along_axis(scores, window[:, 1:, None], axis=-1))
