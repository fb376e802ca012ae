"""A model's parameters as decoding reads them: every layer has its own arrays, and layers of one input share a product.

Few tokens at a time, a step takes as long as reading the weights. Cutting them out of stacked arrays, or joining them there, would
read and write them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel_train.model import Block, Context, GatedAttention, Model, SwiGLU


class Columns(eqx.Module):
    """A linear layer whose weight is some columns of an array that layers share: XLA multiplies by that array once."""

    weight: jax.Array
    start: int
    stop: int

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return (x @ self.weight)[..., self.start : self.stop]


class Layer(eqx.Module):
    """A block whose layers of the same input are missing, and their weights side by side.

    Attributes:
        block: the rest of it.
        joined: `[d, sum of widths]` for each input.
        widths: of the layers that are joined.
    """

    block: Block
    joined: tuple[jax.Array, ...]
    widths: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, block: Block) -> None:
        weights = [[layer.weight for layer in layers] for layers in _of_one_input(block)]
        self.block = eqx.tree_at(_of_all_inputs, block, [None for _ in _of_all_inputs(block)])
        self.joined = tuple(jnp.concatenate(each, axis=1) for each in weights)
        self.widths = tuple(tuple(weight.shape[1] for weight in each) for each in weights)

    def whole(self) -> Block:
        """The block, with layers that read their columns."""
        columns = [
            Columns(joined, start, stop)
            for joined, widths in zip(self.joined, self.widths, strict=True)
            for start, stop in pairwise(accumulate(widths, initial=0))
        ]
        return eqx.tree_at(_of_all_inputs, self.block, columns, is_leaf=lambda node: node is None)


def layers_of(model: Model) -> Iterator[Layer]:
    """In their order."""
    if not model.stacked:
        yield from map(jax.jit(Layer), model.blocks)
        return
    of_repeat = jax.jit(lambda blocks, repeat: Layer(jax.tree.map(lambda leaf: leaf[repeat], blocks)))
    for repeat in range(model.config.repeats):
        for blocks in model.blocks:
            yield of_repeat(blocks, repeat)


def _of_one_input(block: Block) -> list[list[Any]]:
    """The linear layers that read the same, of each input."""
    attention = block.mixer.attention if isinstance(block.mixer, GatedAttention) else block.mixer
    projections, dense = [attention.query, attention.key, attention.value], block.feed_forward
    return [projections, [dense.gate, dense.up]] if isinstance(dense, SwiGLU) else [projections]


def _of_all_inputs(block: Block) -> list[Any]:
    return [layer for layers in _of_one_input(block) for layer in layers]
