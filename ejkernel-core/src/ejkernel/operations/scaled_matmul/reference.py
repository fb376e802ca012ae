"""`scaled_matmul` in NumPy float64."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall, ScaledMatmulInputs, ScaledMatmulOutputs


def _unscaled(call: ScaledMatmulCall, inputs: ScaledMatmulInputs) -> np.ndarray:
    rhs = inputs.rhs.swapaxes(1, 2) if call.transpose_rhs else inputs.rhs
    return inputs.lhs.astype(np.float64) @ rhs.astype(np.float64)


def forward(call: ScaledMatmulCall, inputs: ScaledMatmulInputs) -> ScaledMatmulOutputs:
    return ScaledMatmulOutputs(_unscaled(call, inputs) * inputs.lhs_scale[:, :, None] * inputs.rhs_scale[:, None, :])


def backward(
    call: ScaledMatmulCall, inputs: ScaledMatmulInputs, outputs: ScaledMatmulOutputs, cotangents: ScaledMatmulOutputs
) -> ScaledMatmulInputs:
    weighted = cotangents.out * _unscaled(call, inputs)
    per_row = np.sum(weighted * inputs.rhs_scale[:, None, :], axis=2)
    per_column = np.sum(weighted * inputs.lhs_scale[:, :, None], axis=1)
    return ScaledMatmulInputs(None, None, _shared(per_row, inputs.lhs_scale), _shared(per_column, inputs.rhs_scale))


def _shared(gradient: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Summed over what shares a scale."""
    axes = tuple(axis for axis in (0, 1) if scale.shape[axis] != gradient.shape[axis])
    return gradient.sum(axis=axes, keepdims=True)
