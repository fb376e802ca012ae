"""`grouped_matmul` in NumPy float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs


def _groups(inputs: GroupedMatmulInputs) -> Iterator[tuple[int, int, int, slice]]:
    """Row of the batch, row of rhs's batch, matrix and rows of lhs, for every group whose matrix is here."""
    for row in range(inputs.lhs.shape[0]):
        shared = row % inputs.rhs.shape[0]
        ends = np.cumsum(inputs.group_sizes[row % len(inputs.group_sizes)])
        offset = 0 if inputs.group_offset is None else int(inputs.group_offset[row % len(inputs.group_offset)])
        for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=False)):
            if 0 <= group - offset < inputs.rhs.shape[1]:
                yield row, shared, group - offset, slice(start, end)


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs) -> GroupedMatmulOutputs:
    rhs = inputs.rhs.swapaxes(-1, -2) if call.transpose_rhs else inputs.rhs
    shape = (*inputs.lhs.shape[:2], call.columns)
    out = np.zeros(shape) if inputs.existing_out is None else inputs.existing_out.copy()
    for row, shared, matrix, rows in _groups(inputs):
        out[row, rows] = inputs.lhs[row, rows] @ rhs[shared, matrix]
    return GroupedMatmulOutputs(out)


def backward(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, outputs: GroupedMatmulOutputs, cotangents: GroupedMatmulOutputs
) -> GroupedMatmulInputs:
    rhs = inputs.rhs.swapaxes(-1, -2) if call.transpose_rhs else inputs.rhs
    d_lhs, d_rhs, d_existing = np.zeros(inputs.lhs.shape), np.zeros(rhs.shape), cotangents.out.copy()
    for row, shared, matrix, rows in _groups(inputs):
        grad = cotangents.out[row, rows]
        d_lhs[row, rows] = grad @ rhs[shared, matrix].T
        d_rhs[shared, matrix] += inputs.lhs[row, rows].T @ grad
        d_existing[row, rows] = 0
    return GroupedMatmulInputs(
        d_lhs,
        d_rhs.swapaxes(-1, -2) if call.transpose_rhs else d_rhs,
        None,
        None,
        None if inputs.existing_out is None else d_existing,
    )
