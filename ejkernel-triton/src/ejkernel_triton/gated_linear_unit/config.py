"""Configs of `gated_linear_unit`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.gated_linear_unit.interface import GatedLinearUnitCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block: elements of the result of one program; a power of two.
    num_warps: warps per program.
    """

    block: int
    num_warps: int


def heuristic(call: GatedLinearUnitCall, target: Target) -> Config:
    """Eight elements per thread, 16 bytes of a half."""
    return _sized(call, 1024, 4)


def search_space(call: GatedLinearUnitCall, target: Target) -> list[Config]:
    sizes = ((1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8))
    return list(dict.fromkeys([heuristic(call, target), *(_sized(call, *each) for each in sizes)]))


def _sized(call: GatedLinearUnitCall, block: int, num_warps: int) -> Config:
    """Packed rows are cut one by one, others as one vector."""
    elements = call.width if call.up is None else call.gate.size
    return Config(max(32, min(block, next_power_of_2(elements))), num_warps)


FORWARD = BACKWARD = ConfigSpace(Config, heuristic, search_space)
