"""Configs of `qk_norm_rope`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import distinct, warps_for

_TILES = (1024, 2048, 4096)
"""Elements of a tile."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    tokens: tokens of one program; a power of two.
    heads: heads of one program, of query or of key; a power of two.
    num_warps: warps per program.
    """

    tokens: int
    heads: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    tokens: tokens of one tile; a power of two.
    heads: heads of one tile, of query or of key; a power of two.
    num_warps: warps per program.
    programs: programs that share the tiles of query and key; each writes a partial sum of a scale's gradient.
    num_stages: stages of the loop over tiles; above 1 tiles are staged in shared memory.
    """

    tokens: int
    heads: int
    num_warps: int
    programs: int = 1056
    num_stages: int = 2


def _tile(call: QkNormRopeCall, elements: int, per_thread: int) -> ForwardConfig:
    """As many heads of a token as there are, then tokens."""
    width = next_power_of_2(call.query.shape[-1])
    axis = 1 if call.heads_first else 2
    most = next_power_of_2(max(1, call.query.shape[axis], call.key.shape[axis]))
    together = max(1, elements // width)
    heads = min(together, most)
    tokens = max(1, min(32, together // heads))
    return ForwardConfig(tokens, heads, warps_for(tokens * heads * width, per_thread))


def forward_heuristic(call: QkNormRopeCall, target: Target) -> ForwardConfig:
    """2048 elements, sixteen per thread."""
    return _tile(call, 2048, 16)


def forward_space(call: QkNormRopeCall, target: Target) -> list[ForwardConfig]:
    return distinct(forward_heuristic(call, target), *(_tile(call, *sizes) for sizes in itertools.product(_TILES, (8, 16, 32))))


def backward_heuristic(call: QkNormRopeCall, target: Target) -> BackwardConfig:
    """Eight programs of four warps per multiprocessor of an H200, which prefetch their next tile."""
    return _looped(_tile(call, 2048, 16), 1056, 2)


def backward_space(call: QkNormRopeCall, target: Target) -> list[BackwardConfig]:
    found = [
        _looped(_tile(call, elements, per_thread), programs, stages)
        for elements, per_thread in ((1024, 8), (2048, 8), (2048, 16), (4096, 16))
        for programs, stages in itertools.product((528, 1056, 2112), (1, 2, 3))
    ]
    return distinct(backward_heuristic(call, target), *found)


def _looped(tile: ForwardConfig, programs: int, stages: int) -> BackwardConfig:
    return BackwardConfig(tile.tokens, tile.heads, tile.num_warps, programs, stages)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
