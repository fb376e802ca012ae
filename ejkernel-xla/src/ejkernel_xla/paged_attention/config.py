"""Config of paged attention on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_BLOCK_Q = 32


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How queries and keys are tiled.

    Attributes:
        block_q: new tokens of one request per tile.
        block_k: keys that a tile reads per step, of any number of pages.
        tiles_per_step: tiles that loop over their keys together; the longest determines the number of steps.
    """

    block_q: int
    block_k: int
    tiles_per_step: int

    def __post_init__(self) -> None:
        if min(self.block_q, self.block_k, self.tiles_per_step) < 1:
            raise ValueError(
                f"block_q, block_k, tiles_per_step: got {self.block_q}, {self.block_k}, {self.tiles_per_step}, expected values >= 1"
            )


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """One token per tile where there are no more tokens than requests: that is decoding. On a CPU a step's keys stay in cache."""
    tokens, requests = call.query.shape[1], max(call.kv_lens.shape[1], 1)
    decoding = tokens <= requests
    block_q = 1 if decoding else min(_BLOCK_Q, 1 << (tokens // requests).bit_length())
    if target.backend == "cpu":
        return PagedAttentionConfig(block_q, 256, 4 if block_q <= 8 else 1)
    return PagedAttentionConfig(block_q, 512, 64)


def search_space(call: PagedAttentionCall, target: Target) -> tuple[PagedAttentionConfig, ...]:
    chosen = heuristic(call, target)
    heights = sorted({1, chosen.block_q, min(2 * chosen.block_q, max(call.query.shape[1], 1))})
    return tuple(
        PagedAttentionConfig(height, keys, together)
        for height in heights
        for keys, together in ((chosen.block_k, chosen.tiles_per_step), (chosen.block_k // 2, 2 * chosen.tiles_per_step))
    )


CONFIGS = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
