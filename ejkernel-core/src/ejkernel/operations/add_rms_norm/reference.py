"""`add_rms_norm` in NumPy float64, where the sum needs no rounding."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall, AddRmsNormInputs, AddRmsNormOutputs
from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.common.rows.reference import apply_parameters, mean_of_rows, parameter_gradient


def forward(call: AddRmsNormCall, inputs: AddRmsNormInputs) -> AddRmsNormOutputs:
    total = inputs.x + inputs.residual
    rstd = 1 / np.sqrt(mean_of_rows(total**2) + call.epsilon)
    return AddRmsNormOutputs(apply_parameters(call, total * rstd, inputs.scale), total, rstd[..., 0])


def backward(
    call: AddRmsNormCall, inputs: AddRmsNormInputs, outputs: AddRmsNormOutputs, cotangents: AddRmsNormOutputs
) -> AddRmsNormInputs:
    rstd, grad, scale = outputs.rstd[..., None], cotangents.out, inputs.scale
    normalised = outputs.sum * rstd
    weighted = grad if scale is None else grad * (per_row(scale, grad.ndim) + call.scale_offset)
    d_sum = cotangents.sum + rstd * (weighted - normalised * mean_of_rows(weighted * normalised))
    return AddRmsNormInputs(d_sum, d_sum, parameter_gradient(scale, grad * normalised))
