"""Gradients of scales and zero points; XLA drops them where nobody asks for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import ArraySpec
from ejkernel.operations.grouped_matmul.groups import bounds_of
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall, QuantizedMatmulInputs
from ejkernel.plugin import current_target
from ejkernel.quantization.codes import decode_parts
from ejkernel_triton.grouped_matmul import config
from ejkernel_triton.grouped_matmul.kernel import outer_products

_MOST_ELEMENTS = 2**25
"""Of the gradient of the weights that exist at one time: 128 MiB in float32."""


def scale_gradients(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, grad: Any) -> tuple[Any, Any]:
    """Sums over groups of the gradient of the weights, which is formed in memory by blocks of stored rows, or of
    whole matrices with groups.

    Of scales and of zeros, None where absent.
    """
    if not call.form.float_scales:
        return None, None
    left, right = (grad, inputs.x) if call.transpose else (inputs.x, grad)
    if inputs.group_sizes is not None:
        found = _of_groups(call, inputs, left, right)
    else:
        if _shared(inputs):
            left, right = (array.reshape(1, -1, array.shape[2]) for array in (left, right))
        step = max(_MOST_ELEMENTS // (left.shape[0] * call.packed_columns), 1)
        blocks = [slice(first, first + step) for first in range(0, call.stored_rows, step)]
        found = [_sums(call, inputs, _outer(left[:, :, rows], right), rows) for rows in blocks]
    d_scales, d_zeros = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return _like(d_scales, inputs.scales), None if inputs.zeros is None else _like(d_zeros, inputs.zeros)


def _shared(inputs: QuantizedMatmulInputs) -> bool:
    """Whether all members have the same weights."""
    return all(array is None or array.shape[0] == 1 for array in (inputs.w, inputs.scales, inputs.zeros))


def _outer(left: Any, right: Any) -> Any:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((0,), (0,)))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _of_groups(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, left: Any, right: Any) -> list[tuple[Any, Any]]:
    """By blocks of matrices, tiled as the gradient of matrices is in `grouped_matmul`."""
    batch, rows, _ = call.x.shape
    bounds = bounds_of(inputs.group_sizes, inputs.group_offset, batch, rows, call.matrices)
    members = 1 if _shared(inputs) else batch
    size = call.stored_rows, call.packed_columns
    dense = GroupedMatmulCall(
        lhs=call.x,
        rhs=ArraySpec((members, call.matrices, *size), call.x.dtype),
        group_sizes=ArraySpec((batch, call.matrices), "int32"),
        preferred_element_type=call.x.dtype,
        transpose_rhs=call.transpose,
    )
    tile = config.backward_heuristic(dense, current_target()).tile_of_rhs
    step = max(_MOST_ELEMENTS // (members * size[0] * size[1]), 1)
    found = []
    for first in range(0, call.matrices, step):
        some = slice(first, min(first + step, call.matrices))
        d_w, _ = outer_products(left, right, bounds[:, first : some.stop + 1], tile, jnp.float32, None, members=members)
        found.append(_sums(call, inputs, d_w, some))
    return found


def _sums(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, d_w: Any, part: slice) -> tuple[Any, Any]:
    """Of the gradient of weights `[b, part, ...]`, the gradients of their scales and zeros."""
    w, scales, zeros = (None if array is None else array[:, part] for array in (inputs.w, inputs.scales, inputs.zeros))
    values, factors, zeros = decode_parts(w, scales, zeros, call.form, call.packed_columns)
    d_w = d_w.reshape(*d_w.shape[:-1], -1, call.group_size)
    shifted = values if zeros is None else values - zeros[..., None]
    return jnp.sum(d_w * shifted, axis=-1), -jnp.sum(d_w, axis=-1) * factors


def _like(gradient: Any, array: Any) -> Any:
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(array.dtype)
