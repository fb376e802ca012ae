"""Gradients of scales and zero points; XLA drops them where nobody asks for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall, QuantizedMatmulInputs
from ejkernel.quantization.codes import decode_parts

_MOST_ELEMENTS = 2**25
"""Of the gradient of the weights that exist at one time: 128 MiB in float32."""


def scale_gradients(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, grad: Any) -> tuple[Any, Any]:
    """Sums over groups of the gradient of the weights, which is formed in memory by blocks of stored rows.

    Of scales and of zeros, None where absent.
    """
    if not call.form.float_scales:
        return None, None
    left, right = (grad, inputs.x) if call.transpose else (inputs.x, grad)
    if all(array is None or array.shape[0] == 1 for array in (inputs.w, inputs.scales, inputs.zeros)):
        left, right = (array.reshape(1, -1, array.shape[2]) for array in (left, right))
    count = call.w.shape[1]
    step = max(_MOST_ELEMENTS // (left.shape[0] * call.packed_columns), 1)
    found = [_of_rows(call, inputs, left, right, slice(first, first + step)) for first in range(0, count, step)]
    d_scales, d_zeros = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return _like(d_scales, inputs.scales), None if inputs.zeros is None else _like(d_zeros, inputs.zeros)


def _of_rows(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, left: Any, right: Any, rows: slice) -> tuple[Any, Any]:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((0,), (0,)))
    d_w = jax.lax.dot_general(left[:, :, rows], right, dimensions, precision=precision, preferred_element_type=jnp.float32)
    w, scales, zeros = (None if array is None else array[:, rows] for array in inputs[1:])
    values, factors, zeros = decode_parts(w, scales, zeros, call.form, call.packed_columns)
    d_w = d_w.reshape(*d_w.shape[:2], -1, call.group_size)
    shifted = values if zeros is None else values - zeros[..., None]
    return jnp.sum(d_w * shifted, axis=-1), -jnp.sum(d_w, axis=-1) * factors


def _like(gradient: Any, array: Any) -> Any:
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(array.dtype)
