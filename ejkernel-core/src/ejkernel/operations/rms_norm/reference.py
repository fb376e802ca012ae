"""`rms_norm` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs


def _per_row(parameter: Any, like: Any) -> Any:
    return parameter.reshape(parameter.shape[0], *[1] * (like.ndim - 2), parameter.shape[1])


def forward(call: RmsNormCall, inputs: RmsNormInputs) -> RmsNormOutputs:
    x, scale, offset = inputs
    rstd = 1 / np.sqrt(np.mean(x**2, axis=-1) + call.epsilon)
    out = x * rstd[..., None]
    if scale is not None:
        out = out * (_per_row(scale, x) + call.scale_offset)
    if offset is not None:
        out = out + _per_row(offset, x)
    return RmsNormOutputs(out, rstd)


def backward(call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs) -> RmsNormInputs:
    x, scale, offset = inputs
    rstd, grad = outputs.rstd[..., None], cotangents.out
    normalised = x * rstd
    weighted = grad if scale is None else grad * (_per_row(scale, x) + call.scale_offset)
    d_x = rstd * (weighted - normalised * np.mean(weighted * normalised, axis=-1, keepdims=True))

    def parameter_gradient(parameter: Any, per_element: Any) -> Any:
        if parameter is None:
            return None
        per_batch = per_element.sum(axis=tuple(range(1, x.ndim - 1)))
        return per_batch if parameter.shape[0] == x.shape[0] else per_batch.sum(axis=0, keepdims=True)

    return RmsNormInputs(d_x, parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
