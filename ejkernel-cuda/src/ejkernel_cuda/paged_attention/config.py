"""Performance knobs of `paged_attention`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_cuda._capability import multiprocessors, padded_head_size, shared_memory_limit

WARPS = 4
"""Of a block."""
ROWS = 16
"""Query heads of a tile under each of its key heads, all of one token."""
TILE_KEY_HEADS = (1, 2, 4)
STAGES = (2, 3, 4, 5, 6, 7, 8)
_HPTD = "hptd"
_HEAD_MAJOR = ("phtd", _HPTD)
"""Layouts in which the tokens of one head are contiguous within a page."""
_TMA_CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities that the library has TMA code for."""
_TMA_HEAD_SIZE = 128
_VECTOR_BYTES = 16
"""TMA needs strides that are multiples of it."""
_MIN_BOX_TOKENS = 8
"""Tokens of the smallest TMA box; the page size must be a multiple of it."""
_RESIDENT_TMA_BLOCKS = 2
"""Blocks whose registers fit on a multiprocessor beside one block of the combine kernel."""
_MIN_OCCUPANCY = 0.9
"""The smallest share of the resident workers that the search space tries."""
_OTHER_SHARED_BYTES = 10 * 1024
"""Upper bound of a block's shared memory outside the ring buffers: wide queries and the warps' state."""


@renamed_knobs(stages="num_stages", together="tile_key_heads", boxes="tma")
@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """Attributes:
    num_stages: stages of a warp's ring buffer, 2 ... 8. A stage holds 16 keys and values, or 32 of one byte; all stages but one
        are in flight. The library takes fewer where shared memory is too small.
    workers: upper bound on the persistent CTAs that split the KV steps of all requests evenly (stream-K); never more run than the
        device holds at once.
    tile_key_heads: key heads of a tile: 1, 2 or, with `tma`, 4. It divides the number of key heads; more than 1 needs one-byte
        heads of up to 128 elements.
    tma: load KV pages by TMA instead of `cp.async`. Needs compute capability 9.0 or 10.0, one-byte heads of 128 elements, up to 8
        query heads per key head, and a page size that is a multiple of 8. All warps of a block then share one ring buffer.
    """

    num_stages: int
    workers: int
    tile_key_heads: int = 1
    tma: bool = False

    def __post_init__(self) -> None:
        if self.num_stages not in STAGES or self.workers < 1 or self.tile_key_heads not in TILE_KEY_HEADS:
            raise ValueError(
                f"{self}: num_stages is {STAGES[0]} ... {STAGES[-1]}, workers at least 1 and tile_key_heads one of {TILE_KEY_HEADS}"
            )
        if self.tile_key_heads == TILE_KEY_HEADS[-1] and not self.tma:
            raise ValueError(f"{self}: tile_key_heads={TILE_KEY_HEADS[-1]} needs tma=True")


def width(call: PagedAttentionCall) -> int:
    """The padded head size."""
    return padded_head_size(call.query.shape[3], call.value_size)


def _itemsize(call: PagedAttentionCall) -> int:
    return 2 if call.key_pages.dtype in ("bfloat16", "float16") else 1


def _narrow(call: PagedAttentionCall) -> bool:
    """One-byte heads of at most 128 bytes: a step takes more keys, and a tile may have several key heads."""
    return _itemsize(call) == 1 and width(call) <= 128


def keys_per_step(call: PagedAttentionCall) -> int:
    """Keys of one key head in a warp's step, the unit of the stream-K partition."""
    return 32 if _narrow(call) else 16


def stage_bytes(call: PagedAttentionCall) -> int:
    """Bytes of one stage of all ring buffers of a block."""
    return 2 * WARPS * keys_per_step(call) * width(call) * _itemsize(call)


def head_tiles(call: PagedAttentionCall) -> int:
    """Tiles of one token with one key head each."""
    return call.heads * -(-(call.query.shape[2] // call.heads) // ROWS)


def max_steps(call: PagedAttentionCall) -> int:
    """Steps of all tiles if every request fills its table; plus one, as a window may begin within a step."""
    return call.query.shape[0] * call.query.shape[1] * head_tiles(call) * (-(-call.longest // keys_per_step(call)) + 1)


def min_shared_bytes(call: PagedAttentionCall) -> int:
    """Bytes of shared memory of a block with the fewest stages."""
    return STAGES[0] * stage_bytes(call) + _OTHER_SHARED_BYTES


def tile_key_heads(call: PagedAttentionCall) -> list[int]:
    """Legal values of `tile_key_heads` with `cp.async` loads."""
    return [count for count in TILE_KEY_HEADS[:-1] if call.heads % count == 0 and (count == 1 or _narrow(call))]


def tma_tile_key_heads(call: PagedAttentionCall, target: Target) -> list[int]:
    """Legal values of `tile_key_heads` with TMA loads; none where TMA cannot load the pages."""
    sizes, pages = (call.query.shape[3], call.value_size), call.pages
    if (
        target.capability not in _TMA_CAPABILITIES
        or _itemsize(call) > 1
        or set(sizes) != {_TMA_HEAD_SIZE}
        or not _few_rows(call)
    ):
        return []
    if pages.page_size % _MIN_BOX_TOKENS or not pages.page_size or not pages.pages or call.layout == _HPTD:
        return []
    if pages.head_size % _VECTOR_BYTES:  # padded heads
        return []
    return [count for count in TILE_KEY_HEADS if call.heads % count == 0 and (count == 1 or call.layout not in _HEAD_MAJOR)]


def _few_rows(call: PagedAttentionCall) -> bool:
    return call.query.shape[2] // call.heads <= ROWS // 2


def partial_shape(call: PagedAttentionCall, config: PagedAttentionConfig) -> tuple[int, ...]:
    """Shape of the partial results: workers, their first and last tile, partial results per tile, rows, elements."""
    partials = WARPS // config.tile_key_heads if _narrow(call) and width(call) == 128 and _few_rows(call) else 1
    rows = config.tile_key_heads * min(call.query.shape[2] // call.heads, ROWS)
    return config.workers, 2, partials, rows, width(call)


def _resident(call: PagedAttentionCall) -> int:
    """Blocks whose registers fit on a multiprocessor; swapping A and B, for up to 8 query rows, needs fewer registers."""
    return 3 if width(call) == 64 or (_narrow(call) and _few_rows(call)) else 2


def _workers(call: PagedAttentionCall, target: Target, resident: int, key_heads: int) -> list[int]:
    """As many workers as are resident; then a few less, if no worker then has partial results of two tiles of equal length."""
    tiles = max(1, call.query.shape[0] * call.query.shape[1] * head_tiles(call) // key_heads)
    most = max(1, min(resident * multiprocessors(target), -(-max_steps(call) // WARPS)))
    even = -(-tiles // -(-tiles // most)) if tiles > most else tiles * (most // tiles)
    return [most, even] if _MIN_OCCUPANCY * most <= even < most else [most]


def _loads(call: PagedAttentionCall, target: Target) -> tuple[int, bool]:
    """`tile_key_heads` and `tma`: as many heads as possible. `cp.async` is faster for rows of 128 bytes that are not contiguous."""
    head_major = call.layout in _HEAD_MAJOR
    with_tma = max(tma_tile_key_heads(call, target), default=0)
    if with_tma > 1 or (with_tma == call.heads and not head_major):
        return with_tma, True
    return 1 if head_major else max(tile_key_heads(call)), False


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """As many workers as registers allow, or a few less that leave tiles whole; then as many stages as shared memory allows.

    `cp.async` loads take at most two key heads per tile: with more, the warps' barriers cost more than the longer rows gain.
    """
    room, step = shared_memory_limit(target), stage_bytes(call)
    resident = max(1, min(3 if width(call) == 64 else 2, room // min_shared_bytes(call)))
    stages = min(max((room // resident - _OTHER_SHARED_BYTES) // step, STAGES[0]), STAGES[-1])
    key_heads, tma = _loads(call, target)
    return PagedAttentionConfig(stages, _workers(call, target, resident, key_heads)[-1], key_heads, tma)


def search_space(call: PagedAttentionCall, target: Target) -> list[PagedAttentionConfig]:
    room, step = shared_memory_limit(target), stage_bytes(call)
    loads = [(key_heads, False, _resident(call)) for key_heads in tile_key_heads(call)]
    loads += [(key_heads, True, _RESIDENT_TMA_BLOCKS) for key_heads in tma_tile_key_heads(call, target)]
    found = [
        PagedAttentionConfig(stages, workers, key_heads, tma)
        for key_heads, tma, most in loads
        for resident in range(1, most + 1)
        for workers in _workers(call, target, resident, key_heads)
        for stages in STAGES
        if stages == STAGES[0] or resident * (stages * step + _OTHER_SHARED_BYTES) <= room
    ]
    return list(dict.fromkeys([heuristic(call, target), *found]))


FORWARD = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
