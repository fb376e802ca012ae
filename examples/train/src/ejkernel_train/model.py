"""The models' parts in Equinox. What is computed between the products comes from `operations.py`.

Shapes: B batch, T tokens, d width. Parameters of blocks may have a leading axis, the repeats of the pattern, which `lax.scan`
runs over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel import LlamaRotaryEmbedding
from ejkernel_train import plain
from ejkernel_train.config import ModelConfig
from ejkernel_train.data import Packed
from ejkernel_train.float8 import Float8, Narrow, initial_scales, linears, narrow
from ejkernel_train.operations import Operations
from ejkernel_train.sharding import BATCH, Layout

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
        return tuple(each.reshape(*x.shape[:-1], -1) for each in rows)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        borders = () if self.documents is None else (self.documents,)
        return self.operations.attention(query, key, value, *borders)


def matrix(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / fan_in**0.5


def heads(x: jax.Array, number: int) -> jax.Array:
    """`[B, T, number * D] -> [B, T, number, D]`."""
    return x.reshape(*x.shape[:2], number, -1)


class Linear(eqx.Module):
    """`x @ weight`, weight `[inputs, outputs]`; in float8 where there are scales.

    Attributes:
        narrow: the weight in float8; None: it is quantized anew wherever it is used.
    """

    weight: jax.Array
    scales: jax.Array | None
    narrow: Narrow | None

    def __init__(self, key: jax.Array, inputs: int, outputs: int, float8: bool = False) -> None:
        self.weight = matrix(key, inputs, inputs, outputs)
        self.scales = initial_scales(self.weight) if float8 else None
        self.narrow = None

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return x @ self.weight if self.scales is None else context.project(x, self)[0]


class Attention(eqx.Module):
    """Causal attention with grouped key heads and rotary positions, as in Llama; with normed heads as in Qwen3."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_scale: jax.Array | None
    key_scale: jax.Array | None
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        inner, shared = config.heads * config.head_size, config.key_heads * config.head_size
        self.query = Linear(keys[0], config.width, inner, config.float8)
        self.key = Linear(keys[1], config.width, shared, config.float8)
        self.value = Linear(keys[2], config.width, shared, config.float8)
        self.output = Linear(keys[3], inner, config.width, config.float8)
        self.query_scale, self.key_scale = jnp.ones((2, config.head_size)) if config.qk_norm else (None, None)
        self.config = config

    def project(self, x: jax.Array, context: Context, *others: Linear) -> Arrays:
        """Queries `[B, T, H, D]`, keys and values `[B, T, K, D]`, and x through other layers."""
        query, key, value, *rest = context.project(x, self.query, self.key, self.value, *others)
        return heads(query, self.config.heads), *(heads(each, self.config.key_heads) for each in (key, value)), *rest

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        query, key, value = self.project(x, context)
        return self.output(self.attend(query, key, value, context), context)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> jax.Array:
        """What is between the linear layers: `[B, T, H D]`."""
        if self.query_scale is None:
            query, key = context.operations.rope(query, key, context.cos, context.sin)
        else:
            norms = self.query_scale, self.key_scale, self.config.epsilon
            query, key = context.operations.qk_norm_rope(query, key, context.cos, context.sin, *norms)
        return context.attend(query, key, value).reshape(*query.shape[:2], -1)


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


class GatedAttention(eqx.Module):
    """Attention whose heads are normed before they are turned, and whose result has a gate, as in Qwen3-Next."""

    attention: Attention
    gate: Linear
    query_scale: jax.Array
    key_scale: jax.Array

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = Attention(config, first)
        self.gate = Linear(second, config.width, config.heads * config.head_size, config.float8)
        self.query_scale, self.key_scale = jnp.ones((2, config.head_size))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        query, key, value, gate = self.attention.project(x, context, self.gate)
        norms = self.query_scale, self.key_scale, self.attention.config.epsilon
        query, key = context.operations.qk_norm_rope(query, key, context.cos, context.sin, *norms)
        attended = context.attend(query, key, value).reshape(*x.shape[:2], -1)
        return self.attention.output(attended * jax.nn.sigmoid(gate), context)


class DeltaRule(eqx.Module):
    """The gated delta net of Qwen3-Next: a short convolution, the gated delta rule, and a gated norm of every head."""

    mixed: Linear  # queries, keys and values, which share a convolution
    filters: jax.Array
    z: Linear
    beta: Linear
    decay: Linear
    log_rate: jax.Array
    bias: jax.Array
    norm: jax.Array
    output: Linear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 7)
        inner, shared = (number * config.linear_head_size for number in (config.linear_heads, config.linear_key_heads))
        self.mixed = Linear(keys[0], config.width, inner + 2 * shared, config.float8)
        self.filters = matrix(keys[1], config.filter, inner + 2 * shared, config.filter)
        self.z = Linear(keys[2], config.width, inner, config.float8)
        self.beta = Linear(keys[3], config.width, config.linear_heads)
        self.decay = Linear(keys[4], config.width, config.linear_heads)
        self.log_rate, self.bias = decays(keys[5], config.linear_heads)
        self.norm = jnp.ones(config.linear_head_size)
        self.output = Linear(keys[6], inner, config.width, config.float8)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        projected = *context.project(x, self.mixed, self.z), *context.project(x, self.beta, self.decay)
        own = self.filters, self.log_rate, self.bias, self.norm
        return self.output(by_sequence(self.recur, context, projected, own), context)

    def recur(self, operations: Operations, projected: Arrays, own: Arrays, documents: jax.Array | None) -> jax.Array:
        """What stands between the linear layers: `[B, T, H D]`."""
        (mixed, z, beta, decay), (filters, log_rate, bias, norm) = projected, own
        number, shared = self.config.linear_heads, self.config.linear_key_heads
        mixed = operations.causal_conv1d(mixed, filters, documents)
        size = shared * self.config.linear_head_size
        query, key, value = heads(mixed[..., :size], shared), heads(mixed[..., size : 2 * size], shared), mixed[..., 2 * size :]
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        decay = -jnp.exp(log_rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        out = operations.gated_delta_rule(query, key, heads(value, number), beta, decay, documents)
        return operations.gated_rms_norm(out, heads(z, number), norm).reshape(*z.shape)


class StateSpace(eqx.Module):
    """The layer of Mamba-2: a short convolution, the state space with scalar decays, and a gated norm."""

    mixed: Linear  # x, B and C, which share a convolution
    filters: jax.Array
    z: Linear
    step: Linear
    log_rate: jax.Array
    bias: jax.Array
    skip: jax.Array
    norm: jax.Array
    output: Linear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        inner = config.linear_heads * config.linear_head_size
        channels = inner + 2 * config.groups * config.state_size
        self.mixed = Linear(keys[0], config.width, channels, config.float8)
        self.filters = matrix(keys[1], config.filter, channels, config.filter)
        self.z = Linear(keys[2], config.width, inner, config.float8)
        self.step = Linear(keys[3], config.width, config.linear_heads)
        self.log_rate, self.bias = decays(keys[4], config.linear_heads)
        self.skip = jnp.ones(config.linear_heads)
        self.norm = jnp.ones(inner)
        self.output = Linear(keys[5], inner, config.width, config.float8)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        projected = *context.project(x, self.mixed, self.z), self.step(x, context)
        own = self.filters, self.log_rate, self.bias, self.skip, self.norm
        return self.output(by_sequence(self.recur, context, projected, own), context)

    def recur(self, operations: Operations, projected: Arrays, own: Arrays, documents: jax.Array | None) -> jax.Array:
        """What stands between the linear layers: `[B, T, H P]`."""
        (mixed, z, step), (filters, log_rate, bias, skip, norm) = projected, own
        groups, size = self.config.groups, self.config.groups * self.config.state_size
        mixed = operations.causal_conv1d(mixed, filters, documents)
        x = heads(mixed[..., : -2 * size], self.config.linear_heads)
        B, C = heads(mixed[..., -2 * size : -size], groups), heads(mixed[..., -size:], groups)
        return operations.gated_state_space(x, -jnp.exp(log_rate), B, C, skip, step, bias, z, norm, documents)


def by_sequence(function: Callable[..., jax.Array], context: Context, projected: Any, own: Any) -> jax.Array:
    """On a mesh each device runs its own sequences, with all heads: their channels share a convolution, and are not split."""
    run = context.layout.on_each_device(partial(function, context.operations), (P(BATCH), P(), P(BATCH)), P(BATCH))
    return run(projected, own, context.documents)


def decays(key: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Logarithms of rates between 1 and 16, and biases whose softplus is a step between 0.001 and 0.1."""
    first, second = jax.random.split(key)
    steps = jnp.exp(jax.random.uniform(second, (number,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
    return jnp.log(jax.random.uniform(first, (number,), minval=1.0, maxval=16.0)), steps + jnp.log(-jnp.expm1(-steps))


MIXERS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {
    "attention": Attention,
    "gated_attention": GatedAttention,
    "delta_rule": DeltaRule,
    "state_space": StateSpace,
}


class Block(eqx.Module):
    """A token mixer and, if the config has one, a feed-forward layer, each behind a norm and added to the stream."""

    mixer_norm: jax.Array
    mixer: Any
    feed_forward_norm: jax.Array | None
    feed_forward: Any
    epsilon: float = eqx.field(static=True)

    def __init__(self, config: ModelConfig, mixer: str, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.mixer_norm = jnp.ones(config.width)
        self.mixer = MIXERS[mixer](config, first)
        self.feed_forward_norm = jnp.ones(config.width) if config.hidden else None
        self.feed_forward = (Experts if config.experts else SwiGLU)(config, second) if config.hidden else None
        self.epsilon = config.epsilon

    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The stream `[B, T, d]` after this block, and its loss of balance."""
        mixed = self.mixer(context.operations.rms_norm(x, self.mixer_norm, self.epsilon), context)
        if self.feed_forward is None:
            return x + mixed, jnp.zeros(())
        normed, x = context.operations.add_rms_norm(mixed, x, self.feed_forward_norm, self.epsilon)
        out, imbalance = self.feed_forward(normed, context)
        return x + out, imbalance


REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda function: function,
    "dots": lambda function: jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


NO_MESH = Layout()


class Model(eqx.Module):
    """Embedding, blocks, norm, and a head, which is the embedding again if they are tied.

    Attributes:
        head: `[V, d]`, None for the embedding.
        blocks: if stacked, one for each place of the pattern, its parameters stacked over the repeats; else one for each layer.
    """

    embedding: jax.Array
    blocks: tuple[Block, ...]
    norm: jax.Array
    head: jax.Array | None
    config: ModelConfig = eqx.field(static=True)
    stacked: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array, stacked: bool = True, shardings: Any = None) -> None:
        """Compiled by places of the pattern: XLA takes minutes for one program that makes the blocks of 24 layers.

        Args:
            shardings: a model of shardings, else all is on one device.
        """
        first, *others = jax.random.split(key, 1 + len(config.pattern))
        embedding, blocks, norm, head = Model.parts(shardings) if shardings else (None, None, None, None)
        places = []
        for place, (mixer, key) in enumerate(zip(config.pattern, others, strict=True)):
            make, keys = partial(Block, config, mixer), jax.random.split(key, config.repeats)
            make = jax.jit(jax.vmap(make) if stacked else make, out_shardings=blocks and blocks[place])
            places.append(make(keys) if stacked else [make(key) for key in keys])
        size = config.width, config.vocabulary, config.width
        self.embedding = jax.jit(lambda key: matrix(key, *size), out_shardings=embedding)(first)
        self.blocks = tuple(places) if stacked else tuple(block for repeat in zip(*places, strict=True) for block in repeat)
        self.norm = jax.jit(partial(jnp.ones, config.width), out_shardings=norm)()
        self.head = (
            None if config.tied else jax.jit(lambda key: matrix(jax.random.fold_in(key, 1), *size), out_shardings=head)(first)
        )
        self.config = config
        self.stacked = stacked

    @staticmethod
    def parts(model: Model) -> tuple[Any, ...]:
        return model.embedding, model.blocks, model.norm, model.head

    def is_matrix(self, leaf: jax.Array) -> bool:
        """Of a parameter of blocks."""
        return leaf.ndim > 1 + self.stacked

    def compute_copy(self, dtype: str, but_float8: bool = False) -> Model:
        """With the blocks' matrices in `dtype`; vectors (norms, decays) cost nothing and stay in float32, and so does the
        embedding, so that gradients of a token that comes often are summed in float32.

        Args:
            but_float8: layers in float8 stay as they are: their weights are quantized from float32, and their gradients leave
                the products in it.
        """

        def copy(part: Any) -> Any:
            if isinstance(part, Linear) and part.scales is not None:
                return part if but_float8 else eqx.tree_at(lambda layer: layer.weight, part, part.weight.astype(dtype))
            return jax.tree.map(lambda leaf: leaf.astype(dtype) if self.is_matrix(leaf) else leaf, part)

        blocks = jax.tree.map(copy, self.blocks, is_leaf=lambda part: isinstance(part, Linear))
        return eqx.tree_at(lambda model: model.blocks, self, blocks)

    def narrow_weights(self, operations: Operations, layout: Layout = NO_MESH) -> Model:
        """Nothing but `Linear.narrow` of layers in float8, for all parts of a step: `eqx.combine` adds it to a model. Nothing at
        all on a mesh, where every block is gathered before."""
        if layout.mesh is not None:
            return jax.tree.map(lambda _: None, self)
        make = partial(narrow, Float8(operations.scaled_matmul, operations.quantize_float8))
        make = jax.vmap(make) if self.stacked else make

        def of(part: Any) -> Any:
            nothing = jax.tree.map(lambda _: None, part)
            if not isinstance(part, Linear) or part.scales is None:
                return nothing
            found = make(part.weight, part.scales)
            return eqx.tree_at(lambda layer: layer.narrow, nothing, found, is_leaf=lambda leaf: leaf is None)

        return jax.tree.map(of, self, is_leaf=lambda part: isinstance(part, Linear))

    def loss(
        self,
        window: jax.Array | Packed,
        operations: Operations,
        dtype: str,
        layout: Layout = NO_MESH,
        remat: str = "none",
        weight: jax.Array | float = 1.0,
    ) -> jax.Array:
        """Mean cross entropy in nats per label that counts, times `weight`, and the blocks' losses of balance."""
        cross_entropy, imbalance = self.losses(window, operations, dtype, layout, remat)
        return weight * cross_entropy + imbalance

    def losses(
        self, window: jax.Array | Packed, operations: Operations, dtype: str, layout: Layout = NO_MESH, remat: str = "none"
    ) -> tuple[jax.Array, jax.Array]:
        """Both apart, of windows `[B, T + 1]` or packed rows.

        Products are in `dtype`: of a model that is not `compute_copy(dtype)`, a copy is made here.
        """
        tokens, labels, documents = window if isinstance(window, Packed) else Packed(window[:, :-1], window[:, 1:])
        cos, sin = rotary(self.config, tokens.shape[1])
        if documents is not None:
            places = positions(documents)
            cos, sin = cos[places], sin[places]
        context = Context(operations, layout, cos, sin, documents)
        embedding = layout.gathered_embedding(self.embedding)

        def repeat(carry: tuple[jax.Array, jax.Array], blocks: tuple[Block, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, total = carry
            for block in layout.gathered(blocks):
                x, imbalance = block(x, context)
                x, total = layout.stream(x), total + imbalance
            return (x, total), None

        blocks = self.compute_copy(dtype, layout.mesh is None).blocks
        carry = layout.stream(embedding[tokens].astype(dtype)), jnp.zeros(())
        run = REMAT[remat](repeat)
        if self.stacked:
            carry, _ = jax.lax.scan(run, carry, blocks)
        else:
            run, size = jax.jit(run), len(self.config.pattern)  # jit, so that the repeats are traced and lowered once
            for first in range(0, len(blocks), size):
                carry, _ = run(carry, blocks[first : first + size])
        x, imbalance = carry
        hidden = operations.rms_norm(x, self.norm, self.config.epsilon)
        head = embedding if self.head is None else layout.gathered_embedding(self.head)
        return operations.cross_entropy(hidden, head.astype(dtype), labels, layout), imbalance


def restacked(model: Model, stacked: bool) -> Model:
    """The same model, or moments of one, as if it had been made with this `stacked`."""
    if model.stacked == stacked:
        return model
    config = model.config
    if stacked:
        places = (model.blocks[place :: len(config.pattern)] for place in range(len(config.pattern)))
        blocks = tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) for blocks in places)
    else:
        blocks = tuple(block for repeat in unstacked(model.blocks, config.repeats) for block in repeat)
    shapes = jax.eval_shape(lambda: Model(config, jax.random.key(0), stacked))
    return eqx.tree_at(
        Model.parts, shapes, (model.embedding, blocks, model.norm, model.head), is_leaf=lambda part: part is None
    )


def positions(documents: jax.Array) -> jax.Array:
    """Of each token in its document `[B, T]`."""
    index = jnp.arange(documents.shape[1])
    first = jnp.diff(documents, axis=1, prepend=-2) != 0
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def unstacked(tree: Any, repeats: int) -> list[Any]:
    """The tree of every repeat, of leaves that are stacked over them."""
    return [jax.tree.map(itemgetter(repeat), tree) for repeat in range(repeats)]


def rotary(config: ModelConfig, length: int, base: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[length, D / 2]` of each position times `base^(-2i / D)`, or as a public model's configuration says."""
    size = config.head_size
    if config.public:
        said = {"head_dim": size, **json.loads(config.public)}
        return LlamaRotaryEmbedding.from_config(said, per_pair=True)(jnp.arange(length))
    periods = base ** (-jnp.arange(0, size, 2) / max(size, 1))
    angles = jnp.arange(length)[:, None] * periods
    return jnp.cos(angles), jnp.sin(angles)
