"""`qk_norm_rope` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.common.rotary.reference import rotate, rotation_gradients
from ejkernel.operations.common.rows.interface import per_row
from ejkernel.operations.common.rows.reference import mean_of_rows, parameter_gradient
from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall, QkNormRopeInputs, QkNormRopeOutputs


def _factor(call: QkNormRopeCall, scale: Any) -> Any:
    return 1.0 if scale is None else per_row(scale, 4) + call.scale_offset


def forward(call: QkNormRopeCall, inputs: QkNormRopeInputs) -> QkNormRopeOutputs:
    def one(x: Any, scale: Any) -> tuple[Any, Any]:
        rstd = 1 / np.sqrt(mean_of_rows(x**2) + call.epsilon)
        return rotate(call, x * rstd * _factor(call, scale), inputs.cos, inputs.sin), rstd[..., 0]

    (query, query_rstd), (key, key_rstd) = one(inputs.query, inputs.query_scale), one(inputs.key, inputs.key_scale)
    return QkNormRopeOutputs(query, key, query_rstd, key_rstd)


def backward(
    call: QkNormRopeCall, inputs: QkNormRopeInputs, outputs: QkNormRopeOutputs, cotangents: QkNormRopeOutputs
) -> QkNormRopeInputs:
    def one(x: Any, scale: Any, rstd: Any, grad: Any) -> tuple[Any, Any, Any, Any]:
        factor, normalised = _factor(call, scale), x * rstd[..., None]
        grad, d_cos, d_sin = rotation_gradients(call, normalised * factor, inputs.cos, inputs.sin, grad)
        weighted = grad * factor
        d_x = rstd[..., None] * (weighted - normalised * mean_of_rows(weighted * normalised))
        return d_x, d_cos, d_sin, parameter_gradient(scale, grad * normalised)

    d_query, *of_query, d_query_scale = one(inputs.query, inputs.query_scale, outputs.query_rstd, cotangents.query)
    d_key, *of_key, d_key_scale = one(inputs.key, inputs.key_scale, outputs.key_rstd, cotangents.key)
    d_cos, d_sin = (first + second for first, second in zip(of_query, of_key, strict=True))
    return QkNormRopeInputs(d_query, d_key, d_cos, d_sin, d_query_scale, d_key_scale)
