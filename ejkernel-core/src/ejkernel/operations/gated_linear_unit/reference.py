"""`gated_linear_unit` in NumPy float64."""

from __future__ import annotations

import math

import numpy as np

from ejkernel.operations.gated_linear_unit.interface import (
    GatedLinearUnitCall,
    GatedLinearUnitInputs,
    GatedLinearUnitOutputs,
)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def activated(call: GatedLinearUnitCall, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The activation and its derivative; at infinities their limits."""
    if call.activation == "relu":
        return np.where(x > 0, x, 0 * np.where(np.isnan(x), x, 0)), np.where(np.isnan(x), x, x > 0)
    if call.activation in ("sigmoid", "silu"):
        share = _sigmoid((call.alpha if call.activation == "silu" else 1) * x)
        slope = share * (1 - share)
    elif call.activation == "gelu":
        share = np.vectorize(lambda one: 0.5 * math.erfc(-one / math.sqrt(2)), otypes=[np.float64])(x)
        slope = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    else:
        factor = math.sqrt(2 / math.pi)
        share = _sigmoid(2 * factor * (x + 0.044715 * x**3))
        slope = 2 * factor * (1 + 3 * 0.044715 * x**2) * share * (1 - share)
        slope = np.where(np.isinf(x), 0, slope)
    if call.activation == "sigmoid":
        return share, slope
    slope = slope * (call.alpha if call.activation == "silu" else 1)
    return np.where(share == 0, share, x * share), share + np.where(slope == 0, slope, x * slope)


def _sides(call: GatedLinearUnitCall, inputs: GatedLinearUnitInputs) -> tuple[np.ndarray, np.ndarray]:
    if inputs.up is None:
        return inputs.gate[..., : call.width], inputs.gate[..., call.width :]
    return inputs.gate, inputs.up


def forward(call: GatedLinearUnitCall, inputs: GatedLinearUnitInputs) -> GatedLinearUnitOutputs:
    gate, up = _sides(call, inputs)
    if call.limit is not None:
        gate, up = np.minimum(gate, call.limit), np.clip(up, -call.limit, call.limit)
    return GatedLinearUnitOutputs(activated(call, gate)[0] * (up + call.up_offset))


def backward(
    call: GatedLinearUnitCall,
    inputs: GatedLinearUnitInputs,
    outputs: GatedLinearUnitOutputs,
    cotangents: GatedLinearUnitOutputs,
) -> GatedLinearUnitInputs:
    gate, up = _sides(call, inputs)
    moving_gate, moving_up = np.ones_like(gate), np.ones_like(up)
    if call.limit is not None:
        moving_gate, moving_up = ~(gate > call.limit), ~(np.abs(up) > call.limit)
        gate, up = np.minimum(gate, call.limit), np.clip(up, -call.limit, call.limit)
    value, slope = activated(call, gate)
    d_gate = np.where(moving_gate, cotangents.out * (up + call.up_offset) * slope, 0)
    d_up = np.where(moving_up, cotangents.out * value, 0)
    if inputs.up is None:
        return GatedLinearUnitInputs(np.concatenate([d_gate, d_up], axis=-1))
    return GatedLinearUnitInputs(d_gate, d_up)
