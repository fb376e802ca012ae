"""Layer normalisation; the variance is that of the centred rows, which does not cancel far from zero."""

from __future__ import annotations

import jax

from ejkernel.operations.layer_norm.interface import LayerNormCall, LayerNormInputs, LayerNormOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._rows import apply_parameters, mean_of_rows, parameter_gradient, scaled


def forward(call: LayerNormCall, inputs: LayerNormInputs, config: None) -> LayerNormOutputs:
    wide = inputs.x.astype(accumulator(inputs.x.dtype))
    mean = mean_of_rows(wide)
    centred = wide - mean
    rstd = jax.lax.rsqrt(mean_of_rows(centred * centred) + call.epsilon)
    out = apply_parameters(call, centred * rstd, inputs)
    return LayerNormOutputs(out, mean[..., 0], rstd[..., 0]) if call.save_residuals else LayerNormOutputs(out)


def backward(
    call: LayerNormCall, inputs: LayerNormInputs, outputs: LayerNormOutputs, cotangents: LayerNormOutputs, config: None
) -> LayerNormInputs:
    x, scale, offset = inputs
    grad = cotangents.out.astype(accumulator(x.dtype))
    rstd = outputs.rstd[..., None]
    normalised = (x.astype(grad.dtype) - outputs.mean[..., None]) * rstd
    weighted = scaled(grad, scale, call.scale_offset)
    d_x = rstd * (weighted - mean_of_rows(weighted) - normalised * mean_of_rows(weighted * normalised))
    return LayerNormInputs(d_x.astype(x.dtype), parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
