"""`moe_unpermute` in NumPy float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.operations.moe_unpermute.interface import MoeUnpermuteCall, MoeUnpermuteInputs, MoeUnpermuteOutputs


def _copies(inputs: MoeUnpermuteInputs) -> Iterator[tuple[Any, Any, Any, float]]:
    """Where each copy's result goes, its row, where its weight stands, and the weight."""
    for batch in range(len(inputs.rows)):
        positions = inputs.positions[batch % len(inputs.positions)]
        for token, choice in np.argwhere(positions >= 0):
            weight, at = 1.0, (0, token, choice)
            if inputs.weights is not None:
                at = (batch % len(inputs.weights), token, choice)
                weight = inputs.weights[at]
            yield (batch, token), (batch, positions[token, choice]), at, weight


def forward(call: MoeUnpermuteCall, inputs: MoeUnpermuteInputs) -> MoeUnpermuteOutputs:
    out = np.zeros((len(inputs.rows), inputs.positions.shape[1], inputs.rows.shape[2]))
    for token, row, _, weight in _copies(inputs):
        out[token] += weight * inputs.rows[row]
    return MoeUnpermuteOutputs(out)


def backward(
    call: MoeUnpermuteCall, inputs: MoeUnpermuteInputs, outputs: MoeUnpermuteOutputs, cotangents: MoeUnpermuteOutputs
) -> MoeUnpermuteInputs:
    d_rows = np.zeros(inputs.rows.shape)
    d_weights = None if inputs.weights is None else np.zeros(inputs.weights.shape)
    for token, row, at, weight in _copies(inputs):
        d_rows[row] += weight * cotangents.out[token]
        if d_weights is not None:
            d_weights[at] += (inputs.rows[row] * cotangents.out[token]).sum()
    return MoeUnpermuteInputs(d_rows, None, d_weights)  # pyright: ignore[reportArgumentType]
