"""Feed-forward layers: dense, and mixtures of experts."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel_train.config import ModelConfig
from ejkernel_train.parts import Arrays, Context, Linear, matrix
from ejkernel_train.sharding import BATCH


class SwiGLU(eqx.Module):
    """The dense feed-forward layer."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: ModelConfig, key: jax.Array, hidden: int) -> None:
        keys = jax.random.split(key, 3)
        self.gate = Linear(keys[0], config.width, hidden, config.float8)
        self.up = Linear(keys[1], config.width, hidden, config.float8)
        self.down = Linear(keys[2], hidden, config.width, config.float8)

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The result, and no loss of balance."""
        return context.operations.feed_forward(x, self.gate, self.up, self.down, context), jnp.zeros(())


class Experts(eqx.Module):
    """A mixture of SwiGLU experts: each token goes to its `experts_per_token` likeliest.

    Tokens are sorted by expert, so that every expert multiplies consecutive rows.

    Attributes:
        gate_bias, up_bias, down_bias: of each expert, as in gpt-oss; None for none.
        shared, share: an expert that all tokens go to, and the gate of what it gives, as in Qwen3-Next; None for none.
    """

    router: Linear
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None
    shared: SwiGLU | None
    share: Linear | None
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        experts, width, hidden = config.experts, config.width, config.hidden
        self.router = Linear(keys[0], width, experts, bias=config.expert_bias)
        self.gate = matrix(keys[1], width, experts, width, hidden)
        self.up = matrix(keys[2], width, experts, width, hidden)
        self.down = matrix(keys[3], hidden, experts, hidden, width)
        widths = (hidden, hidden, width) if config.expert_bias else ()
        self.gate_bias, self.up_bias, self.down_bias = [jnp.zeros((experts, each)) for each in widths] or [None] * 3
        self.shared = self.share = None
        if config.shared_hidden:
            first, second = jax.random.split(jax.random.fold_in(key, 1))
            self.shared, self.share = SwiGLU(config, first, config.shared_hidden), Linear(second, width, 1)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The result, and the loss of balance: smallest where every expert gets as many tokens (Fedus et al., 2021).

        On a mesh each device has some of the experts, and a part of their hidden channels: it routes the tokens of all devices
        along "expert", and they sum what their experts made. No token is dropped, however many choose the same expert.
        """
        hidden = P("expert", None, "tensor")
        biases = P("expert", "tensor"), P("expert", "tensor"), P("expert")
        specs = P(BATCH), P(BATCH), P(), (hidden, hidden, P("expert", "tensor")), biases
        mix = context.layout.on_each_device(partial(self.mix, context), specs, (P(BATCH), P()))
        matrices, biases = (self.gate, self.up, self.down), (self.gate_bias, self.up_bias, self.down_bias)
        out, imbalance = mix(x, context.documents, self.router, matrices, biases)
        if self.shared is None or self.share is None:
            return out, imbalance
        share = jax.nn.sigmoid(self.share(x, context).astype(jnp.float32))
        return out + (share * self.shared(x, context)[0]).astype(out.dtype), imbalance

    def mix(
        self,
        context: Context,
        x: jax.Array,
        documents: jax.Array | None,
        router: Linear,
        matrices: Arrays,
        biases: tuple[jax.Array | None, ...],
    ) -> tuple[jax.Array, jax.Array]:
        """Of one device's tokens `[B, T, d]`, by experts' gate, up and down. What stands after the last document of a row goes to
        no expert."""
        operations, layout, experts, held = context.operations, context.layout, self.config.experts, len(matrices[0])
        tokens = layout.of_all_expert_devices(x.reshape(-1, x.shape[-1]))
        logits = router(tokens, context)
        weights, chosen = operations.moe_route(logits, self.config.experts_per_token)
        likely, number = jax.nn.softmax(logits.astype(jnp.float32), axis=-1), jnp.float32(len(tokens))
        if documents is not None:
            real = layout.of_all_expert_devices(documents.reshape(-1, 1)) >= 0
            chosen, likely, number = jnp.where(real, chosen, -1), jnp.where(real, likely, 0), jnp.sum(real, dtype=jnp.float32)
        rows, sizes, positions = operations.moe_permute(tokens, layout.held_here(chosen, held), held)

        def product(rows: jax.Array, which: int, bias: jax.Array | None) -> jax.Array:
            return operations.grouped_matmul(rows, matrices[which], sizes, *(() if bias is None else (bias,)))

        limits = (self.config.swiglu_limit, self.config.swiglu_alpha) if self.config.swiglu_limit else ()
        gated = operations.swiglu(*(product(rows, which, biases[which]) for which in (0, 1)), *limits)
        last = None if biases[2] is None else layout.part_of_tensor(biases[2])
        out = operations.moe_unpermute(product(gated, 2, last), positions, weights)

        sizes = layout.of_all_expert_devices(sizes).astype(jnp.float32)
        sizes, likely, number = layout.mean_over_batch((sizes, jnp.sum(likely, axis=0), number))
        pairs = jnp.sum(sizes * likely) / self.config.experts_per_token
        imbalance = self.config.balance * experts * pairs / jnp.square(jnp.maximum(number, 1))
        return layout.sum_over_experts(layout.sum_over_tensor(out)).reshape(x.shape), imbalance
