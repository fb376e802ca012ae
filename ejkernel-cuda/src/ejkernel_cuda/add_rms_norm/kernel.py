"""Residual addition and root-mean-square normalisation by the kernels of `_rows`."""

from __future__ import annotations

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall, AddRmsNormInputs, AddRmsNormOutputs
from ejkernel.operations.common.rows.interface import NormInputs
from ejkernel_cuda._rows.config import BackwardConfig, ForwardConfig
from ejkernel_cuda._rows.kernel import norm_backward, norm_forward


def forward(call: AddRmsNormCall, inputs: AddRmsNormInputs, config: ForwardConfig) -> AddRmsNormOutputs:
    rows = NormInputs(inputs.x, inputs.scale)
    found = norm_forward("add_rms_norm", call, rows, config, residual=inputs.residual)
    return AddRmsNormOutputs(found.out, found.sum, found.rstd)


def backward(
    call: AddRmsNormCall,
    inputs: AddRmsNormInputs,
    outputs: AddRmsNormOutputs,
    cotangents: AddRmsNormOutputs,
    config: BackwardConfig,
) -> AddRmsNormInputs:
    rows = NormInputs(outputs.sum, inputs.scale)
    found = norm_backward("add_rms_norm", call, rows, None, outputs.rstd, cotangents.out, config, grad_sum=cotangents.sum)
    return AddRmsNormInputs(found.x, found.x, found.scale)
