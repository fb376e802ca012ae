"""`rms_norm` in NumPy float64."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.common.rows.reference import apply_parameters, mean_of_rows, parameter_gradient
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs


def forward(call: RmsNormCall, inputs: RmsNormInputs) -> RmsNormOutputs:
    x, scale, offset = inputs
    rstd = 1 / np.sqrt(mean_of_rows(x**2) + call.epsilon)
    return RmsNormOutputs(apply_parameters(call, x * rstd, scale, offset), rstd[..., 0])


def backward(call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs) -> RmsNormInputs:
    x, scale, offset = inputs
    rstd, grad = outputs.rstd[..., None], cotangents.out
    normalised = x * rstd
    weighted = grad if scale is None else grad * (per_row(scale, x.ndim) + call.scale_offset)
    d_x = rstd * (weighted - normalised * mean_of_rows(weighted * normalised))
    return RmsNormInputs(d_x, parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
