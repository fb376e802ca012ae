"""`x @ W` by column blocks of the output: only one block's weights are unpacked at a time.

Both layouts are split along n: rows of `[n, k]`, or groups of whole words of `[k, n]`. So the gradients of scales and zero
points of a block are complete after the block, and only that of x is summed over blocks.

With groups the same is done for every tile of rows, with the weights of its group: those that have no rows are not unpacked, and
weights of several tiles exist at one time only where they are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.quantized_matmul.interface import (
    QuantizedMatmulCall,
    QuantizedMatmulInputs,
    QuantizedMatmulOutputs,
)
from ejkernel.quantization.codes import decode_parts
from ejkernel.quantization.format import WORD
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._batch import over_batch
from ejkernel_xla._numerics import dot_precision
from ejkernel_xla._row_tiles import RowTiles, Tiles
from ejkernel_xla.quantized_matmul.config import QuantizedMatmulConfig


class _Blocks:
    """How packed weights are cut into blocks of `width` columns of the result; the last one is filled up with zero words."""

    def __init__(self, call: QuantizedMatmulCall, config: QuantizedMatmulConfig) -> None:
        self.call, self.form = call, call.form
        unit = 1 if call.transpose else math.lcm(self.form.group_size, WORD)
        self.count = max(-(-call.columns // (-(-config.block_n // unit) * unit)), 1)
        self.width = -(-call.columns // self.count)
        if self.count > 1:
            self.width = -(-self.width // unit) * unit
            self.count = -(-call.columns // self.width)
        self.axis = 0 if call.transpose else 1

    def size(self, name: str) -> int:
        """Of the cut axis of one block of an array."""
        if self.call.transpose:
            return self.width
        return self.form.words(self.width) if name == "w" else self.width // self.form.group_size

    def padded(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Packed arrays with a whole number of blocks."""
        if self.count == 1:
            return packed
        missing = {name: self.count * self.size(name) - array.shape[self.axis] for name, array in packed.items()}
        return {
            name: jnp.pad(array, [(0, missing[name] if axis == self.axis else 0) for axis in (0, 1)])
            if missing[name]
            else array
            for name, array in packed.items()
        }

    def take(self, packed: dict[str, Any], index: Any) -> dict[str, Any]:
        return {
            name: jax.lax.dynamic_slice_in_dim(array, index * self.size(name), self.size(name), self.axis)
            for name, array in packed.items()
        }

    def parts(self, block: dict[str, Any]) -> tuple[Any, Any]:
        """`code - zero` `[rows, groups, group_size]` and factors `[rows, groups]` of a block."""
        columns = self.call.packed_columns if self.call.transpose else self.width
        values, factors, zeros = decode_parts(block["w"], block["scales"], block.get("zeros"), self.form, columns)
        return (values if zeros is None else values - zeros[..., None]), factors

    def weights(self, block: dict[str, Any], dtype: Any) -> Any:
        """A block unpacked: `[width, k]` with transpose, else `[k, width]`."""
        values, factors = self.parts(block)
        return (values * factors[..., None]).reshape(values.shape[0], values.shape[1] * values.shape[2]).astype(dtype)

    def joined(self, pieces: Any, axis: int, size: int) -> Any:
        """`[count, ...]` of blocks' pieces, one after the other along an axis of a piece, without the filling."""
        pieces = jnp.moveaxis(pieces, 0, axis)
        shape = (*pieces.shape[:axis], pieces.shape[axis] * pieces.shape[axis + 1], *pieces.shape[axis + 2 :])
        return jax.lax.slice_in_dim(pieces.reshape(shape), 0, size, axis=axis)


def _dot(call: QuantizedMatmulCall, left: Any, right: Any, contracted: tuple[int, int]) -> Any:
    return jax.lax.dot_general(
        left,
        right,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=dot_precision(None, left.dtype),
        preferred_element_type=accumulator(left.dtype),
    )


def _forward(blocks: _Blocks, x: Any, packed: dict[str, Any]) -> Any:
    """`[m, n]` of `x [m, k]`."""
    call = blocks.call

    def one(block: dict[str, Any]) -> Any:
        return _dot(call, x, blocks.weights(block, x.dtype), (1, 1 if call.transpose else 0)).astype(x.dtype)

    if blocks.count == 1:
        return one(packed)
    whole = blocks.padded(packed)
    pieces = jax.lax.map(lambda index: one(blocks.take(whole, index)), jnp.arange(blocks.count))
    return blocks.joined(pieces, 1, call.columns)


def _backward(blocks: _Blocks, x: Any, grad: Any, packed: dict[str, Any]) -> dict[str, Any]:
    """Gradients of x, scales and zeros, in the accumulator's dtype, of one member of the batch."""
    call = blocks.call

    def one(block: dict[str, Any], grad: Any) -> tuple[Any, dict[str, Any]]:
        d_x = _dot(call, grad, blocks.weights(block, x.dtype), (1, 0 if call.transpose else 1))
        if not call.form.float_scales:
            return d_x, {}
        shifted, factors = blocks.parts(block)
        d_w = _dot(call, grad, x, (0, 0)) if call.transpose else _dot(call, x, grad, (0, 0))
        d_w = d_w.reshape(shifted.shape)
        found = {"scales": jnp.sum(d_w * shifted, axis=-1)}
        if "zeros" in block:
            found["zeros"] = -jnp.sum(d_w, axis=-1) * factors
        return d_x, found

    if blocks.count == 1:
        d_x, found = one(packed, grad)
        return {"x": d_x, **found}
    whole = blocks.padded(packed)
    grad = jnp.pad(grad, [(0, 0), (0, blocks.count * blocks.width - call.columns)])

    def step(total: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        columns = jax.lax.dynamic_slice_in_dim(grad, index * blocks.width, blocks.width, 1)
        d_x, found = one(blocks.take(whole, index), columns)
        return total + d_x, found

    zeros = vary_like(jnp.zeros(x.shape, accumulator(x.dtype)), (x, grad, packed))
    d_x, pieces = jax.lax.scan(step, zeros, jnp.arange(blocks.count))
    size = packed["scales"].shape[blocks.axis]
    return {"x": d_x, **{name: blocks.joined(piece, blocks.axis, size) for name, piece in pieces.items()}}


def _packed(inputs: QuantizedMatmulInputs) -> dict[str, Any]:
    packed = {"w": inputs.w, "scales": inputs.scales, "zeros": inputs.zeros}
    return {name: array for name, array in packed.items() if array is not None}


def _over_batch(function: Callable[..., Any], inputs: QuantizedMatmulInputs, *rows: Any) -> Any:
    """`function(*rows, packed)` per member; where all weights are shared, the members' rows are those of one product."""
    packed = _packed(inputs)
    batch = inputs.x.shape[0]
    if all(array.shape[0] == 1 for array in packed.values()):
        flat = [array.reshape(-1, array.shape[2]) for array in rows]
        return function(*flat, {name: array[0] for name, array in packed.items()}), True
    axes = {name: 0 if array.shape[0] == batch else None for name, array in packed.items()}
    packed = {name: array if axes[name] == 0 else array[0] for name, array in packed.items()}
    return jax.vmap(function, in_axes=(*(0 for _ in rows), axes))(*rows, packed), False


class _Groups:
    """The products of one batch member whose rows are in groups."""

    def __init__(self, blocks: _Blocks, config: QuantizedMatmulConfig, packed: dict[str, Any], sizes: Any, offset: Any) -> None:
        self.blocks, self.packed = blocks, packed
        rows, count = blocks.call.x.shape[1], blocks.call.matrices
        offset = 0 if offset is None else offset
        self.tiles = RowTiles(rows, count, config.block_m, config.tiles_per_step, sizes, offset)
        self.has_matrix = self.tiles.rows.has_matrix[:, None]

    def _of(self, tile: Tiles) -> dict[str, Any]:
        """The packed arrays of the tile's matrix."""
        return {name: jax.lax.dynamic_index_in_dim(array, tile.matrix, keepdims=False) for name, array in self.packed.items()}

    def forward(self, x: Any) -> Any:
        out = self.tiles.map(x, lambda tile, rows: _forward(self.blocks, rows, self._of(tile)))
        return jnp.where(self.has_matrix, out, 0)

    def backward(self, x: Any, grad: Any) -> dict[str, Any]:
        """As `_backward`. The gradients of scales and zeros are summed tile by tile, so in a fixed order."""

        def gradients(tile: Tiles, grad: Any) -> dict[str, Any]:
            return _backward(self.blocks, self.tiles.own_rows(x, tile), grad, self._of(tile))

        d_x = self.tiles.map(grad, lambda tile, grad: gradients(tile, grad)["x"].astype(x.dtype))
        found = {"x": jnp.where(self.has_matrix, d_x, 0)}
        if not self.blocks.form.float_scales:
            return found

        def add(total: dict[str, Any], tile: Tiles) -> tuple[dict[str, Any], None]:
            own = gradients(tile, self.tiles.own_rows(grad, tile))
            return {name: value.at[tile.matrix].add(own[name]) for name, value in total.items()}, None

        arrays = {name: array for name, array in self.packed.items() if name != "w"}
        zeros = {name: jnp.zeros(array.shape, accumulator(x.dtype)) for name, array in arrays.items()}
        zeros = vary_like(zeros, (x, grad, self.packed, self.tiles.tiles))
        return {**found, **jax.lax.scan(add, zeros, self.tiles.tiles)[0]}


def _multiplies_nothing(call: QuantizedMatmulCall) -> bool:
    return call.x.size == 0 or call.columns == 0 or call.matrices == 0


def forward(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, config: QuantizedMatmulConfig) -> QuantizedMatmulOutputs:
    shape = (*call.x.shape[:2], call.columns)
    if _multiplies_nothing(call):
        return QuantizedMatmulOutputs(jnp.zeros(shape, inputs.x.dtype))
    blocks = _Blocks(call, config)
    if inputs.group_sizes is not None:

        def one(x: Any, *about: Any) -> Any:
            return _Groups(blocks, config, *about).forward(x)

        arrays = (_packed(inputs), inputs.group_sizes, inputs.group_offset)
        return QuantizedMatmulOutputs(over_batch(one, len(inputs.x), inputs.x, *arrays))
    out, _ = _over_batch(lambda x, packed: _forward(blocks, x, packed), inputs, inputs.x)
    return QuantizedMatmulOutputs(out.reshape(shape))


def backward(
    call: QuantizedMatmulCall,
    inputs: QuantizedMatmulInputs,
    outputs: QuantizedMatmulOutputs,
    cotangents: QuantizedMatmulOutputs,
    config: QuantizedMatmulConfig,
) -> QuantizedMatmulInputs:
    absent = None if inputs.zeros is None else jnp.zeros_like(inputs.zeros)
    if _multiplies_nothing(call):
        d_scales = jnp.zeros_like(inputs.scales) if call.form.float_scales else None
        return QuantizedMatmulInputs(jnp.zeros_like(inputs.x), None, d_scales, absent)
    blocks = _Blocks(call, config)
    grad = cotangents.out.astype(inputs.x.dtype)
    if inputs.group_sizes is None:
        found, shared = _over_batch(lambda x, grad, packed: _backward(blocks, x, grad, packed), inputs, inputs.x, grad)
    else:

        def one(x: Any, grad: Any, *about: Any) -> Any:
            return _Groups(blocks, config, *about).backward(x, grad)

        arrays = (_packed(inputs), inputs.group_sizes, inputs.group_offset)
        found, shared = over_batch(one, len(inputs.x), inputs.x, grad, *arrays), False

    def gradient(name: str) -> Any:
        value = getattr(inputs, name)
        if name not in found:
            return None
        summed = found[name][None] if shared else found[name]
        if value.shape[0] == 1:
            summed = jnp.sum(summed, axis=0, keepdims=True)
        return summed.astype(value.dtype)

    return QuantizedMatmulInputs(
        found["x"].reshape(inputs.x.shape).astype(inputs.x.dtype), None, gradient("scales"), gradient("zeros")
    )
