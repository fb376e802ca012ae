"""`fused_linear` of many rows, and its gradients: XLA's products between the kernels of `rms_norm` and `gated_linear_unit`."""

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
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import current_target
from ejkernel_triton.gated_linear_unit import config as unit_config, kernel as unit
from ejkernel_triton.rms_norm import config as norm_config, kernel as norm


def norm_call(call: FusedLinearCall) -> RmsNormCall | None:
    """Of the norm before the product, if there is one."""
    if call.norm_scale is None:
        return None
    return RmsNormCall(
        x=call.x, scale=call.norm_scale, epsilon=call.epsilon, scale_offset=call.scale_offset, save_residuals=True
    )


def unit_call(call: FusedLinearCall) -> GatedLinearUnitCall | None:
    """Of the gate after the product, if there is one."""
    if call.activation is None:
        return None
    return GatedLinearUnitCall(gate=ArraySpec((*call.x.shape[:2], 2 * call.columns), "float32"), activation=call.activation)


def forward(call: FusedLinearCall, inputs: FusedLinearInputs) -> FusedLinearOutputs:
    out = _product(inputs, _normed(call, inputs)[0])
    if gating := unit_call(call):
        out = unit.forward(gating, GatedLinearUnitInputs(out), unit_config.heuristic(gating, current_target())).out
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
    """The norm, and the product where the gate's derivative needs it, are formed anew."""
    x, weight, norm_scale, bias, residual = inputs
    normed, found = _normed(call, inputs)
    grad = cotangents.out.astype(jnp.float32)
    if gating := unit_call(call):
        choice, pulled = unit_config.heuristic(gating, current_target()), GatedLinearUnitOutputs(grad)
        grad = unit.backward(gating, GatedLinearUnitInputs(_product(inputs, normed)), pulled, pulled, choice).gate
    d_bias = None if bias is None else jnp.sum(grad, 1 if bias.shape[0] > 1 else (0, 1)).reshape(bias.shape).astype(bias.dtype)
    narrow = grad.astype(x.dtype)
    if weight.shape[0] == 1:
        d_weight, d_x = _dot("bmn,bmk->nk", narrow, normed)[None], _dot("bmn,nk->bmk", narrow, weight[0])
    else:
        d_weight, d_x = _dot("bmn,bmk->bnk", narrow, normed), _dot("bmn,bnk->bmk", narrow, weight)
    d_scale = None
    if found is not None and (norming := norm_call(call)):
        choice = norm_config.BACKWARD.heuristic(norming, current_target())
        d_x, d_scale, _ = norm.backward(norming, RmsNormInputs(x, norm_scale), found, RmsNormOutputs(d_x), choice)
    d_residual = None if residual is None else cotangents.out.astype(residual.dtype)
    return FusedLinearInputs(d_x.astype(x.dtype), d_weight.astype(weight.dtype), d_scale, d_bias, d_residual)


def _normed(call: FusedLinearCall, inputs: FusedLinearInputs) -> tuple[Any, RmsNormOutputs | None]:
    """What is multiplied, and what the norm has found."""
    norming = norm_call(call)
    if norming is None:
        return inputs.x, None
    choice = norm_config.FORWARD.heuristic(norming, current_target())
    found = norm.forward(norming, RmsNormInputs(inputs.x, inputs.norm_scale), choice)
    return found.out, found


def _product(inputs: FusedLinearInputs, normed: Any) -> Any:
    """`[b, m, n]` in float32; rows that share a weight are one product."""
    if inputs.weight.shape[0] == 1:
        out = _dot("bmk,nk->bmn", normed, inputs.weight[0])
    else:
        out = _dot("bmk,bnk->bmn", normed, inputs.weight)
    return out if inputs.bias is None else out + per_row(inputs.bias.astype(out.dtype), 3)


def _dot(subscripts: str, left: Any, right: Any) -> Any:
    """Summed in float32, and float32 operands are not rounded."""
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
