"""`moe_permute` in NumPy float64."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.moe_permute.interface import MoePermuteCall, MoePermuteInputs, MoePermuteOutputs


def forward(call: MoePermuteCall, inputs: MoePermuteInputs) -> MoePermuteOutputs:
    batch, tokens, width = inputs.x.shape
    choices = inputs.experts.shape[2]
    rows, sizes = np.zeros((batch, call.rows, width)), np.zeros((batch, call.num_experts), np.int32)
    positions = np.zeros((batch, call.rows), np.int32)
    for index in range(batch):
        experts = inputs.experts[index].reshape(-1)
        held = (experts >= 0) & (experts < call.num_experts)
        order = np.argsort(np.where(held, experts, call.num_experts), kind="stable")
        for row, copy in enumerate(order):
            positions[index, copy] = row if held[copy] else ~row
            if held[copy]:
                rows[index, row] = inputs.x[index, copy // choices]
        sizes[index] = np.bincount(experts[held], minlength=call.num_experts)
    return MoePermuteOutputs(rows, sizes, positions.reshape(batch, tokens, choices))


def backward(
    call: MoePermuteCall, inputs: MoePermuteInputs, outputs: MoePermuteOutputs, cotangents: MoePermuteOutputs
) -> MoePermuteInputs:
    d_x = np.zeros(inputs.x.shape)
    for batch, token, choice in np.argwhere(outputs.positions >= 0):
        d_x[batch, token] += cotangents.rows[batch, outputs.positions[batch, token, choice]]
    return MoePermuteInputs(d_x, None)  # pyright: ignore[reportArgumentType]
