"""Configs of `paged_cache_update`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2

_MAX_TILE = 8192
"""Elements of a tile of keys."""


@dataclasses.dataclass(frozen=True)
class PagedCacheUpdateConfig:
    """Attributes:
    heads: of a token that one program stores; a power of two.
    num_warps: warps per program.
    """

    heads: int
    num_warps: int


def _width(call: PagedCacheUpdateCall) -> int:
    return next_power_of_2(max(call.key.shape[3], call.value.shape[3]))


def heuristic(call: PagedCacheUpdateCall, target: Target) -> PagedCacheUpdateConfig:
    heads = max(1, min(next_power_of_2(call.key.shape[2]), 2048 // _width(call)))
    return PagedCacheUpdateConfig(heads, 1 << max(0, min(3, (heads * _width(call) // 256).bit_length() - 1)))


def search_space(call: PagedCacheUpdateCall, target: Target) -> list[PagedCacheUpdateConfig]:
    chosen = heuristic(call, target)
    heads = [1 << power for power in range(next_power_of_2(call.key.shape[2]).bit_length())]
    found = [
        PagedCacheUpdateConfig(heads, warps)
        for heads, warps in itertools.product(heads, (1, 2, 4, 8))
        if heads == 1 or heads * _width(call) <= min(_MAX_TILE, 2048 * warps)
    ]
    return found if chosen in found else [chosen, *found]


FORWARD = ConfigSpace(PagedCacheUpdateConfig, heuristic, search_space)
BACKWARD = FORWARD
