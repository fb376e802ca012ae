"""Each token gathers its rows; the gradient gathers tokens into rows, and forms a dot product for each weight."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.moe_unpermute.interface import MoeUnpermuteCall, MoeUnpermuteInputs, MoeUnpermuteOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._batch import over_batch
from ejkernel_xla._copies import collect, pick, sources, spread


def forward(call: MoeUnpermuteCall, inputs: MoeUnpermuteInputs, config: None) -> MoeUnpermuteOutputs:
    return MoeUnpermuteOutputs(collect(inputs.rows, inputs.positions, inputs.weights))


def backward(
    call: MoeUnpermuteCall,
    inputs: MoeUnpermuteInputs,
    outputs: MoeUnpermuteOutputs,
    cotangents: MoeUnpermuteOutputs,
    config: None,
) -> MoeUnpermuteInputs:
    rows, positions, weights = inputs
    d_rows = spread(cotangents.out, positions, sources(positions), weights)
    if weights is None:
        return MoeUnpermuteInputs(d_rows, None)  # pyright: ignore[reportArgumentType]
    wide = accumulator(rows.dtype)

    def dots(rows: Any, positions: Any, grad: Any) -> Any:
        columns = [
            jnp.sum(pick(rows, positions[:, choice]).astype(wide) * grad.astype(wide), axis=1)
            for choice in range(positions.shape[1])
        ]
        return jnp.where(positions >= 0, jnp.stack(columns, axis=1), jnp.zeros((), wide))

    d_weights = over_batch(dots, rows.shape[0], rows, positions, cotangents.out)
    if weights.shape[0] == 1:
        d_weights = jnp.sum(d_weights, axis=0, keepdims=True)
    return MoeUnpermuteInputs(d_rows, None, d_weights.astype(weights.dtype))  # pyright: ignore[reportArgumentType]
