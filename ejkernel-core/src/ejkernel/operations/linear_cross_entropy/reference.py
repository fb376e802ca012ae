"""`linear_cross_entropy` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.cross_entropy import reference as per_row
from ejkernel.operations.cross_entropy.interface import IGNORED, CrossEntropyInputs, CrossEntropyOutputs
from ejkernel.operations.linear_cross_entropy.interface import (
    LinearCrossEntropyCall,
    LinearCrossEntropyInputs,
    LinearCrossEntropyOutputs,
    per_row_inputs,
    row_cotangents,
)


def forward(call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs) -> LinearCrossEntropyOutputs:
    loss, lse, logit_sum = per_row.forward(call.per_row, per_row_inputs(inputs))
    s = call.label_smoothing
    loss = (1 - s) * loss + (s * (lse - logit_sum / call.vocabulary) if s else 0)
    weights = np.where(inputs.targets == IGNORED, 0, 1 if inputs.weights is None else inputs.weights)

    def total(rows: Any) -> Any:
        return np.where(weights == 0, 0, weights * rows).reshape(len(rows), rows[0].size).sum(1)

    penalty = call.z_loss * lse**2
    outputs = LinearCrossEntropyOutputs(total(loss + penalty), total(penalty) if call.z_loss else None)
    if not call.save_residuals:
        return outputs
    return LinearCrossEntropyOutputs(outputs.total, outputs.penalty, *_gradients(call, inputs, lse))


def backward(
    call: LinearCrossEntropyCall,
    inputs: LinearCrossEntropyInputs,
    outputs: LinearCrossEntropyOutputs,
    cotangents: LinearCrossEntropyOutputs,
) -> LinearCrossEntropyInputs:
    lse = per_row.forward(call.per_row, per_row_inputs(inputs)).lse

    def scaled(gradient: Any, array: Any) -> Any:
        if gradient is None:
            return None
        gradient = gradient * cotangents.total.reshape(-1, *[1] * (gradient.ndim - 1))
        return gradient.sum(0, keepdims=True) if array.shape[0] == 1 else gradient

    found = zip(_gradients(call, inputs, lse), (inputs.x, inputs.head, inputs.head_bias), strict=True)
    d_x, d_head, d_head_bias = (scaled(*pair) for pair in found)
    return LinearCrossEntropyInputs(d_x, None, d_head, d_head_bias)


def _gradients(call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs, lse: Any) -> tuple[Any, ...]:
    """Of the totals, by x, head and head_bias, for each member of the batch."""

    def of_each(array: Any) -> Any:
        return None if array is None else np.broadcast_to(array, (len(lse), *array.shape[1:]))

    d_rows = np.ones_like(lse) if inputs.weights is None else inputs.weights
    rows = CrossEntropyInputs(inputs.x, inputs.targets, of_each(inputs.head), of_each(inputs.head_bias))
    found = per_row.backward(call.per_row, rows, CrossEntropyOutputs(None, lse), row_cotangents(call, lse, d_rows))
    return found.x, found.head, found.head_bias
