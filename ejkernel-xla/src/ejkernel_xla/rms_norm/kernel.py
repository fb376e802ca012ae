"""Root-mean-square normalisation; XLA fuses each phase into one pass over the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel_xla._numerics import accumulator


def per_row(parameter: Any, ndim: int, dtype: Any) -> Any:
    """A parameter `[1 or b, d]` shaped to broadcast against `[b, ..., d]`."""
    return parameter.astype(dtype).reshape(parameter.shape[0], *[1] * (ndim - 2), parameter.shape[1])


def parameter_gradient(parameter: Any, per_element: Any) -> Any:
    """Sum a per-element gradient `[b, ..., d]` to the parameter's shape `[1 or b, d]`."""
    first = 1 if parameter.shape[0] == per_element.shape[0] else 0
    total = jnp.sum(per_element, axis=tuple(range(first, per_element.ndim - 1)))
    return total.reshape(parameter.shape).astype(parameter.dtype)


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: None) -> RmsNormOutputs:
    x, scale, offset = inputs
    dtype = accumulator(x.dtype)
    wide = x.astype(dtype)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + call.epsilon)
    out = wide * rstd[..., None]
    if scale is not None:
        out = out * (per_row(scale, x.ndim, dtype) + call.scale_offset)
    if offset is not None:
        out = out + per_row(offset, x.ndim, dtype)
    return RmsNormOutputs(out.astype(x.dtype), rstd.astype(jnp.float32) if call.save_residuals else None)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: None
) -> RmsNormInputs:
    x, scale, offset = inputs
    dtype = accumulator(x.dtype)
    grad = cotangents.out.astype(dtype)
    rstd = outputs.rstd.astype(dtype)[..., None]
    normalised = x.astype(dtype) * rstd
    weighted = grad if scale is None else grad * (per_row(scale, x.ndim, dtype) + call.scale_offset)
    d_x = rstd * (weighted - normalised * jnp.mean(weighted * normalised, axis=-1, keepdims=True))
    return RmsNormInputs(
        d_x.astype(x.dtype),
        None if scale is None else parameter_gradient(scale, grad * normalised),
        None if offset is None else parameter_gradient(offset, grad),
    )
