"""Root-mean-square normalisation; XLA fuses each phase into one pass over the rows."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._rows import apply_parameters, normalise, parameter_gradient, rms_gradient, scaled


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: None) -> RmsNormOutputs:
    normalised, rstd = normalise(inputs.x, call.epsilon)
    return RmsNormOutputs(apply_parameters(call, normalised, inputs), rstd[..., 0] if call.save_residuals else None)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: None
) -> RmsNormInputs:
    x, scale, offset = inputs
    grad = cotangents.out.astype(accumulator(x.dtype))
    rstd = outputs.rstd[..., None]
    normalised = x.astype(grad.dtype) * rstd
    d_x = rms_gradient(normalised, rstd, scaled(grad, scale, call.scale_offset))
    return RmsNormInputs(d_x.astype(x.dtype), parameter_gradient(scale, grad * normalised), parameter_gradient(offset, grad))
