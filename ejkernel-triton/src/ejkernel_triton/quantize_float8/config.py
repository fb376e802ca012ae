"""Configs of `quantize_float8`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.quantize_float8.interface import QuantizeFloat8Call
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block_m: rows of a tile; a power of two.
    block_k: columns of a tile; a power of two.
    num_warps: warps per program.
    """

    block_m: int
    block_k: int
    num_warps: int


SMALLEST = Config(32, 32, 4)


def tiles(call: QuantizeFloat8Call, config: Config) -> int:
    """Programs, one for each tile."""
    batch, rows, columns = call.x.shape
    return batch * -(-rows // config.block_m) * -(-columns // config.block_k)


def heuristic(call: QuantizeFloat8Call, target: Target) -> Config:
    """The fastest on an H200 (`quantize_float8_h200.json`): small tiles, so that several programs share a multiprocessor."""
    return _sized(call, 64, 64, 4) if call.transposed else _sized(call, 4, 1024, 4)


def search_space(call: QuantizeFloat8Call, target: Target) -> list[Config]:
    square = ((128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 64, 4), (64, 256, 8), (256, 64, 8))
    flat = ((16, 512, 4), (4, 1024, 4), (8, 1024, 8), (32, 256, 4))
    return list(dict.fromkeys(_sized(call, *each) for each in (square if call.transposed else flat)))


def _sized(call: QuantizeFloat8Call, block_m: int, block_k: int, num_warps: int) -> Config:
    """No larger than the matrix needs."""
    _, rows, columns = call.x.shape
    return Config(min(block_m, max(16, next_power_of_2(rows))), min(block_k, max(32, next_power_of_2(columns))), num_warps)


FORWARD = ConfigSpace(Config, heuristic, search_space)
