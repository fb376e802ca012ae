"""Configs of `sample_tokens`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.sample_tokens.interface import SampleTokensCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block: logits of one step of a program, which has one row; a power of two.
    num_warps: warps per program.
    """

    block: int
    num_warps: int


def forward_heuristic(call: SampleTokensCall, target: Target) -> Config:
    """16 bytes per thread of a half; more warps than 16 would leave too few registers."""
    return _sized(call, 4096, 8)


def forward_space(call: SampleTokensCall, target: Target) -> list[Config]:
    sizes = ((1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
    return list(dict.fromkeys([forward_heuristic(call, target), *(_sized(call, *each) for each in sizes)]))


def _sized(call: SampleTokensCall, block: int, per_thread: int) -> Config:
    """Not wider than a row, with `per_thread` logits per thread."""
    block = min(block, next_power_of_2(call.logits.shape[2]))
    return Config(block, warps_for(block, per_thread))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
