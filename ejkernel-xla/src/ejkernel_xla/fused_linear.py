"""A linear layer with its norm, gate and residual addition on XLA: one product, and what XLA fuses around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import ArraySpec
from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.fused_linear.interface import FusedLinearCall, FusedLinearInputs, FusedLinearOutputs
from ejkernel.operations.gated_linear_unit.interface import (
    GatedLinearUnitCall,
    GatedLinearUnitInputs,
    GatedLinearUnitOutputs,
)
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla import gated_linear_unit
from ejkernel_xla._rows import normalise, parameter_gradient, rms_gradient, scaled


def _normed(call: FusedLinearCall, inputs: FusedLinearInputs) -> tuple[Any, Any, Any]:
    """norm(x) in its dtype, x over its root mean square, and that root's inverse; x where there is no norm."""
    if inputs.norm_scale is None:
        return inputs.x, None, None
    normalised, rstd = normalise(inputs.x, call.epsilon)
    return scaled(normalised, inputs.norm_scale, call.scale_offset).astype(inputs.x.dtype), normalised, rstd


def _dot(subscripts: str, left: Any, right: Any) -> Any:
    """Summed in the accumulator's dtype, and float32 operands are not rounded."""
    wide = accumulator(left.dtype)
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)


def _product(inputs: FusedLinearInputs, normed: Any) -> Any:
    """Rows share a weight: one product of all."""
    if inputs.weight.shape[0] == 1:
        out = _dot("bmk,nk->bmn", normed, inputs.weight[0])
    else:
        out = _dot("bmk,bnk->bmn", normed, inputs.weight)
    return out if inputs.bias is None else out + per_row(inputs.bias.astype(out.dtype), 3)


def _unit(call: FusedLinearCall, product: Any) -> tuple[GatedLinearUnitCall, GatedLinearUnitInputs]:
    spec = ArraySpec(product.shape, product.dtype.name)
    return GatedLinearUnitCall(gate=spec, activation=call.activation or "silu"), GatedLinearUnitInputs(product)


def forward(call: FusedLinearCall, inputs: FusedLinearInputs, config: None) -> FusedLinearOutputs:
    out = _product(inputs, _normed(call, inputs)[0])
    if call.activation is not None:
        out = gated_linear_unit.forward(*_unit(call, out), None).out
    if inputs.residual is not None:
        out = out + inputs.residual.astype(out.dtype)
    return FusedLinearOutputs(out.astype(call.x.dtype))


def backward(
    call: FusedLinearCall,
    inputs: FusedLinearInputs,
    outputs: FusedLinearOutputs,
    cotangents: FusedLinearOutputs,
    config: None,
) -> FusedLinearInputs:
    """The product is formed anew where an activation's derivative needs it."""
    x, weight, norm_scale, bias, residual = inputs
    normed, normalised, rstd = _normed(call, inputs)
    grad = cotangents.out.astype(accumulator(x.dtype))
    if call.activation is not None:
        unit = _unit(call, _product(inputs, normed))
        grad = gated_linear_unit.backward(*unit, GatedLinearUnitOutputs(grad), GatedLinearUnitOutputs(grad), None).gate
    d_bias = parameter_gradient(bias, grad)
    narrow = grad.astype(x.dtype)
    if weight.shape[0] == 1:
        d_weight, d_x = _dot("bmn,bmk->nk", narrow, normed)[None], _dot("bmn,nk->bmk", narrow, weight[0])
    else:
        d_weight, d_x = _dot("bmn,bmk->bnk", narrow, normed), _dot("bmn,bnk->bmk", narrow, weight)
    d_scale = None
    if norm_scale is not None:
        d_scale = parameter_gradient(norm_scale, d_x * normalised)
        d_x = rms_gradient(normalised, rstd, scaled(d_x, norm_scale, call.scale_offset))
    d_residual = None if residual is None else cotangents.out.astype(residual.dtype)
    return FusedLinearInputs(d_x.astype(x.dtype), d_weight.astype(weight.dtype), d_scale, d_bias, d_residual)
