"""`native_sparse_selection` in NumPy float64: one query and key head after the other."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.common.selected import NOTHING
from ejkernel.operations.native_sparse_selection.interface import (
    LARGEST,
    NativeSparseSelectionCall,
    NativeSparseSelectionInputs,
    NativeSparseSelectionOutputs,
)


def forward(call: NativeSparseSelectionCall, inputs: NativeSparseSelectionInputs) -> NativeSparseSelectionOutputs:
    batch, length, heads, _ = call.query.shape
    key_heads = call.means.shape[2]
    group = heads // key_heads
    blocks = np.full((batch, length, key_heads, call.count), NOTHING, np.int32)
    zeros = np.zeros((batch, length), np.int32)
    owns = zeros + inputs.own_blocks
    firsts = zeros if inputs.first_blocks is None else zeros + inputs.first_blocks
    for row, token, head in np.ndindex(*blocks.shape[:3]):
        own, first, members = owns[row, token], firsts[row, token], slice(head * group, (head + 1) * group)
        means = inputs.means[row, first : first + max(own + 1, 0), head]  # [n, d]
        with np.errstate(invalid="ignore", over="ignore"):
            logits = call.softmax_scale * (inputs.query[row, token, members] @ means.T)  # [g, n]
            weights = np.exp(logits - inputs.lse[row, token, members, None])
        scores = np.minimum(np.where(weights >= 0, weights, 0).sum(0), LARGEST)
        for rank, forced in enumerate((0, own - 1, own), 1):
            scores[max(forced, 0) : max(forced + 1, 0)] = LARGEST * 2.0**rank
        count = call.count if inputs.block_counts is None else inputs.block_counts[row, token, head]
        chosen = np.sort(np.argsort(-scores, kind="stable")[:count])
        blocks[row, token, head, : len(chosen)] = chosen
    return NativeSparseSelectionOutputs(blocks)
