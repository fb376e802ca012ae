"""Feed-forward layers: dense, and mixtures of experts."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel_train.config import ModelConfig
from ejkernel_train.parts import Context, Linear, matrix
from ejkernel_train.sharding import BATCH


class SwiGLU(eqx.Module):
    """The dense feed-forward layer."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.gate = Linear(keys[0], config.width, config.hidden, config.float8)
        self.up = Linear(keys[1], config.width, config.hidden, config.float8)
        self.down = Linear(keys[2], config.hidden, config.width, config.float8)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The result, and no loss of balance."""
        return context.operations.feed_forward(x, self.gate, self.up, self.down, context), jnp.zeros(())


class Experts(eqx.Module):
    """A mixture of SwiGLU experts: each token goes to its `experts_per_token` likeliest.

    Tokens are sorted by expert, so that every expert multiplies consecutive rows.
    """

    router: Linear
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        experts, width, hidden = config.experts, config.width, config.hidden
        self.router = Linear(keys[0], width, experts)
        self.gate = matrix(keys[1], width, experts, width, hidden)
        self.up = matrix(keys[2], width, experts, width, hidden)
        self.down = matrix(keys[3], hidden, experts, hidden, width)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The result, and the loss of balance: smallest where every expert gets as many tokens (Fedus et al., 2021).

        On a mesh each device has some of the experts, and a part of their hidden channels: it routes the tokens of all devices
        along "expert", and they sum what their experts made. No token is dropped, however many choose the same expert.
        """
        hidden = P("expert", None, "tensor")
        specs = P(BATCH), P(BATCH), P(), hidden, hidden, P("expert", "tensor")
        mix = context.layout.on_each_device(partial(self.mix, context), specs, (P(BATCH), P()))
        return mix(x, context.documents, self.router, self.gate, self.up, self.down)

    def mix(
        self,
        context: Context,
        x: jax.Array,
        documents: jax.Array | None,
        router: Linear,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Of one device's tokens `[B, T, d]`. What stands after the last document of a row goes to no expert."""
        operations, layout, experts, held = context.operations, context.layout, self.config.experts, len(gate)
        tokens = layout.of_all_expert_devices(x.reshape(-1, x.shape[-1]))
        logits = router(tokens, context)
        weights, chosen = operations.moe_route(logits, self.config.experts_per_token)
        likely, number = jax.nn.softmax(logits.astype(jnp.float32), axis=-1), jnp.float32(len(tokens))
        if documents is not None:
            real = layout.of_all_expert_devices(documents.reshape(-1, 1)) >= 0
            chosen, likely, number = jnp.where(real, chosen, -1), jnp.where(real, likely, 0), jnp.sum(real, dtype=jnp.float32)
        rows, sizes, positions = operations.moe_permute(tokens, layout.held_here(chosen, held), held)
        gated = operations.swiglu(*(operations.grouped_matmul(rows, matrices, sizes) for matrices in (gate, up)))
        out = operations.moe_unpermute(operations.grouped_matmul(gated, down, sizes), positions, weights)

        sizes = layout.of_all_expert_devices(sizes).astype(jnp.float32)
        sizes, likely, number = layout.mean_over_batch((sizes, jnp.sum(likely, axis=0), number))
        pairs = jnp.sum(sizes * likely) / self.config.experts_per_token
        imbalance = self.config.balance * experts * pairs / jnp.square(jnp.maximum(number, 1))
        return layout.sum_over_experts(layout.sum_over_tensor(out)).reshape(x.shape), imbalance
