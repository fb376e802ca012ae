"""Performance knobs of `flash_attention`.

Heads are computed as if they had 64, 128 or 256 elements. A block has three warpgroups of 64 queries each at 64 elements and two
above; how many tiles of keys wait in shared memory follows from its size.
"""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target

BLOCK_K = {64: (128,), 128: (128, 176), 256: (80,)}
"""Keys of a tile that kernels are compiled for, by computed head size."""
_NARROW = 256
_FEW = 64
"""Tokens, which fill no more than a third or half of a block."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_k: keys of a tile, one of `BLOCK_K`.
    take_turns: warpgroups issue their products one after the other, so that those of one run beside the exponentials of another.
    persistent: as many programs as multiprocessors, each with several blocks of queries, whose tiles are copied ahead from one
        block to the next, rather than one program per block.
    packed: rows of a block are the query heads of a key head, as many as `heads_side_by_side`, for fewer tokens, which see fewer
        keys than many tokens of one head.
    """

    block_k: int
    take_turns: bool
    persistent: bool
    packed: bool = False


def computed_size(call: FlashAttentionCall) -> int:
    """Of heads, both of keys and of values."""
    widest = max(call.query.shape[3], call.value.shape[3])
    return next((size for size in BLOCK_K if size >= widest), widest)


def heads_side_by_side(call: FlashAttentionCall) -> int:
    """The largest power of two up to 64 that divides the query heads of a key head."""
    group = call.query.shape[2] // call.key.shape[2]
    return min(group & -group, 64)


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """Not measured yet: choices of FlashAttention-3 (arXiv 2407.08608). Wide tiles pay where none of them are partly hidden. Heads
    are packed where tokens of one head would see few keys together, or are few."""
    size = computed_size(call)
    hides = call.causal or call.window is not None
    narrow = call.window_width is not None and call.window_width <= _NARROW
    packed = heads_side_by_side(call) > 1 and (narrow or call.query.shape[1] <= _FEW)
    return ForwardConfig(
        BLOCK_K[size][0 if hides else -1], take_turns=size <= 128 and not narrow, persistent=True, packed=packed
    )


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    chosen = forward_heuristic(call, target)
    packed = dict.fromkeys((chosen.packed, False))
    knobs = itertools.product(BLOCK_K[computed_size(call)], (True, False), (True, False), packed)
    return list(dict.fromkeys([chosen, *(ForwardConfig(*knob) for knob in knobs)]))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
