"""Performance knobs of `paged_cache_update`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import ConfigSpace, Target

_THREADS = (256, 128, 512)
_TOKENS = (1, 2, 4, 8, 16, 32)
_BLOCKS = 640
"""Four per multiprocessor of a large device, so that some write while others look up pages."""


@dataclasses.dataclass(frozen=True)
class PagedCacheUpdateConfig:
    """Attributes:
    threads: threads of a block, a power of two, 32 ... 512; the library takes fewer if some would be idle.
    tokens: tokens that a block stores, 1 ... 32; one thread each looks up their pages in parallel.
    """

    threads: int
    tokens: int


def heuristic(call: PagedCacheUpdateCall, target: Target) -> PagedCacheUpdateConfig:
    share = call.key.shape[0] * call.key.shape[1] // _BLOCKS
    return PagedCacheUpdateConfig(_THREADS[0], max((tokens for tokens in _TOKENS if tokens <= share), default=1))


def search_space(call: PagedCacheUpdateCall, target: Target) -> list[PagedCacheUpdateConfig]:
    chosen = heuristic(call, target)
    return list(
        dict.fromkeys([chosen, *(PagedCacheUpdateConfig(threads, tokens) for threads in _THREADS for tokens in _TOKENS)])
    )


FORWARD = ConfigSpace(PagedCacheUpdateConfig, heuristic, search_space)
