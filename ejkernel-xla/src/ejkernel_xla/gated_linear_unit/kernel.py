"""Elementwise code that XLA fuses with what stands beside it; backward forms the activation again."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.gated_linear_unit.interface import (
    GatedLinearUnitCall,
    GatedLinearUnitInputs,
    GatedLinearUnitOutputs,
)
from ejkernel.utils.dtypes import accumulator


def _product(x: Any, share: Any) -> Any:
    """`x * share`, 0 where the share is, be x infinite."""
    return jnp.where(share == 0, 0, x * share)


def _activated(call: GatedLinearUnitCall, x: Any) -> tuple[Any, Any]:
    """The activation and its derivative."""
    if call.activation == "relu":
        return jnp.where(x <= 0, 0, x), jnp.where(jnp.isnan(x), x, (x > 0).astype(x.dtype))
    if call.activation in ("sigmoid", "silu"):
        share = jax.nn.sigmoid(x * call.alpha)
        slope = share * (1 - share) * call.alpha
        if call.activation == "sigmoid":
            return share, slope
    elif call.activation == "gelu":
        share = 0.5 * jax.lax.erfc(x * -math.sqrt(0.5))
        slope = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    else:
        factor = 2 * math.sqrt(2 / math.pi)
        square = x * x
        share = jax.nn.sigmoid(factor * x * (1 + 0.044715 * square))
        slope = _product(factor * (1 + 3 * 0.044715 * square), share * (1 - share))
    return _product(x, share), share + _product(x, slope)


def _sides(call: GatedLinearUnitCall, inputs: GatedLinearUnitInputs) -> tuple[Any, Any]:
    """gate and up in the accumulator's dtype."""
    gate, up = inputs
    if up is None:
        gate, up = gate[..., : call.width], gate[..., call.width :]
    wide = accumulator(gate.dtype)
    return gate.astype(wide), up.astype(wide)


def _limited(call: GatedLinearUnitCall, gate: Any, up: Any) -> tuple[Any, Any]:
    if call.limit is not None:
        gate, up = jnp.minimum(gate, call.limit), jnp.clip(up, -call.limit, call.limit)
    return gate, up + call.up_offset


def forward(call: GatedLinearUnitCall, inputs: GatedLinearUnitInputs, config: None) -> GatedLinearUnitOutputs:
    gate, up = _limited(call, *_sides(call, inputs))
    return GatedLinearUnitOutputs((_activated(call, gate)[0] * up).astype(inputs.gate.dtype))


def backward(
    call: GatedLinearUnitCall,
    inputs: GatedLinearUnitInputs,
    outputs: GatedLinearUnitOutputs,
    cotangents: GatedLinearUnitOutputs,
    config: None,
) -> GatedLinearUnitInputs:
    # else XLA finds parts of the forward again, as which shares are 0, and stores them between the two
    sides = _sides(call, GatedLinearUnitInputs(*jax.lax.optimization_barrier(tuple(inputs))))
    gate, up = _limited(call, *sides)
    value, slope = _activated(call, gate)
    grad = cotangents.out.astype(value.dtype)
    d_gate, d_up = grad * up * slope, grad * value
    if call.limit is not None:
        d_gate = jnp.where(sides[0] > call.limit, 0, d_gate)
        d_up = jnp.where(jnp.abs(sides[1]) > call.limit, 0, d_up)
    dtype = inputs.gate.dtype
    if inputs.up is None:
        return GatedLinearUnitInputs(jnp.concatenate([d_gate.astype(dtype), d_up.astype(dtype)], axis=-1))
    return GatedLinearUnitInputs(d_gate.astype(dtype), d_up.astype(dtype))
