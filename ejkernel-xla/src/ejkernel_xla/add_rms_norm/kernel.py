"""Residual addition and root-mean-square normalisation; XLA fuses each phase into one pass over the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall, AddRmsNormInputs, AddRmsNormOutputs
from ejkernel.utils.dtypes import accumulator, common_dtype
from ejkernel_xla._rows import normalise, parameter_gradient, rms_gradient, scaled


def forward(call: AddRmsNormCall, inputs: AddRmsNormInputs, config: None) -> AddRmsNormOutputs:
    x, residual, scale = inputs
    wide = common_dtype(accumulator(x.dtype), residual.dtype)
    total = _rounded(x.astype(wide) + residual.astype(wide), residual.dtype)
    normalised, rstd = normalise(total, call.epsilon)
    out = scaled(normalised, scale, call.scale_offset).astype(x.dtype)
    return AddRmsNormOutputs(out, total, rstd[..., 0] if call.save_residuals else None)


def _rounded(values: Any, dtype: Any) -> Any:
    """In another dtype. XLA is free to leave out a conversion there and back, and would norm another sum than it returns; it does
    not leave this out. The exponent keeps its bits, as what is too small for those of float16 would become 0."""
    if jnp.dtype(dtype).itemsize < values.dtype.itemsize:
        values = jax.lax.reduce_precision(values, jnp.finfo(values.dtype).nexp, jnp.finfo(dtype).nmant)
    return values.astype(dtype)


def backward(
    call: AddRmsNormCall,
    inputs: AddRmsNormInputs,
    outputs: AddRmsNormOutputs,
    cotangents: AddRmsNormOutputs,
    config: None,
) -> AddRmsNormInputs:
    x, residual, scale = inputs
    wide = accumulator(outputs.sum.dtype)
    grad, rstd = cotangents.out.astype(wide), outputs.rstd[..., None]
    normalised = outputs.sum.astype(wide) * rstd
    d_sum = cotangents.sum.astype(wide) + rms_gradient(normalised, rstd, scaled(grad, scale, call.scale_offset))
    return AddRmsNormInputs(d_sum.astype(x.dtype), d_sum.astype(residual.dtype), parameter_gradient(scale, grad * normalised))
