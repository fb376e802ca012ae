"""Root-mean-square normalisation by the kernels of `_rows`."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel_cuda._rows.config import BackwardConfig, ForwardConfig
from ejkernel_cuda._rows.kernel import norm_backward, norm_forward


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: ForwardConfig) -> RmsNormOutputs:
    found = norm_forward("rms_norm", call, inputs, config)
    return RmsNormOutputs(found.out, found.rstd)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: BackwardConfig
) -> RmsNormInputs:
    return norm_backward("rms_norm", call, inputs, None, outputs.rstd, cotangents.out, config)
