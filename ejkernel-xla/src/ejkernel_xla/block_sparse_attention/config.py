"""Block sizes of block-sparse attention on XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_CACHED_SCORES = 2**19
"""Scores of all heads that stay in a CPU's cache from one pass over a tile to the next."""


@dataclasses.dataclass(frozen=True)
class BlockSparseAttentionConfig:
    """Tokens of the blocks where the call brings no lists of its own; all are cut to the lengths of the call.

    Attributes:
        q_blocksize, kv_blocksize: queries and keys of one tile. Small tiles skip more and compute less at a time.
    """

    q_blocksize: int = 128
    kv_blocksize: int = 128

    def __post_init__(self) -> None:
        for name in ("q_blocksize", "kv_blocksize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a value >= 1")


def heuristic(call: BlockSparseAttentionCall, target: Target) -> BlockSparseAttentionConfig:
    """One tile of all heads should stay in cache on a CPU; an accelerator wants larger products."""
    block = 256
    if target.backend != "cpu":
        return BlockSparseAttentionConfig(block, block)
    while block > 64 and call.query.shape[2] * block * block > _CACHED_SCORES:
        block //= 2
    return BlockSparseAttentionConfig(block, block)


def search_space(call: BlockSparseAttentionCall, target: Target) -> Sequence[BlockSparseAttentionConfig]:
    """Square and oblong tiles around the heuristic."""
    sizes = (64, 128, 256) if target.backend == "cpu" else (128, 256, 512)
    pairs = [(q, k) for q in sizes for k in sizes if 1 / 2 <= q / k <= 2]
    return list(dict.fromkeys([heuristic(call, target), *(BlockSparseAttentionConfig(q, k) for q, k in pairs)]))


CONFIGS = ConfigSpace(BlockSparseAttentionConfig, heuristic, search_space)
