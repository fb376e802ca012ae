"""Configs of `rope`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for

_POWERS = tuple(1 << power for power in range(8))


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    tokens: tokens of one program, which reads their cos and sin once; a power of two.
    heads: heads of one step of a program; a power of two.
    num_warps: warps per program.
    span: heads that one program rotates, of query or of key; a multiple of `heads`, or 0 for all heads of both.
    """

    tokens: int
    heads: int
    num_warps: int
    span: int = 0


def head_width(call: RopeCall) -> int:
    """Channels of one head in a tile."""
    return max(2, next_power_of_2(call.query.shape[-1]))


def heuristic(call: RopeCall, target: Target) -> Config:
    """About 1024 pairs per step, sixteen per thread, from as many heads of a token as possible; few tokens per program keep cos
    and sin in few registers. If heads come first and are far apart, a program has one of them."""
    together = max(1, 2048 // head_width(call))
    heads = 1 if call.heads_first else min(together, next_power_of_2(max(1, *_heads(call))))
    tokens = max(1, min(32, together // heads))
    pairs = tokens * heads * next_power_of_2(max(1, call.rotary_dim // 2))
    return Config(tokens, heads, warps_for(pairs, 8 if call.heads_first else 16), heads if call.heads_first else 0)


def _heads(call: RopeCall) -> list[int]:
    """Heads of query, and of key if there is one."""
    return [spec.shape[1 if call.heads_first else 2] for spec in (call.query, call.key) if spec is not None]


def search_space(call: RopeCall, target: Target) -> list[Config]:
    """Tiles of 2048 and 4096 elements of all shapes, 16 or 32 elements per thread."""
    width, most = head_width(call), next_power_of_2(max(1, *_heads(call)))
    found = [
        Config(tokens, heads, warps_for(size, elements), span)
        for size, heads, elements in itertools.product((2048, 4096), _POWERS, (16, 32))
        if heads <= min(most, size // width) and (tokens := size // width // heads) <= 32
        for span in (0, heads)
    ]
    chosen = heuristic(call, target)
    return found if chosen in found else [chosen, *found]


FORWARD = ConfigSpace(Config, heuristic, search_space)
BACKWARD = FORWARD
