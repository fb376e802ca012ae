"""Config of the quantized matmul on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import ConfigSpace, Target

_TILE_BYTES = {"cpu": 1 << 22}
_ACCELERATOR_TILE_BYTES = 1 << 27
"""Unpacked float32 weights that exist at one time."""
_MOST_TOGETHER = 64
"""Largest number of tiles per step."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulConfig:
    """How the weights are tiled.

    Attributes:
        block_n: columns of the result whose weights are unpacked at one time; rounded up to whole groups and words.
        block_m: with groups, rows per tile; every tile belongs to one group, and unpacks the weights of its group.
        tiles_per_step: with groups, tiles of one batched matmul.
    """

    block_n: int
    block_m: int = 64
    tiles_per_step: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected a value >= 1")


def heuristic(call: QuantizedMatmulCall, target: Target) -> QuantizedMatmulConfig:
    """As many columns as fit the tile, in blocks of about one size; all of them if they fit. Then as many tiles of rows, each about
    as tall as the mean group."""
    inner = max(call.x.shape[2], 1)
    weights = _TILE_BYTES.get(target.backend, _ACCELERATOR_TILE_BYTES) // (4 * inner)
    blocks = max(-(-call.columns // max(weights, 1)), 1)
    block_n = max(-(-call.columns // blocks), 1)
    if call.group_sizes is None:
        return QuantizedMatmulConfig(block_n)
    mean = call.x.shape[1] // max(call.matrices, 1)
    lowest, highest = (16, 128) if target.backend == "cpu" else (64, 1024)
    block_m = min(max(1 << max(mean - 1, 0).bit_length(), lowest), highest)
    together = 1 if target.backend == "cpu" else min(max(weights // block_n, 1), _MOST_TOGETHER)
    return QuantizedMatmulConfig(block_n, block_m, together)


def search_space(call: QuantizedMatmulCall, target: Target) -> tuple[QuantizedMatmulConfig, ...]:
    chosen = heuristic(call, target)
    found = [
        dataclasses.replace(chosen, block_n=size) for size in (max(chosen.block_n // 2, 1), chosen.block_n, 2 * chosen.block_n)
    ]
    if call.group_sizes is not None:
        found += [dataclasses.replace(chosen, block_m=size) for size in (max(chosen.block_m // 2, 8), 2 * chosen.block_m)]
        found.append(dataclasses.replace(chosen, tiles_per_step=1))
    return tuple(dict.fromkeys(found))


CONFIGS = ConfigSpace(QuantizedMatmulConfig, heuristic, search_space)
