"""Gradients of scales and zero points; XLA drops them where nobody asks for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall, QuantizedMatmulInputs
from ejkernel.quantization.codes import decode_parts


def scale_gradients(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, grad: Any) -> tuple[Any, Any]:
    """Sums over groups of the gradient of the weights, which is formed in memory: of scales and of zeros, None where absent."""
    if not call.form.float_scales:
        return None, None
    rows, columns = (grad, inputs.x) if call.transpose else (inputs.x, grad)
    if all(array is None or array.shape[0] == 1 for array in (inputs.w, inputs.scales, inputs.zeros)):
        rows, columns = (array.reshape(1, -1, array.shape[2]) for array in (rows, columns))
    precision = jax.lax.Precision.HIGHEST if grad.dtype == jnp.float32 else None
    d_w = jax.lax.dot_general(
        rows, columns, (((1,), (1,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
    )
    values, factors, zeros = decode_parts(inputs.w, inputs.scales, inputs.zeros, call.form, call.packed_columns)
    d_w = d_w.reshape(*d_w.shape[:2], -1, call.group_size)
    shifted = values if zeros is None else values - zeros[..., None]
    d_scales = _like(jnp.sum(d_w * shifted, axis=-1), inputs.scales)
    return d_scales, None if zeros is None else _like(-jnp.sum(d_w, axis=-1) * factors, inputs.zeros)


def _like(gradient: Any, array: Any) -> Any:
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(array.dtype)
