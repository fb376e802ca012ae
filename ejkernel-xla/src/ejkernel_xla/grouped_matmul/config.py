"""Config of `grouped_matmul` on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import ConfigSpace, Target

_GATHERED_BYTES = 1 << 30
"""Memory limit of the matrices gathered for tiles of one step."""

_MOST_TOGETHER = 64
"""Largest number of tiles per step; on an H200 more did not help."""


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig:
    """How rows are cut into tiles.

    Attributes:
        block_m: rows per tile; every tile belongs to one group.
        tiles_per_step: tiles of one batched matmul.
    """

    block_m: int
    tiles_per_step: int

    def __post_init__(self) -> None:
        if self.block_m < 1 or self.tiles_per_step < 1:
            raise ValueError(f"block_m, tiles_per_step: got {self.block_m}, {self.tiles_per_step}, expected values >= 1")


def heuristic(call: GroupedMatmulCall, target: Target) -> GroupedMatmulConfig:
    """Tiles about as tall as the mean group; on a CPU one at a time, elsewhere as many as the copies of matrices allow."""
    mean = call.lhs.shape[1] // max(call.rhs.shape[1], 1)
    lowest, highest = (16, 128) if target.backend == "cpu" else (64, 1024)
    block_m = min(max(1 << max(mean - 1, 0).bit_length(), lowest), highest)
    matrix_bytes = max(call.rhs.nbytes // max(call.rhs.shape[0] * call.rhs.shape[1], 1), 1)
    together = 1 if target.backend == "cpu" else min(max(_GATHERED_BYTES // matrix_bytes, 1), _MOST_TOGETHER)
    return GroupedMatmulConfig(block_m, together)


def search_space(call: GroupedMatmulCall, target: Target) -> tuple[GroupedMatmulConfig, ...]:
    chosen = heuristic(call, target)
    heights = sorted({max(chosen.block_m // 2, 8), chosen.block_m, 2 * chosen.block_m})
    return tuple(GroupedMatmulConfig(height, together) for height in heights for together in {1, chosen.tiles_per_step})


CONFIGS = ConfigSpace(GroupedMatmulConfig, heuristic, search_space)
