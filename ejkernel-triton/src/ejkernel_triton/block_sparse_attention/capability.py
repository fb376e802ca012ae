"""Which calls of `block_sparse_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton.block_sparse_attention.problem import dense_call_of, needs_mask
from ejkernel_triton.flash_attention import capability

MAX_MASK = 2**30
"""Bytes of a dense mask that is made here, for rules and lists that the kernels cannot walk themselves."""


def supports_forward(call: BlockSparseAttentionCall, target: Target) -> str | None:
    return _mask_problem(call) or capability.supports_forward(dense_call_of(call), target)


def supports_backward(call: BlockSparseAttentionCall, target: Target) -> str | None:
    return _mask_problem(call) or capability.supports_backward(dense_call_of(call), target)


def _mask_problem(call: BlockSparseAttentionCall) -> str | None:
    mask = dense_call_of(call).mask
    if not needs_mask(call) or mask is None or mask.nbytes <= MAX_MASK:
        return None
    reason = "mask_builder" if call.mask_builder is not None else f"lists of {call.blocks[0]} x {call.blocks[1]} blocks"
    return f"{reason} would need a mask of {mask.nbytes} bytes, more than {MAX_MASK}"
