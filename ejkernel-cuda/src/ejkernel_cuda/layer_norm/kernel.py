"""Layer normalisation by the kernels of `_rows`."""

from __future__ import annotations

from ejkernel.operations.layer_norm.interface import LayerNormCall, LayerNormInputs, LayerNormOutputs
from ejkernel_cuda._rows.config import BackwardConfig, ForwardConfig
from ejkernel_cuda._rows.kernel import norm_backward, norm_forward


def forward(call: LayerNormCall, inputs: LayerNormInputs, config: ForwardConfig) -> LayerNormOutputs:
    found = norm_forward("layer_norm", call, inputs, config, centred=True)
    return LayerNormOutputs(found.out, found.mean, found.rstd)


def backward(
    call: LayerNormCall,
    inputs: LayerNormInputs,
    outputs: LayerNormOutputs,
    cotangents: LayerNormOutputs,
    config: BackwardConfig,
) -> LayerNormInputs:
    return norm_backward("layer_norm", call, inputs, outputs.mean, outputs.rstd, cotangents.out, config)
