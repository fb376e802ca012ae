"""The models' parts in Equinox. What is computed between the products comes from `operations.py`.

Shapes: B batch, T tokens, d width. Parameters of blocks have a leading axis, the repeats of the pattern, and `lax.scan` runs
over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel_train.config import ModelConfig
from ejkernel_train.operations import Operations


class Context(NamedTuple):
    """What all blocks share: the operations, and cosine and sine of every position `[T, D / 2]`."""

    operations: Operations
    cos: jax.Array
    sin: jax.Array


def matrix(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / fan_in**0.5


def heads(x: jax.Array, number: int) -> jax.Array:
    """`[B, T, number * D] -> [B, T, number, D]`."""
    return x.reshape(*x.shape[:2], number, -1)


class Linear(eqx.Module):
    """`x @ weight`, weight `[inputs, outputs]`."""

    weight: jax.Array

    def __init__(self, key: jax.Array, inputs: int, outputs: int) -> None:
        self.weight = matrix(key, inputs, inputs, outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


class Attention(eqx.Module):
    """Causal attention with grouped key heads and rotary positions, as in Llama."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        inner, shared = config.heads * config.head_size, config.key_heads * config.head_size
        self.query = Linear(keys[0], config.width, inner)
        self.key = Linear(keys[1], config.width, shared)
        self.value = Linear(keys[2], config.width, shared)
        self.output = Linear(keys[3], inner, config.width)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        query, key = heads(self.query(x), self.config.heads), heads(self.key(x), self.config.key_heads)
        query, key = context.operations.rope(query, key, context.cos, context.sin)
        attended = context.operations.attention(query, key, heads(self.value(x), self.config.key_heads))
        return self.output(attended.reshape(*x.shape[:2], -1))


class SwiGLU(eqx.Module):
    """The dense feed-forward layer."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.gate = Linear(keys[0], config.width, config.hidden)
        self.up = Linear(keys[1], config.width, config.hidden)
        self.down = Linear(keys[2], config.hidden, config.width)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The result, and no loss of balance."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x)), jnp.zeros(())


MIXERS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {"attention": Attention}


class Block(eqx.Module):
    """A token mixer and, if the config has one, a feed-forward layer, each behind a norm and added to the stream."""

    mixer_norm: jax.Array
    mixer: Any
    feed_forward_norm: jax.Array | None
    feed_forward: Any

    def __init__(self, config: ModelConfig, mixer: str, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.mixer_norm = jnp.ones(config.width)
        self.mixer = MIXERS[mixer](config, first)
        self.feed_forward_norm = jnp.ones(config.width) if config.hidden else None
        self.feed_forward = SwiGLU(config, second) if config.hidden else None

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The stream `[B, T, d]` after this block, and its loss of balance."""
        mixed = self.mixer(context.operations.rms_norm(x, self.mixer_norm), context)
        if self.feed_forward is None:
            return x + mixed, jnp.zeros(())
        normed, x = context.operations.add_rms_norm(mixed, x, self.feed_forward_norm)
        out, imbalance = self.feed_forward(normed, context)
        return x + out, imbalance


REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda function: function,
    "dots": lambda function: jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


class Model(eqx.Module):
    """Embedding, blocks, norm, and the embedding again as head.

    Attributes:
        blocks: one for each place of the pattern, its parameters stacked over the repeats.
    """

    embedding: jax.Array
    blocks: tuple[Block, ...]
    norm: jax.Array
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        first, *others = jax.random.split(key, 1 + len(config.pattern))

        def stacked(mixer: str, key: jax.Array) -> Block:
            return jax.vmap(lambda key: Block(config, mixer, key))(jax.random.split(key, config.repeats))

        self.embedding = matrix(first, config.width, config.vocabulary, config.width)
        self.blocks = tuple(stacked(mixer, key) for mixer, key in zip(config.pattern, others, strict=True))
        self.norm = jnp.ones(config.width)
        self.config = config

    def hidden(
        self, tokens: jax.Array, operations: Operations, dtype: str, remat: str = "none", unroll: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """States that the head reads: tokens `[B, T]` -> `[B, T, d]`; and the sum of the blocks' losses of balance."""
        context = Context(operations, *rotary(tokens.shape[1], self.config.head_size))

        def repeat(carry: tuple[jax.Array, jax.Array], blocks: tuple[Block, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, total = carry
            for block in blocks:
                x, imbalance = block(x, context)
                total += imbalance
            return (x, total), None

        start = self.embedding[tokens].astype(dtype), jnp.zeros(())
        unrolled = self.config.repeats if unroll else 1
        (x, total), _ = jax.lax.scan(REMAT[remat](repeat), start, compute_copy(self.blocks, dtype), unroll=unrolled)
        return operations.rms_norm(x, self.norm), total

    def loss(self, window: jax.Array, operations: Operations, dtype: str, **options: Any) -> jax.Array:
        """Mean cross entropy in nats per token over windows `[B, T + 1]`, with the losses of balance."""
        hidden, imbalance = self.hidden(window[:, :-1], operations, dtype, **options)
        # the lookup's gradient is summed in float32, so only the head's copy of the embedding is narrow
        return operations.cross_entropy(hidden, self.embedding.astype(dtype), window[:, 1:]) + imbalance


def compute_copy(blocks: tuple[Block, ...], dtype: str) -> tuple[Block, ...]:
    """Stacked blocks with matrices in `dtype`; vectors (norms, decays) cost nothing and stay in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 2 else leaf, blocks)


def rotary(length: int, size: int, base: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[length, size / 2]` of each position times `base^(-2i / size)`."""
    periods = base ** (-jnp.arange(0, size, 2) / max(size, 1))
    angles = jnp.arange(length)[:, None] * periods
    return jnp.cos(angles), jnp.sin(angles)
