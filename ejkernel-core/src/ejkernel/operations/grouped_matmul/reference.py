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


def _per_matrix(inputs: GroupedMatmulInputs, row: int, matrix: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of one matrix, each `[n]` or a single number."""
    scale, bias = inputs.rhs_scale, inputs.bias
    return (
        np.ones(1) if scale is None else scale[row % len(scale), matrix],
        np.zeros(1) if bias is None else bias[row % len(bias), matrix],
    )


def _per_row(inputs: GroupedMatmulInputs, row: int, rows: slice) -> np.ndarray:
    """Scales of these rows `[rows, 1]`, or a single number."""
    scale = inputs.lhs_scale
    if scale is None:
        return np.ones((1, 1))
    own = scale[row % len(scale)]
    return (own[rows] if len(own) == inputs.lhs.shape[1] else own)[:, None]


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs) -> GroupedMatmulOutputs:
    rhs = inputs.rhs.swapaxes(-1, -2) if call.transpose_rhs else inputs.rhs
    shape = (*inputs.lhs.shape[:2], call.columns)
    out = np.zeros(shape) if inputs.existing_out is None else inputs.existing_out.copy()
    for row, shared, matrix, rows in _groups(inputs):
        scale, bias = _per_matrix(inputs, row, matrix)
        out[row, rows] = inputs.lhs[row, rows] @ rhs[shared, matrix] * _per_row(inputs, row, rows) * scale + bias
    return GroupedMatmulOutputs(out)


def backward(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, outputs: GroupedMatmulOutputs, cotangents: GroupedMatmulOutputs
) -> GroupedMatmulInputs:
    rhs = inputs.rhs.swapaxes(-1, -2) if call.transpose_rhs else inputs.rhs
    d_lhs, d_rhs, d_existing = np.zeros(inputs.lhs.shape), np.zeros(rhs.shape), cotangents.out.copy()
    d_scale = None if inputs.rhs_scale is None else np.zeros_like(inputs.rhs_scale)
    d_bias = None if inputs.bias is None else np.zeros_like(inputs.bias)
    d_row_scale = None if inputs.lhs_scale is None else np.zeros_like(inputs.lhs_scale)
    for row, shared, matrix, rows in _groups(inputs):
        lhs, grad = inputs.lhs[row, rows], cotangents.out[row, rows]
        (scale, _), row_scale = _per_matrix(inputs, row, matrix), _per_row(inputs, row, rows)
        d_lhs[row, rows] = (grad * row_scale * scale) @ rhs[shared, matrix].T
        d_rhs[shared, matrix] += lhs.T @ (grad * row_scale * scale)
        d_existing[row, rows] = 0
        if d_row_scale is not None:
            per_row = np.sum(grad * scale * (lhs @ rhs[shared, matrix]), axis=1)
            own = d_row_scale[row % len(d_row_scale)]
            if len(own) == inputs.lhs.shape[1]:
                own[rows] += per_row
            else:
                own += per_row.sum()
        if d_scale is not None:
            per_column = np.sum(grad * row_scale * (lhs @ rhs[shared, matrix]), axis=0)
            d_scale[row % len(d_scale), matrix] += per_column if d_scale.shape[2] == call.columns else per_column.sum()
        if d_bias is not None:
            d_bias[row % len(d_bias), matrix] += grad.sum(axis=0)
    return GroupedMatmulInputs(
        d_lhs,
        d_rhs.swapaxes(-1, -2) if call.transpose_rhs else d_rhs,
        None,
        None,
        None if inputs.existing_out is None else d_existing,
        d_scale,
        d_bias,
        d_row_scale,
    )
