"""Which calls of `native_sparse_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import refusal

MAX_HEAD_SIZE = 256
"""A program holds whole rows of a head, and in backward a tile of keys with both gradients."""
MAX_COUNT = 2**31 - 2**16
"""Tokens, entries of lists and programs have 32-bit indices, elements 64-bit offsets."""


def supports_forward(call: NativeSparseAttentionCall, target: Target) -> str | None:
    problem = refusal(target, {"query": call.query, "key": call.key, "value": call.value})
    if problem:
        return problem
    batch, length, heads, size = call.query.shape
    for name, width in (("query", size), ("value", call.value.shape[3])):
        if width > MAX_HEAD_SIZE:
            return f"the {name}'s head size {width} is above {MAX_HEAD_SIZE}, the widest that one program holds"
    slots = call.block_indices.shape[3]
    read = slots * min(call.block_size, max(length, 1))
    for name, count in (("rows of queries", batch * length * heads), ("keys of one query", read)):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    return None


def supports_backward(call: NativeSparseAttentionCall, target: Target) -> str | None:
    problem = supports_forward(call, target)
    if problem:
        return problem
    batch, length, heads, slots = call.block_indices.shape
    # A block lies in as many tiles of keys as it can touch, and each tile lists it.
    tiles = min(call.block_size, max(length, 1)) // MIN_DOT_SIZE + 2
    for name, count in (("tokens", batch * heads * (length + 1)), ("named blocks", batch * length * heads * slots * tiles)):
        if count > MAX_COUNT:
            return f"{count} {name} of all key heads are more than {MAX_COUNT}, which the lists of queries can number"
    return None
