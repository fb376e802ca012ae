"""Configs of `sample_tokens`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.sample_tokens.interface import SampleTokensCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for

MAX_PARTS = 64
"""Of a row: one program then has the largest logits of all of them in registers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block: logits of one step of a program, which has one row; a power of two.
    num_warps: warps per program.
    part: logits of a row that a program looks through for the largest first; a power of two. 0: rows are not divided.
    """

    block: int
    num_warps: int
    part: int = 0


def forward_heuristic(call: SampleTokensCall, target: Target) -> Config:
    """16 bytes per thread of a half; more warps than 16 would leave too few registers."""
    return _sized(call, 4096, 8, 8192)


def forward_space(call: SampleTokensCall, target: Target) -> list[Config]:
    sizes = ((1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
    parts = (_sized(call, 4096, 8, part) for part in (4096, 16384))
    return list(dict.fromkeys([forward_heuristic(call, target), *(_sized(call, *each, 0) for each in sizes), *parts]))


def _sized(call: SampleTokensCall, block: int, per_thread: int, part: int) -> Config:
    """Not wider than a row, with `per_thread` logits per thread; a row without thresholds, or of few parts, is not divided."""
    entries = call.logits.shape[2]
    block = min(block, next_power_of_2(entries))
    thresholds = (call.top_k, call.top_p, call.static_top_k)
    divided = part and 2 * part < entries <= MAX_PARTS * part and any(each is not None for each in thresholds)
    return Config(block, warps_for(block, per_thread), part if divided else 0)


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
