"""Configs of the kernels that move rows."""

from __future__ import annotations

import dataclasses

from ejkernel.plugin import Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._capability import multiprocessors
from ejkernel_triton._rows.config import warps_for

_BLOCKS = (256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block: columns of one program, or of one step where a program has whole rows; a power of two.
    num_warps: warps per program.
    """

    block: int
    num_warps: int


def heuristic(tokens: int, width: int, target: Target) -> Config:
    """16 bytes of a row for each thread, and programs for every multiprocessor."""
    block = 1024
    while block > 256 and tokens * -(-width // block) < 2 * (multiprocessors(target) or 132):
        block //= 2
    return _sized(width, block, 8)


def space(tokens: int, width: int, target: Target) -> list[Config]:
    found = [_sized(width, block, each) for block in _BLOCKS for each in (8, 16)]
    return list(dict.fromkeys([heuristic(tokens, width, target), *found]))


def _sized(width: int, block: int, per_thread: int) -> Config:
    block = min(block, next_power_of_2(max(width, 1)))
    return Config(block, warps_for(block, per_thread))
