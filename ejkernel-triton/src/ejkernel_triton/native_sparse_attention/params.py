"""What the kernels are compiled for, as one constant."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._numerics import DotPrecision, dot_precision

_MAX_ROWS = 64
"""Heads of a program's tile: as many rows as one warpgroup multiplies."""


@dataclasses.dataclass(frozen=True)
class Params:
    """Static facts of a call and of the tiles of one kernel.

    Attributes:
        heads, key_heads, groups: query heads, key heads, query heads of one key head.
        slots, block_s: entries of a query's list, and the power of two that holds them.
        block_size: tokens of a block, no more than there are.
        size, block_d, value_size, block_v: of heads, and the powers of two that hold them.
        block_g: query heads of a program whose query is fixed.
        block_k: keys of a step.
        scale: factor on the products.
        sequences: 0 without sequences, 1 if the batch shares them, 2 if each member has its own.
        precision: of products.
    """

    heads: int
    key_heads: int
    groups: int
    slots: int
    block_s: int
    block_size: int
    size: int
    block_d: int
    value_size: int
    block_v: int
    block_g: int
    block_k: int
    scale: float
    sequences: int
    precision: DotPrecision

    @property
    def tiles_of_heads(self) -> int:
        """Programs of one query and key head."""
        return -(-self.groups // self.block_g)


def params_of(call: NativeSparseAttentionCall, block_k: int) -> Params:
    _, length, heads, size = call.query.shape
    key_heads, value_size, slots = call.key.shape[2], call.value.shape[3], call.block_indices.shape[3]
    starts = call.sequence_starts
    return Params(
        heads=heads,
        key_heads=key_heads,
        groups=heads // key_heads,
        slots=slots,
        block_s=next_power_of_2(slots),
        block_size=min(call.block_size, length),
        size=size,
        block_d=dot_block(size),
        value_size=value_size,
        block_v=dot_block(value_size),
        block_g=min(dot_block(heads // key_heads), _MAX_ROWS),
        block_k=block_k,
        scale=call.softmax_scale,
        sequences=0 if starts is None else 1 if starts.shape[0] == 1 else 2,
        precision=dot_precision(None, call.query.dtype),
    )
