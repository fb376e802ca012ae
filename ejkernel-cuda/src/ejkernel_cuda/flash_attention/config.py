"""Performance knobs of `flash_attention`.

Heads are computed as if they had 64, 128 or 256 elements, in tiles of 128, 128 or 80 keys; a block has three warpgroups of 64
queries each at 64 elements and two above.
"""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_NARROW = 256
_FEW = 64
"""Tokens, which fill no more than a third or half of a block."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    take_turns: warpgroups issue their products one after the other, so that those of one run beside the exponentials of another.
    persistent: as many programs as multiprocessors, each with several blocks of queries, whose tiles are copied ahead from one
        block to the next, rather than one program per block.
    packed: rows of a block are the query heads of a key head, as many as `heads_side_by_side`, for fewer tokens, which see fewer
        keys than many tokens of one head.
    """

    take_turns: bool
    persistent: bool
    packed: bool = False


def heads_side_by_side(call: FlashAttentionCall) -> int:
    """The largest power of two up to 64 that divides the query heads of a key head."""
    group = call.query.shape[2] // call.key.shape[2]
    return min(group & -group, 64)


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """Heads are packed where tokens of one head would see few keys together, or are few. On an H200, programs that stay were faster
    where all blocks have equal work or little, by 1 to 29 %, and slower under causal masks and wide windows, by 1 to 55 %: what is
    dealt out in advance ends at different times. Turns gained 0.4 % at most and lost up to 3 %."""
    hides = call.causal or call.window is not None
    narrow = call.window_width is not None and call.window_width <= _NARROW
    packed = heads_side_by_side(call) > 1 and (narrow or call.query.shape[1] <= _FEW)
    return ForwardConfig(take_turns=False, persistent=narrow or not hides, packed=packed)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    chosen = forward_heuristic(call, target)
    packed = dict.fromkeys((chosen.packed, False))
    return list(
        dict.fromkeys([chosen, *(ForwardConfig(*knobs) for knobs in itertools.product((True, False), (True, False), packed))])
    )


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
