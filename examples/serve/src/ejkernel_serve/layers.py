"""A model's parameters as decoding reads them: every layer has its own arrays, and layers of one input share a product.

Few tokens at a time, a step takes as long as reading the weights. Cutting them out of stacked arrays, or joining them there, would
read and write them once more. What such a step computes between products is small, and costs a launch each where it is no part of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import ejkernel
from ejkernel_train.feed_forward import Experts, SwiGLU
from ejkernel_train.mixers import Attention, DeltaRule, GatedAttention
from ejkernel_train.model import Block, Model
from ejkernel_train.parts import Context, heads, plus

FEW = 64
"""Tokens up to which a product takes as long as reading its weight, and so what is around it belongs into it."""


class Rows(eqx.Module):
    """A linear layer whose weight is some rows of an array that layers share: XLA multiplies by that array once.

    In this order, inputs last, XLA multiplies a single token by a weight in one pass.
    """

    weight: jax.Array
    bias: jax.Array | None
    start: int
    stop: int

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return plus(jnp.einsum("...i,oi->...o", x, self.weight)[..., self.start : self.stop], self.bias)


class Layer(eqx.Module):
    """A block without its linear layers, and their weights.

    Attributes:
        block: the rest of it.
        weights: `[sum of widths, inputs]` of all layers that read the same.
        biases: of each of these, None for none.
        widths: outputs of each.
    """

    block: Block
    weights: tuple[jax.Array, ...]
    biases: tuple[tuple[jax.Array | None, ...], ...]
    widths: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, block: Block) -> None:
        own = [[layer.weight.T for layer in layers] for layers in _by_input(block)]
        self.block = eqx.tree_at(_linear, block, [None for _ in _linear(block)])
        self.weights = tuple(jnp.concatenate(each) for each in own)
        self.biases = tuple(tuple(layer.bias for layer in layers) for layers in _by_input(block))
        self.widths = tuple(tuple(len(weight) for weight in each) for each in own)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """The stream `[1, N, d]` after this layer."""
        dense = isinstance(self.block.mixer, Attention) and isinstance(self.block.feed_forward, SwiGLU)
        if dense and not jax.tree.leaves(self.biases) and x.shape[1] <= FEW:
            return self._of_few(x, context)
        return self.whole()(x, context)[0]

    def _of_few(self, x: jax.Array, context: Context) -> jax.Array:
        """A dense block in four products beside its attention."""
        block, (joint, output, gate_and_up, down) = self.block, self.weights
        linear = partial(ejkernel.fused_linear, epsilon=block.epsilon)
        ends = [*accumulate(self.widths[0])][:-1]
        query, key, value = jnp.split(linear(x, joint, block.mixer_norm), ends, axis=-1)
        config = block.mixer.config
        projected = heads(query, config.heads), heads(key, config.key_heads), heads(value, config.key_heads)
        x = linear(block.mixer.attend(*projected, context), output, residual=x)
        return linear(linear(x, gate_and_up, block.feed_forward_norm, activation="silu"), down, residual=x)

    def whole(self) -> Block:
        """The block, with layers that read their rows."""
        rows = [
            Rows(weight, bias, start, stop)
            for weight, biases, widths in zip(self.weights, self.biases, self.widths, strict=True)
            for bias, (start, stop) in zip(biases, pairwise(accumulate(widths, initial=0)), strict=True)
        ]
        return eqx.tree_at(_linear, self.block, rows, is_leaf=lambda node: node is None)


def layers_of(model: Model) -> Iterator[Layer]:
    """In their order."""
    if not model.stacked:
        yield from map(jax.jit(Layer), model.blocks)
        return
    of_repeat = jax.jit(lambda blocks, repeat: Layer(jax.tree.map(lambda leaf: leaf[repeat], blocks)))
    for repeat in range(model.config.repeats):
        for blocks in model.blocks:
            yield of_repeat(blocks, repeat)


def _by_input(block: Block) -> list[list[Any]]:
    """The linear layers, those together that read the same."""
    mixer, dense = block.mixer, block.feed_forward
    if isinstance(dense, Experts):
        dense = dense.shared
    if isinstance(mixer, DeltaRule):
        found = [[mixer.mixed, mixer.z, mixer.beta, mixer.decay], [mixer.output]]
    else:
        gates, attention = ([mixer.gate], mixer.attention) if isinstance(mixer, GatedAttention) else ([], mixer)
        found = [[attention.query, attention.key, attention.value, *gates], [attention.output]]
    return [*found, [dense.gate, dense.up], [dense.down]] if isinstance(dense, SwiGLU) else found


def _linear(block: Block) -> list[Any]:
    return [layer for layers in _by_input(block) for layer in layers]
