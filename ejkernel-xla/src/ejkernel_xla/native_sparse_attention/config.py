"""Tile size of block-sparse attention on XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_CPU_NUMBERS = 2**21
_ACCELERATOR_NUMBERS = 2**27
"""Gathered keys, values and scores of one tile: what stays in a CPU's cache, or a small part of an accelerator's memory."""


@dataclasses.dataclass(frozen=True)
class NativeSparseAttentionConfig:
    """`block_q`: queries of one tile, in both phases."""

    block_q: int

    def __post_init__(self) -> None:
        if self.block_q < 1:
            raise ValueError(f"block_q: got {self.block_q}, expected a value >= 1")


def heuristic(call: NativeSparseAttentionCall, target: Target) -> NativeSparseAttentionConfig:
    """As many queries as the numbers that are gathered for them allow."""
    batch, _, heads, size = call.query.shape
    gathered = call.key.shape[2] * (size + call.value.shape[3]) + heads
    per_query = max(batch * call.block_indices.shape[3] * call.block_size * gathered, 1)
    numbers = _CPU_NUMBERS if target.backend == "cpu" else _ACCELERATOR_NUMBERS
    return NativeSparseAttentionConfig(min(max(1 << max(numbers // per_query, 1).bit_length() - 1, 1), 512))


def search_space(call: NativeSparseAttentionCall, target: Target) -> Sequence[NativeSparseAttentionConfig]:
    """The heuristic's choice; a quarter to four times as much, and no more than the length."""
    chosen, length = heuristic(call, target), max(call.query.shape[1], 1)
    sizes = {min(max(int(chosen.block_q * factor), 1), length) for factor in (0.25, 0.5, 1, 2, 4)} | {min(8, length)}
    return tuple(dict.fromkeys([chosen, *(NativeSparseAttentionConfig(size) for size in sorted(sizes))]))


CONFIGS = ConfigSpace(NativeSparseAttentionConfig, heuristic, search_space)
