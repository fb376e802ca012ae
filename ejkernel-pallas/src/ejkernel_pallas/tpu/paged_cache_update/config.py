"""Configs of `paged_cache_update` on TPU."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.tpu._pages import ITEMSIZE, sources, stored_bytes
from ejkernel_pallas.tpu._vmem import memory_of

SLOTS = (8, 16, 32, 64, 128, 256)
_MAX_SLOTS = 128
_SLACK = 1 << 20


@renamed_knobs(places="slots")
@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    slots: token slots that a grid step writes; a power of two.
    """

    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slots & (self.slots - 1):
            raise ValueError(f"slots: got {self.slots}, expected a power of two")


def chunk_rows(call: PagedCacheUpdateCall) -> int:
    """Slots of a page that are copied together if they are rows of register tiles: a tile, or the whole page."""
    rows = 32 // ITEMSIZE[call.key_pages.dtype]
    return rows if call.pages.page_size % rows == 0 else call.pages.page_size


def chunks_of_step(call: PagedCacheUpdateCall, config: Config) -> int:
    return max(config.slots // chunk_rows(call), 1)


def blocks(call: PagedCacheUpdateCall, config: Config) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For every page array, the block of new tokens and the block that is stored."""
    found = []
    for source in sources(call):
        rows, width = source.rows, source.width
        if source.token_major:
            found.append(((config.slots, rows, width), (config.slots, *source.tail)))
        else:
            block = (chunks_of_step(call, config), rows, chunk_rows(call), width)
            found.append((block, block))
    return found


def vmem_bytes(call: PagedCacheUpdateCall, config: Config) -> int:
    """Upper bound of the VMEM."""
    total = _SLACK
    new_size = max(ITEMSIZE.get(spec.dtype, 4) for spec in (call.key, call.value))
    for new, stored in blocks(call, config):
        total += 2 * stored_bytes(new, new_size) + 2 * stored_bytes(stored, ITEMSIZE[call.key_pages.dtype])
        total += 6 * stored_bytes(new, 4) + 2 * stored_bytes(stored, 4)
    return total


def _fitting(call: PagedCacheUpdateCall, target: Target) -> list[Config]:
    configs = [Config(slots) for slots in SLOTS]
    return [config for config in configs if vmem_bytes(call, config) <= memory_of(target).vmem]


def heuristic(call: PagedCacheUpdateCall, target: Target) -> Config:
    """Many DMAs at once, at most as many slots as tokens."""
    tokens = max(call.key.shape[1], 1) * (1 if sources(call)[0].token_major else chunk_rows(call))
    wanted = min(_MAX_SLOTS, 1 << (tokens - 1).bit_length())
    fitting = _fitting(call, target) or [Config(SLOTS[0])]
    return max((config for config in fitting if config.slots <= max(wanted, SLOTS[0])), key=lambda config: config.slots)


def search_space(call: PagedCacheUpdateCall, target: Target) -> list[Config]:
    chosen = heuristic(call, target)
    found = [config for config in _fitting(call, target) if config.slots <= max(chosen.slots * 2, SLOTS[0])]
    return found if chosen in found else [chosen, *found]


FORWARD = ConfigSpace(Config, heuristic, search_space)
