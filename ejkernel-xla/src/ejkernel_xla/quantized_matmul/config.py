"""Config of the quantized matmul on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import ConfigSpace, Target

_TILE_BYTES = {"cpu": 1 << 22}
_ACCELERATOR_TILE_BYTES = 1 << 27
"""Unpacked float32 weights that exist at one time."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulConfig:
    """How the weights are tiled.

    Attributes:
        block_n: columns of the result whose weights are unpacked at one time; rounded up to whole groups and words.
    """

    block_n: int

    def __post_init__(self) -> None:
        if self.block_n < 1:
            raise ValueError(f"block_n: got {self.block_n}, expected a value >= 1")


def heuristic(call: QuantizedMatmulCall, target: Target) -> QuantizedMatmulConfig:
    """As many columns as fit the tile, in blocks of about one size; all of them if they fit."""
    inner = max(call.x.shape[2], 1)
    most = max(_TILE_BYTES.get(target.backend, _ACCELERATOR_TILE_BYTES) // (4 * inner), 1)
    blocks = max(-(-call.columns // most), 1)
    return QuantizedMatmulConfig(max(-(-call.columns // blocks), 1))


def search_space(call: QuantizedMatmulCall, target: Target) -> tuple[QuantizedMatmulConfig, ...]:
    chosen = heuristic(call, target).block_n
    return tuple(QuantizedMatmulConfig(block) for block in sorted({max(chosen // 2, 1), chosen, 2 * chosen}))


CONFIGS = ConfigSpace(QuantizedMatmulConfig, heuristic, search_space)
