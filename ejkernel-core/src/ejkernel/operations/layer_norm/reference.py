"""`layer_norm` in NumPy float64."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.common.rows.reference import apply_parameters, mean_of_rows, parameter_gradient
from ejkernel.operations.layer_norm.interface import LayerNormCall, LayerNormInputs, LayerNormOutputs


def forward(call: LayerNormCall, inputs: LayerNormInputs) -> LayerNormOutputs:
    x, scale, offset = inputs
    mean = mean_of_rows(x)
    rstd = 1 / np.sqrt(mean_of_rows((x - mean) ** 2) + call.epsilon)
    return LayerNormOutputs(apply_parameters(call, (x - mean) * rstd, scale, offset), mean[..., 0], rstd[..., 0])


def backward(
    call: LayerNormCall, inputs: LayerNormInputs, outputs: LayerNormOutputs, cotangents: LayerNormOutputs
) -> LayerNormInputs:
    x, scale, offset = inputs
    rstd, grad = outputs.rstd[..., None], cotangents.out
    normalised = (x - outputs.mean[..., None]) * rstd
    weighted = grad if scale is None else grad * (per_row(scale, x.ndim) + call.scale_offset)
    d_x = rstd * (weighted - mean_of_rows(weighted) - normalised * mean_of_rows(weighted * normalised))
    return LayerNormInputs(d_x, parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
