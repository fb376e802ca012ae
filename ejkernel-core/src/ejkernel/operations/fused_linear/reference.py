"""`fused_linear` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.common.rows.reference import mean_of_rows, parameter_gradient
from ejkernel.operations.fused_linear.interface import FusedLinearCall, FusedLinearInputs, FusedLinearOutputs
from ejkernel.operations.gated_linear_unit.interface import GatedLinearUnitCall
from ejkernel.operations.gated_linear_unit.reference import activated


def _normed(call: FusedLinearCall, inputs: FusedLinearInputs) -> tuple[Any, Any, Any]:
    """norm(x), x over its root mean square, and that root's inverse; x where there is no norm."""
    if inputs.norm_scale is None:
        return inputs.x, None, None
    rstd = 1 / np.sqrt(mean_of_rows(inputs.x**2) + call.epsilon)
    normalised = inputs.x * rstd
    return normalised * (per_row(inputs.norm_scale, 3) + call.scale_offset), normalised, rstd


def _product(call: FusedLinearCall, inputs: FusedLinearInputs, normed: Any) -> Any:
    product = normed @ inputs.weight.swapaxes(1, 2)
    return product if inputs.bias is None else product + per_row(inputs.bias, 3)


def _activated(call: FusedLinearCall, gate: Any) -> tuple[np.ndarray, np.ndarray]:
    """The activation and its derivative."""
    return activated(GatedLinearUnitCall(gate=call.x, activation=call.activation or "silu"), gate)


def forward(call: FusedLinearCall, inputs: FusedLinearInputs) -> FusedLinearOutputs:
    out = _product(call, inputs, _normed(call, inputs)[0])
    if call.activation is not None:
        gate, up = np.split(out, 2, axis=2)
        out = _activated(call, gate)[0] * up
    return FusedLinearOutputs(out if inputs.residual is None else out + inputs.residual)


def backward(
    call: FusedLinearCall, inputs: FusedLinearInputs, outputs: FusedLinearOutputs, cotangents: FusedLinearOutputs
) -> FusedLinearInputs:
    normed, normalised, rstd = _normed(call, inputs)
    grad = cotangents.out
    if call.activation is not None:
        gate, up = np.split(_product(call, inputs, normed), 2, axis=2)
        value, slope = _activated(call, gate)
        grad = np.concatenate([grad * up * slope, grad * value], axis=2)
    d_weight = grad.swapaxes(1, 2) @ normed
    if inputs.weight.shape[0] != d_weight.shape[0]:
        d_weight = d_weight.sum(axis=0, keepdims=True)
    d_x, d_scale = grad @ inputs.weight, None
    if inputs.norm_scale is not None:
        d_scale = parameter_gradient(inputs.norm_scale, d_x * normalised)
        weighted = d_x * (per_row(inputs.norm_scale, 3) + call.scale_offset)
        d_x = rstd * (weighted - normalised * mean_of_rows(weighted * normalised))
    d_bias = parameter_gradient(inputs.bias, grad)
    return FusedLinearInputs(d_x, d_weight, d_scale, d_bias, None if inputs.residual is None else cotangents.out)
