"""Entry points of `grouped_matmul` on Hopper GPUs: the kernels `rows` and `outer`, and the work that XLA does.

The kernels need widths that are multiples of 64, and K that are multiples of 128 for float8; others are padded, at the cost of
a copy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import matrix_of_rows, rows_with_matrix
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import (
    backward_by_products,
    backward_of_nothing,
    bounds_of_call,
    forward_of_nothing,
    gradient_like,
    gradients_of,
    multiplies_nothing,
)
from ejkernel.targets.nvidia import HALVES
from ejkernel_pallas.mosaic_gpu.grouped_matmul.config import DEPTH, BackwardConfig, Tile, depth_of
from ejkernel_pallas.mosaic_gpu.grouped_matmul.outer import sum_products
from ejkernel_pallas.mosaic_gpu.grouped_matmul.rows import multiply_rows


def _padded(values: Any, *axes: int, unit: int = DEPTH) -> Any:
    """Pad these axes with zeros to a multiple of `unit`, at least one unit."""
    widths = [(0, 0)] * values.ndim
    for axis in axes:
        widths[axis] = (0, max(-(-values.shape[axis] // unit), 1) * unit - values.shape[axis])
    return jnp.pad(values, widths) if any(after for _, after in widths) else values


def _matmul(
    lhs: Any,
    rhs: Any,
    bounds: Any,
    tile: Tile,
    dtype: Any,
    *,
    transposed: bool,
    scale: Any = None,
    bias: Any = None,
    row_scale: Any = None,
) -> Any:
    """`lhs [b, m, k]` times the matrices of its rows, `[b, m, n]`.

    scale is `[1 or b, g, 1 or n]`, bias `[1 or b, g, n]`, row_scale `[1 or b, 1 or m]`.
    """
    columns, depth = rhs.shape[2 if transposed else 3], depth_of(lhs.dtype)
    scale, bias = (
        None if values is None else _padded(jnp.broadcast_to(values, (*values.shape[:2], columns)), 2)
        for values in (scale, bias)
    )
    if row_scale is not None:  # the scale of a row without a matrix may be NaN
        row_scale = jnp.where(rows_with_matrix(bounds, lhs.shape[1]), row_scale, 0)
    across, along = (2, 3) if transposed else (3, 2)
    out = multiply_rows(
        _padded(lhs, 2, unit=depth),
        _padded(_padded(rhs, across), along, unit=depth),
        bounds,
        tile,
        dtype,
        transposed=transposed,
        scale=scale,
        bias=bias,
        row_scale=row_scale,
    )
    return out[..., :columns]


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs, config: Tile) -> GroupedMatmulOutputs:
    if multiplies_nothing(call):
        return forward_of_nothing(call, inputs)
    bounds = bounds_of_call(call, inputs)
    out = _matmul(
        inputs.lhs,
        inputs.rhs,
        bounds,
        config,
        jnp.dtype(call.preferred_element_type),
        transposed=call.transpose_rhs,
        scale=inputs.rhs_scale,
        bias=inputs.bias,
        row_scale=inputs.lhs_scale,
    )
    if inputs.existing_out is not None:
        out = jnp.where(rows_with_matrix(bounds, call.lhs.shape[1])[..., None], out, inputs.existing_out)
    return GroupedMatmulOutputs(out)


def backward(
    call: GroupedMatmulCall,
    inputs: GroupedMatmulInputs,
    outputs: GroupedMatmulOutputs,
    cotangents: GroupedMatmulOutputs,
    config: BackwardConfig,
) -> GroupedMatmulInputs:
    grad = cotangents.out
    if multiplies_nothing(call):
        return backward_of_nothing(inputs, grad)
    if call.in_float8:
        return _backward_beside_float8(call, inputs, grad, config)
    return backward_by_products(
        call,
        inputs,
        grad,
        of_lhs=lambda bounds, grad, scale: gradient_of_lhs(call, inputs, bounds, grad, scale, config.tile_of_lhs),
        of_matrices=lambda bounds, grad: gradients_of_matrices(call, inputs, bounds, grad, config.tile_of_rhs),
        of_bias=lambda bounds, grad: gradient_like(inputs.bias, _row_sums(grad, bounds, config.tile_of_rhs)),
    )


def _backward_beside_float8(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, grad: Any, config: BackwardConfig
) -> GroupedMatmulInputs:
    """Gradients of scales, bias and existing_out: float8 operands have none. Those of scales recompute the unscaled output."""
    bounds = bounds_of_call(call, inputs)
    found: dict[str, Any] = {}
    held = rows_with_matrix(bounds, call.lhs.shape[1])[..., None]
    scale, row_scale = inputs.rhs_scale, inputs.lhs_scale
    if inputs.existing_out is not None:
        found["existing_out"] = jnp.where(held, 0, grad)
    if inputs.bias is not None:
        found["bias"] = gradient_like(inputs.bias, _row_sums(grad, bounds, config.tile_of_rhs))
    if scale is not None or row_scale is not None:
        out = _matmul(inputs.lhs, inputs.rhs, bounds, config.tile_of_lhs, jnp.float32, transposed=call.transpose_rhs)
        weighted = jnp.where(held, grad.astype(jnp.float32), 0) * out
        if scale is not None:
            by_row = weighted if row_scale is None else jnp.where(held, weighted * row_scale[..., None].astype(jnp.float32), 0)
            found["rhs_scale"] = gradient_like(scale, _row_sums(by_row, bounds, config.tile_of_rhs))
        if row_scale is not None:
            by_column = weighted if scale is None else weighted * _scale_of_rows(scale, bounds, grad.shape)
            found["lhs_scale"] = gradient_like(row_scale, jnp.sum(by_column, axis=2))
    return gradients_of(found)


def _scale_of_rows(scale: Any, bounds: Any, shape: tuple[int, ...]) -> Any:
    """`[1 or b, g, 1 or n]` for every row, `[b, m, 1 or n]` in float32."""
    scale = jnp.broadcast_to(scale, (shape[0], *scale.shape[1:]))
    return jnp.take_along_axis(scale, matrix_of_rows(bounds, shape[1])[..., None], axis=1).astype(jnp.float32)


def gradient_of_lhs(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, bounds: Any, grad: Any, scale: Any, tile: Tile
) -> Any:
    return _matmul(grad, inputs.rhs, bounds, tile, inputs.lhs.dtype, transposed=not call.transpose_rhs, scale=scale)


def gradients_of_matrices(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, bounds: Any, grad: Any, tile: Tile
) -> dict[str, Any]:
    """Gradients of rhs and of its scale, `sum of rhs * (lhs' . grad)` over K."""
    rhs, scale = inputs.rhs, inputs.rhs_scale
    left, right = (grad, inputs.lhs) if call.transpose_rhs else (inputs.lhs, grad)
    shared = rhs.shape[0] == 1 and (scale is None or scale.shape[0] == 1)
    members = grad.shape[0] if shared else 1
    whole = scale is None and (grad.shape[0] if not shared else 1) == rhs.shape[0]
    sums = sum_products(
        _padded(left, 2), _padded(right, 2), bounds, tile, rhs.dtype if whole else jnp.float32, members=members
    )[..., : left.shape[2], : right.shape[2]]
    if scale is None:
        return {"rhs": gradient_like(rhs, sums)}
    of_columns = scale[..., None] if call.transpose_rhs else scale[:, :, None]
    per_column = jnp.sum(sums * rhs.astype(jnp.float32), axis=3 if call.transpose_rhs else 2)
    return {
        "rhs": gradient_like(rhs, sums * of_columns.astype(jnp.float32)),
        "rhs_scale": gradient_like(scale, per_column),
    }


def _row_sums(grad: Any, bounds: Any, tile: Tile) -> Any:
    """Row sums of every matrix `[b, g, n]`, as a matmul with ones; float32 is split into two bfloat16 terms."""
    if grad.dtype.name in HALVES:
        parts = [grad]
    else:
        high = grad.astype(jnp.bfloat16)
        rest = jnp.where(jnp.isfinite(high), grad - high.astype(grad.dtype), 0)
        parts = [high, rest.astype(jnp.bfloat16)]
    ones = jnp.ones((*grad.shape[:2], DEPTH), parts[0].dtype)
    sums = [sum_products(ones, _padded(part, 2), bounds, tile, jnp.float32, members=1) for part in parts]
    return functools.reduce(jnp.add, sums)[:, :, 0, : grad.shape[2]]
