"""Models in Equinox: blocks of a mixer and a feed-forward layer between an embedding and a head.

Shapes: B batch, T tokens, d width. Parameters of blocks may have a leading axis, the repeats of the pattern, which `lax.scan`
runs over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel import LlamaRotaryEmbedding
from ejkernel_train.config import ModelConfig
from ejkernel_train.data import Packed
from ejkernel_train.feed_forward import Experts, SwiGLU
from ejkernel_train.float8 import Float8, narrow
from ejkernel_train.mixers import MIXERS
from ejkernel_train.operations import Operations
from ejkernel_train.parts import Context, Linear, matrix
from ejkernel_train.sharding import Layout


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
        self.feed_forward = None
        if config.hidden:
            self.feed_forward = Experts(config, second) if config.experts else SwiGLU(config, second, config.hidden)
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
