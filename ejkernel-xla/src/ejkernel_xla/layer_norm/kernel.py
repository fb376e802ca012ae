"""Layer normalisation. Rows are centred twice: the mean of a row far from zero is rounded by more than the row may spread, and what
that leaves is the mean of the centred row, which is summed beside the squares."""

from __future__ import annotations

from typing import Any

from ejkernel.operations.common.rows.interface import square_unit
from ejkernel.operations.layer_norm.interface import LayerNormCall, LayerNormInputs, LayerNormOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._rows import apply_parameters, deviation, mean_of_rows, parameter_gradient, scaled


def forward(call: LayerNormCall, inputs: LayerNormInputs, config: None) -> LayerNormOutputs:
    wide = inputs.x.astype(accumulator(inputs.x.dtype))
    mean = mean_of_rows(wide)
    centred = wide - mean
    found: Any = deviation(centred, call.epsilon, square_unit(inputs.x.dtype, call.epsilon))
    rest, rstd = found
    out = apply_parameters(call, (centred - rest) * rstd, inputs)
    if not call.save_residuals:
        return LayerNormOutputs(out)
    return LayerNormOutputs(out, mean[..., 0], rstd[..., 0])


def backward(
    call: LayerNormCall, inputs: LayerNormInputs, outputs: LayerNormOutputs, cotangents: LayerNormOutputs, config: None
) -> LayerNormInputs:
    x, scale, offset = inputs
    grad = cotangents.out.astype(accumulator(x.dtype))
    rstd = outputs.rstd[..., None]
    centred = x.astype(grad.dtype) - outputs.mean[..., None]
    weighted = scaled(grad, scale, call.scale_offset)
    # one pass: what the mean's rounding left in the centred row, and the products without it
    rest, weight = mean_of_rows(centred), mean_of_rows(weighted)
    product = (mean_of_rows(weighted * (centred * rstd)) - rest * rstd * weight) * rstd
    normalised = (centred - rest) * rstd
    d_x = rstd * (weighted - weight) - normalised * product
    return LayerNormInputs(d_x.astype(x.dtype), parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
