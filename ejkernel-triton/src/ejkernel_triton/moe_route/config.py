"""Configs of `moe_route`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.moe_route.interface import MoeRouteCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    tokens: of one program; a power of two.
    num_warps: warps per program.
    """

    tokens: int
    num_warps: int


def heuristic(call: MoeRouteCall, target: Target) -> Config:
    """Few tokens, so that a choice is among the values of one warp and even 1024 tokens fill the device."""
    return _sized(call, 512, 16)


def search_space(call: MoeRouteCall, target: Target) -> list[Config]:
    found = [_sized(call, *sizes) for sizes in ((256, 8), (512, 8), (1024, 8), (1024, 16), (2048, 16), (4096, 16))]
    return list(dict.fromkeys([heuristic(call, target), *found]))


def _sized(call: MoeRouteCall, elements: int, per_thread: int) -> Config:
    """Tiles of about so many logits."""
    block, rows = next_power_of_2(call.logits.shape[2]), call.logits.shape[0] * call.logits.shape[1]
    tokens = min(max(1, elements // block), next_power_of_2(max(rows, 1)))
    return Config(tokens, min(8, warps_for(tokens * block, per_thread)))


FORWARD = BACKWARD = ConfigSpace(Config, heuristic, search_space)
