"""`softmax` in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.operations.softmax.interface import SoftmaxCall, SoftmaxInputs, SoftmaxOutputs


def _masked(values: Any, where: Any, fill: float) -> Any:
    return values if where is None else np.where(where, values, fill)


def forward(call: SoftmaxCall, inputs: SoftmaxInputs) -> SoftmaxOutputs:
    hidden = np.isneginf(inputs.x)
    logits = np.where(hidden, -np.inf, call.scale * _masked(inputs.x, ~hidden, 0))
    logits = _masked(logits, inputs.where, -np.inf)
    largest = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    return SoftmaxOutputs(weights / np.where(total == 0, 1, total))


def backward(call: SoftmaxCall, inputs: SoftmaxInputs, outputs: SoftmaxOutputs, cotangents: SoftmaxOutputs) -> SoftmaxInputs:
    out, grad = outputs.out, _masked(cotangents.out, inputs.where, 0)
    return SoftmaxInputs(call.scale * out * (grad - np.sum(out * grad, axis=-1, keepdims=True)))
