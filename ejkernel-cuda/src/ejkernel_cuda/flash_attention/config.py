"""Performance knobs of `flash_attention`.

Heads are computed as if they had 64, 128 or 256 elements, in tiles of 128, 128 or 80 keys; a block has three warpgroups of 64
queries each at 64 elements and two above.
"""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._capability import head_room, multiprocessors

_NARROW = 256
_FEW = 64
"""Tokens, which fill no more than a third or half of a block."""
_SAVED = 16
"""Tiles of keys, the least by which sharing must shorten the last round: parts take the time of 8 to 14 on an H200
(benchmarks/results/shared_blocks_cuda_h200.json)."""
_LEAST_SHARE = 4
"""Tiles of a program's share, as the library has it."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    take_turns: warpgroups issue their products one after the other, so that those of one run beside the exponentials of another.
    persistent: as many programs as multiprocessors, each with several blocks of queries, whose tiles are copied ahead from one
        block to the next, rather than one program per block.
    packed: rows of a block are the query heads of a key head, as many as `heads_side_by_side`, for fewer tokens, which see fewer
        keys than many tokens of one head.
    sharers: programs at most that share the keys of the blocks which are left after whole rounds of all programs, or of all blocks
        where those are fewer; 0 where blocks stay whole. Only with `persistent`.
    """

    take_turns: bool
    persistent: bool
    packed: bool = False
    sharers: int = 0

    def __post_init__(self) -> None:
        if self.sharers < 0 or (self.sharers and not self.persistent):
            raise ValueError(f"{self}: sharers must not be negative, and 0 without persistent programs")


def band(call: FlashAttentionCall) -> tuple[int, int]:
    """`(below, above)`: query i sees keys i - below ... i + above.

    Beyond the farthest pair a limit has no effect, and what is smaller fits into 32 bits.
    """
    left, right = call.window or (None, None)
    if call.causal:
        right = 0 if right is None else min(right, 0)
    farthest = call.query.shape[1] + call.key.shape[1] + abs(call.query_offset)
    below, above = (farthest if side is None else min(side, farthest) for side in (left, right))
    return below - call.query_offset, above + call.query_offset


def block_shape(call: FlashAttentionCall) -> tuple[int, int]:
    """Queries of a block, and elements that it makes room for in a head."""
    size = head_room(call.query.shape[3], call.value.shape[3])
    return 192 if size == 64 else 128, size


def heads_side_by_side(call: FlashAttentionCall) -> int:
    """The largest power of two up to 64 that divides the query heads of a key head."""
    group = call.query.shape[2] // call.key.shape[2]
    return min(group & -group, 64)


def _saved_tiles(call: FlashAttentionCall, target: Target, pack: int) -> int:
    """Tiles of keys by which the longest block of the last round becomes shorter where all programs share that; 0 where they
    cannot, or where whole blocks are dealt out better as others end: under masks, where there is more than one round."""
    (batch, queries, heads, _), keys, (below, above) = call.query.shape, call.key.shape[1], band(call)
    rows, size = block_shape(call)
    tokens, tile, programs = rows // pack, 80 if size == 256 else 128, multiprocessors(target)
    total = batch * (heads // pack) * -(-queries // tokens)
    sees_all = below >= queries - 1 and above >= keys - 1
    if not total or (total >= programs and not sees_all):
        return 0
    firsts = range(1) if sees_all else range(0, queries, tokens)  # queries of blocks, which are alike where all see all
    lows = [min(max(first - below, 0), keys) // tile for first in firsts]
    highs = [-(-min(max(first + tokens + above, 0), keys) // tile) for first in firsts]
    left, shared = total % programs, max(highs[-1], lows[-1]) - lows[0]
    sharers = min(programs, left * shared // _LEAST_SHARE)
    if sharers <= left:
        return 0
    return max(high - low for low, high in zip(lows, highs, strict=True)) - -(-left * shared // sharers)


def _sharers(call: FlashAttentionCall, target: Target, packed: bool, least: int) -> int:
    pack = heads_side_by_side(call) if packed else 1
    return multiprocessors(target) if _saved_tiles(call, target, pack) >= least else 0


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """Heads are packed where tokens of one head would see few keys together, or are few. On an H200, programs that stay were faster
    where all blocks have equal work or little, by 1 to 29 %, and slower under causal masks and wide windows, by 1 to 55 %: what is
    dealt out in advance ends at different times. Turns gained 0.4 % at most and lost up to 3 %."""
    hides = call.causal or call.window is not None
    narrow = call.window_width is not None and call.window_width <= _NARROW
    packed = heads_side_by_side(call) > 1 and (narrow or call.query.shape[1] <= _FEW)
    sharers = _sharers(call, target, packed, _SAVED)
    return ForwardConfig(take_turns=False, persistent=narrow or not hides or sharers > 0, packed=packed, sharers=sharers)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    chosen, flags = forward_heuristic(call, target), (True, False)
    found = [
        ForwardConfig(take_turns, persistent, packed, sharers)
        for take_turns, persistent, packed in itertools.product(flags, flags, dict.fromkeys((chosen.packed, False)))
        for sharers in dict.fromkeys((0, _sharers(call, target, packed, 1) if persistent else 0))
    ]
    return list(dict.fromkeys([chosen, *found]))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
