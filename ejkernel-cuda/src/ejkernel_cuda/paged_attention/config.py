"""Performance knobs of `paged_attention`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._capability import head_room, multiprocessors, shared_memory_limit

WARPS = 4
"""Of a block."""
ROWS = 16
"""Query heads of a tile under each of its key heads, all of one token."""
TOGETHER = (1, 2, 4)
STAGES = (2, 3, 4, 5, 6, 7, 8)
_PAGES_WITHIN_HEADS = "hptd"
_HEADS_APART = ("phtd", _PAGES_WITHIN_HEADS)
"""Layouts in which a page's keys of one head lie side by side."""
_BOX_CAPABILITIES = ((9, 0), (10, 0))
"""What the library has code for that copies boxes."""
_BOX_SIZE = 128
"""Elements of a head that is copied in boxes."""
_ACCESS = 16
"""Bytes that rows of boxes begin at multiples of."""
_BOX_TOKENS = 8
"""Of the smallest box; pages must be multiples of it."""
_RESIDENT_BOXES = 2
"""Blocks that registers have room for beside one of the merge."""
_SPARED = 0.9
"""Of the workers that run at once, the least that are tried."""
_BESIDE = 10 * 1024
"""Bytes of shared memory at most beside the rings: wide queries and notes."""


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """Attributes:
    stages: steps of a warp's ring, of 16 keys and values each, or 32 of one byte, of which all but one are on their way; 2 ... 8,
        fewer where shared memory ends.
    workers: blocks that the keys of all requests are shared among, at most; never more run than fit on the device at once.
    together: key heads that a block reads side by side, 1, 2 or in boxes 4, as many as divide all; more than 1 only of heads of up
        to 128 one-byte elements.
    boxes: whether the tensor memory accelerator copies keys and values, from compute capability 9.0 on: one-byte heads of 128, up
        to 8 query heads over each, pages whose size is a multiple of 8. Stages are then of all warps of a block.
    """

    stages: int
    workers: int
    together: int = 1
    boxes: bool = False

    def __post_init__(self) -> None:
        if self.stages not in STAGES or self.workers < 1 or self.together not in TOGETHER:
            raise ValueError(
                f"{self}: stages are {STAGES[0]} ... {STAGES[-1]}, workers at least 1 and together one of {TOGETHER}"
            )
        if self.together == TOGETHER[-1] and not self.boxes:
            raise ValueError(f"{self}: together is {TOGETHER[-1]} in boxes only")


def width(call: PagedAttentionCall) -> int:
    """Elements that the kernel makes room for in a head."""
    return head_room(call.query.shape[3], call.value_size)


def _itemsize(call: PagedAttentionCall) -> int:
    return 2 if call.key_pages.dtype in ("bfloat16", "float16") else 1


def _narrow(call: PagedAttentionCall) -> bool:
    """Rows of 128 bytes and less of one-byte types: a key brings little work, and little is read at once."""
    return _itemsize(call) == 1 and width(call) <= 128


def keys_of_step(call: PagedAttentionCall) -> int:
    """Keys of one key head that a warp takes at once, the unit in which they are dealt out."""
    return 32 if _narrow(call) else 16


def stage_bytes(call: PagedAttentionCall) -> int:
    """Of one step of all rings of a block."""
    return 2 * WARPS * keys_of_step(call) * width(call) * _itemsize(call)


def head_tiles(call: PagedAttentionCall) -> int:
    """Tiles of one token."""
    return call.heads * -(-(call.query.shape[2] // call.heads) // ROWS)


def most_steps(call: PagedAttentionCall) -> int:
    """Steps of all tiles, where every request is as long as its table; one more where a window begins within a step."""
    return call.query.shape[0] * call.query.shape[1] * head_tiles(call) * (-(-call.longest // keys_of_step(call)) + 1)


def least_bytes(call: PagedAttentionCall) -> int:
    """Of shared memory."""
    return STAGES[0] * stage_bytes(call) + _BESIDE


def togethers(call: PagedAttentionCall) -> list[int]:
    """Numbers of key heads that a block may read side by side where threads copy them."""
    return [count for count in TOGETHER[:-1] if call.heads % count == 0 and (count == 1 or _narrow(call))]


def boxed_togethers(call: PagedAttentionCall, target: Target) -> list[int]:
    """The same where the tensor memory accelerator copies them; none where it cannot."""
    sizes, pages = (call.query.shape[3], call.value_size), call.pages
    if target.capability not in _BOX_CAPABILITIES or _itemsize(call) > 1 or set(sizes) != {_BOX_SIZE} or not _few_rows(call):
        return []
    if pages.page_size % _BOX_TOKENS or not pages.page_size or not pages.pages or call.layout == _PAGES_WITHIN_HEADS:
        return []
    if pages.head_size % _ACCESS:  # with padding
        return []
    return [count for count in TOGETHER if call.heads % count == 0 and (count == 1 or call.layout not in _HEADS_APART)]


def _few_rows(call: PagedAttentionCall) -> bool:
    return call.query.shape[2] // call.heads <= ROWS // 2


def part_shape(call: PagedAttentionCall, config: PagedAttentionConfig) -> tuple[int, ...]:
    """Of what blocks leave for the merge: of two tiles each, which of them or of their warps, query heads, elements."""
    each = WARPS // config.together if _narrow(call) and width(call) == 128 and _few_rows(call) else 1
    rows = config.together * min(call.query.shape[2] // call.heads, ROWS)
    return config.workers, 2, each, rows, width(call)


def _resident(call: PagedAttentionCall) -> int:
    """Blocks that the registers of a multiprocessor have room for; half as many rows of queries need fewer."""
    return 3 if width(call) == 64 or (_narrow(call) and _few_rows(call)) else 2


def _workers(call: PagedAttentionCall, target: Target, resident: int, together: int) -> list[int]:
    """As many as run at once, then a few less that tiles of one length are dealt out to evenly: no share has parts of two."""
    tiles = max(1, call.query.shape[0] * call.query.shape[1] * head_tiles(call) // together)
    most = max(1, min(resident * multiprocessors(target), -(-most_steps(call) // WARPS)))
    even = -(-tiles // -(-tiles // most)) if tiles > most else tiles * (most // tiles)
    return [most, even] if _SPARED * most <= even < most else [most]


def _together(call: PagedAttentionCall, target: Target) -> tuple[int, bool]:
    """Of key heads side by side, and whether in boxes: as many as there can be, unless those are rows of 128 bytes with others'
    between them, which threads copy faster."""
    apart = call.layout in _HEADS_APART
    boxed = max(boxed_togethers(call, target), default=0)
    if boxed > 1 or (boxed == call.heads and not apart):
        return boxed, True
    return 1 if apart else max(togethers(call)), False


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """As many blocks as registers have room for, or a few less that leave tiles whole; then rings as long as shared memory has.

    Where threads copy, two key heads side by side: longer runs cost warps more waiting for each other than the memory gains. On an
    H200 64 requests of 4096 tokens in float8 took 139 us with 256 workers, each of which had a whole tile, and 148 us with 264. On
    an H100 boxes of four heads took 97.0 us for one request of 131072 tokens, of two 98.5, of one 114, threads 99.1.
    """
    room, step = shared_memory_limit(target), stage_bytes(call)
    resident = max(1, min(3 if width(call) == 64 else 2, room // least_bytes(call)))
    stages = min(max((room // resident - _BESIDE) // step, STAGES[0]), STAGES[-1])
    together, boxes = _together(call, target)
    return PagedAttentionConfig(stages, _workers(call, target, resident, together)[-1], together, boxes)


def search_space(call: PagedAttentionCall, target: Target) -> list[PagedAttentionConfig]:
    room, step = shared_memory_limit(target), stage_bytes(call)
    ways = [(together, False, _resident(call)) for together in togethers(call)]
    ways += [(together, True, _RESIDENT_BOXES) for together in boxed_togethers(call, target)]
    found = [
        PagedAttentionConfig(stages, workers, together, boxes)
        for together, boxes, most in ways
        for resident in range(1, most + 1)
        for workers in _workers(call, target, resident, together)
        for stages in STAGES
        if stages == STAGES[0] or resident * (stages * step + _BESIDE) <= room
    ]
    return list(dict.fromkeys([heuristic(call, target), *found]))


FORWARD = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
