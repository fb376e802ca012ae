"""Performance knobs of `paged_cache_update`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import ConfigSpace, Target

_THREADS = (32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class PagedCacheUpdateConfig:
    """Attributes:
    threads: of the block that stores one token.
    """

    threads: int


def heuristic(call: PagedCacheUpdateCall, target: Target) -> PagedCacheUpdateConfig:
    """Two 16-byte accesses of keys for each thread, all of which are read while the place of the token is looked up."""
    heads, size = call.key.shape[2:]
    packs = heads * size * (4 if call.key.dtype == "float32" else 2) // 16
    return PagedCacheUpdateConfig(next((threads for threads in _THREADS if 2 * threads >= packs), 256))


def search_space(call: PagedCacheUpdateCall, target: Target) -> list[PagedCacheUpdateConfig]:
    return [PagedCacheUpdateConfig(threads) for threads in _THREADS]


FORWARD = ConfigSpace(PagedCacheUpdateConfig, heuristic, search_space)
