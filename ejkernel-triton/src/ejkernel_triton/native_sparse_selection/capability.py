"""Which calls of `native_sparse_selection` these kernels run."""

from __future__ import annotations

from ejkernel.operations.native_sparse_selection.interface import NativeSparseSelectionCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_HEAD_SIZE = 256
MAX_BLOCKS = 2**14
MAX_ROWS = 2**30
"""Queries of all members of the batch, for each key head."""


def supports_forward(call: NativeSparseSelectionCall, target: Target) -> str | None:
    batch, length, _, size = call.query.shape
    entries, key_heads = call.means.shape[1:3]
    if size > MAX_HEAD_SIZE:
        return f"the query's head size {size} is above {MAX_HEAD_SIZE}, the widest that one program holds"
    if entries > MAX_BLOCKS:
        return f"{entries} blocks are above {MAX_BLOCKS}, the most that one program selects from"
    if batch * length * key_heads > MAX_ROWS:
        return f"{batch * length * key_heads} selections are above {MAX_ROWS}"
    return refusal(target, {"query": call.query, "means": call.means})
