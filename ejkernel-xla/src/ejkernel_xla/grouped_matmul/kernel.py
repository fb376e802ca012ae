"""Grouped matmul over row tiles of one group each, in a loop whose length depends on shapes only.

`jax.lax.ragged_dot` is not used: it multiplies every row by every matrix on a CPU, and its memory grows with the number of groups
on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import has_gradient, vary_like
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import (
    backward_of_nothing,
    forward_of_nothing,
    gradient_like,
    gradients_of,
    multiplies_nothing,
)
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._numerics import dot_precision
from ejkernel_xla._row_tiles import RowTiles, Tiles
from ejkernel_xla.grouped_matmul.config import GroupedMatmulConfig


class _Product:
    """The grouped matmul of one batch member."""

    def __init__(
        self,
        call: GroupedMatmulCall,
        config: GroupedMatmulConfig,
        rhs: Any,
        sizes: Any,
        offset: Any,
        scale: Any,
        bias: Any,
        row_scale: Any,
    ) -> None:
        """`scale [g, 1 or n]`, `bias [g, n]` and `row_scale [1 or m]`, or None."""
        rows = call.lhs.shape[1]
        self.scale, self.bias = scale, bias
        self.row_scale = None if row_scale is None else jnp.broadcast_to(row_scale, rows)[:, None]
        self.rhs = rhs
        self.transposed = call.transpose_rhs
        self.row_tiles = RowTiles(rows, rhs.shape[0], config.block_m, config.tiles_per_step, sizes, offset)
        self.tiles, self.rows = self.row_tiles.tiles, self.row_tiles.rows
        self.dtype = jnp.dtype(call.product_dtype)
        self.dot = functools.partial(
            jax.lax.dot_general,
            precision=dot_precision(call.precision, self.dtype),
            preferred_element_type=accumulator(self.dtype),
        )

    def forward(self, lhs: Any, dtype: Any, *, scaled: bool = True) -> Any:
        """Every row of lhs times its matrix, scaled and shifted if asked for; rows without a matrix hold anything."""
        scale, bias, row_scale = (self.scale, self.bias, self.row_scale) if scaled else (None, None, None)

        def one(tile: Tiles, block: Any, matrix: Any) -> Any:
            out = self._times(block, matrix, 1 if self.transposed else 0)
            out = out if row_scale is None else out * self.row_tiles.own_rows(row_scale, tile).astype(out.dtype)
            out = out if scale is None else out * scale[tile.matrix].astype(out.dtype)[None]
            return (out if bias is None else out + bias[tile.matrix].astype(out.dtype)[None]).astype(dtype)

        return self._by_tiles(lhs, one)

    def gradient_of_lhs(self, grad: Any, dtype: Any) -> Any:
        """Every row of grad, scaled, times its matrix transposed."""

        def one(tile: Tiles, block: Any, matrix: Any) -> Any:
            return self._times(self._scaled(block, tile), matrix, 0 if self.transposed else 1).astype(dtype)

        return self._by_tiles(grad, one)

    def gradient_of_row_scale(self, grad: Any, unscaled: Any) -> Any:
        """Of every row `[m]`: the products that its scale multiplies, weighted by the cotangent; 0 without a matrix."""

        def one(tile: Tiles, block: Any, matrix: Any) -> Any:
            products = self.row_tiles.own_rows(unscaled, tile)
            return jnp.sum(self._scaled(block, tile).astype(products.dtype) * products, axis=1, keepdims=True)

        return jnp.where(self.rows.has_matrix, self._by_tiles(grad, one)[:, 0], 0)

    def with_scales_of_rows(self, grad: Any) -> Any:
        """The cotangent of the products that scales of matrices multiply."""
        if self.row_scale is None:
            return grad
        return grad.astype(accumulator(self.dtype)) * self.row_scale.astype(accumulator(self.dtype))

    def _scaled(self, block: Any, tile: Tiles) -> Any:
        """Rows of a cotangent times the scale of their matrix."""
        if self.scale is None:
            return block
        return block.astype(accumulator(self.dtype)) * self.scale[tile.matrix].astype(accumulator(self.dtype))[None]

    def _times(self, block: Any, matrix: Any, contracted: int) -> Any:
        return self.dot(block.astype(self.dtype), matrix.astype(self.dtype), (((1,), (contracted,)), ((), ())))

    def _by_tiles(self, values: Any, one: Callable[[Tiles, Any, Any], Any]) -> Any:
        """`one(tile, rows, matrix)` for every tile, put back into the order of the rows."""

        def step(tile: Tiles, rows: Any) -> Any:
            return one(tile, rows, jax.lax.dynamic_index_in_dim(self.rhs, tile.matrix, keepdims=False))

        return self.row_tiles.map(values, step)

    def sums(self, values: Any) -> Any:
        """For every matrix, the sum of its rows of `values`, one tile after the other."""

        def add(total: Any, tile: Tiles) -> tuple[Any, None]:
            own = self.row_tiles.own_rows(values, tile).astype(total.dtype)
            return total.at[tile.matrix].add(jnp.sum(own, axis=0)), None

        zeros = jnp.zeros((self.rhs.shape[0], values.shape[1]), accumulator(values.dtype))
        return jax.lax.scan(add, vary_like(zeros, (values, self.tiles)), self.tiles)[0]

    def outer(self, left: Any, right: Any) -> Any:
        """For every matrix, the sum over its rows of `left` times `right`; one tile after the other, so in a fixed order."""

        def add(total: Any, tile: Tiles) -> tuple[Any, None]:
            a, b = (self.row_tiles.own_rows(values, tile).astype(self.dtype) for values in (left, right))
            return total.at[tile.matrix].add(self.dot(a, b, (((0,), (0,)), ((), ())))), None

        zeros = jnp.zeros((self.rhs.shape[0], left.shape[1], right.shape[1]), accumulator(self.dtype))
        return jax.lax.scan(add, vary_like(zeros, (left, right, self.tiles)), self.tiles)[0]


def _over_batch(function: Any, inputs: GroupedMatmulInputs, *more: Any) -> Any:
    """`function(lhs, rhs, sizes, offset, scale, bias, row_scale, *more)` for every member of the batch; absent ones are None."""
    offset = jnp.zeros(1, jnp.int32) if inputs.group_offset is None else inputs.group_offset
    arrays = (inputs.lhs, inputs.rhs, inputs.group_sizes, offset, inputs.rhs_scale, inputs.bias, inputs.lhs_scale, *more)
    batch = inputs.lhs.shape[0]
    if batch == 1:
        return jax.tree.map(lambda leaf: leaf[None], function(*(None if array is None else array[0] for array in arrays)))
    axes = [0 if array is not None and array.shape[0] == batch else None for array in arrays]
    arrays = [array if array is None or axis == 0 else array[0] for array, axis in zip(arrays, axes, strict=True)]
    return jax.vmap(function, in_axes=tuple(axes))(*arrays)


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs, config: GroupedMatmulConfig) -> GroupedMatmulOutputs:
    dtype = jnp.dtype(call.preferred_element_type)
    if multiplies_nothing(call):
        return forward_of_nothing(call, inputs)
    existing = jnp.zeros((), dtype) if inputs.existing_out is None else inputs.existing_out

    def one(lhs: Any, *about: Any) -> tuple[Any, Any]:
        product = _Product(call, config, *about)
        return product.forward(lhs, dtype), product.rows.has_matrix

    out, has_matrix = _over_batch(one, inputs)
    return GroupedMatmulOutputs(jnp.where(has_matrix[..., None], out, existing))


def backward(
    call: GroupedMatmulCall,
    inputs: GroupedMatmulInputs,
    outputs: GroupedMatmulOutputs,
    cotangents: GroupedMatmulOutputs,
    config: GroupedMatmulConfig,
) -> GroupedMatmulInputs:
    """The cotangent, scaled, is rounded to the dtype of the products before it is multiplied."""
    grad, existing = cotangents.out, inputs.existing_out
    if multiplies_nothing(call):
        return backward_of_nothing(inputs, grad)

    def one(lhs: Any, rhs: Any, *given: Any) -> tuple[dict[str, Any], Any]:
        *about, grad = given
        product = _Product(call, config, rhs, *about)
        scale, bias, row_scale = product.scale, product.bias, product.row_scale
        scaled = product.with_scales_of_rows(grad)
        found: dict[str, Any] = {}
        if has_gradient(lhs):
            found["lhs"] = product.gradient_of_lhs(scaled, lhs.dtype)
        if has_gradient(rhs):
            outer = product.outer(scaled, lhs) if call.transpose_rhs else product.outer(lhs, scaled)
            if scale is not None:
                outer = outer * (scale[:, :, None] if call.transpose_rhs else scale[:, None]).astype(outer.dtype)
            found["rhs"] = outer
        if scale is not None or row_scale is not None:
            unscaled = product.forward(lhs, accumulator(product.dtype), scaled=False)
            if scale is not None:
                found["rhs_scale"] = product.sums(scaled.astype(unscaled.dtype) * unscaled)
            if row_scale is not None:
                found["lhs_scale"] = product.gradient_of_row_scale(grad, unscaled)
        if bias is not None:
            found["bias"] = product.sums(grad)
        return found, product.rows.has_matrix

    found, has_matrix = _over_batch(one, inputs, grad)
    has_matrix = has_matrix[..., None]
    if "lhs" in found:
        found["lhs"] = jnp.where(has_matrix, found["lhs"], 0)
    gradients = {name: gradient_like(getattr(inputs, name), value) for name, value in found.items()}
    if existing is not None:
        gradients["existing_out"] = jnp.where(has_matrix, 0, grad)
    return gradients_of(gradients)
