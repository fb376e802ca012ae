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


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_k: keys of a tile, one of `BLOCK_K`.
    take_turns: warpgroups issue their products one after the other, so that those of one run beside the exponentials of another.
    persistent: as many programs as multiprocessors, each with several blocks of queries, whose tiles are copied ahead from one
        block to the next, rather than one program per block.
    """

    block_k: int
    take_turns: bool
    persistent: bool


def computed_size(call: FlashAttentionCall) -> int:
    """Of heads, both of keys and of values."""
    widest = max(call.query.shape[3], call.value.shape[3])
    return next((size for size in BLOCK_K if size >= widest), widest)


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """Not measured yet: choices of FlashAttention-3 (arXiv 2407.08608). Wide tiles pay where none of them are partly hidden."""
    size = computed_size(call)
    hides = call.causal or call.window is not None
    narrow = call.window_width is not None and call.window_width <= _NARROW
    return ForwardConfig(BLOCK_K[size][0 if hides else -1], take_turns=size <= 128 and not narrow, persistent=True)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    knobs = itertools.product(BLOCK_K[computed_size(call)], (True, False), (True, False))
    return list(dict.fromkeys([forward_heuristic(call, target), *(ForwardConfig(*knob) for knob in knobs)]))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
