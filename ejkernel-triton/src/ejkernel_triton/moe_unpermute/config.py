"""Configs of `moe_unpermute`."""

from __future__ import annotations

from ejkernel.operations.moe_unpermute.interface import MoeUnpermuteCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._copies.config import Config, heuristic, space
from ejkernel_triton._rows.config import warps_for


def forward_heuristic(call: MoeUnpermuteCall, target: Target) -> Config:
    return heuristic(call.rows.shape[0] * call.positions.shape[1], call.rows.shape[2], target)


def forward_space(call: MoeUnpermuteCall, target: Target) -> list[Config]:
    return space(call.rows.shape[0] * call.positions.shape[1], call.rows.shape[2], target)


def backward_heuristic(call: MoeUnpermuteCall, target: Target) -> Config:
    """With weights a program has all k rows of a token, so that each step fills its registers."""
    return _sized(call, 512, 16) if call.weights is not None else forward_heuristic(call, target)


def backward_space(call: MoeUnpermuteCall, target: Target) -> list[Config]:
    if call.weights is None:
        return forward_space(call, target)
    found = [_sized(call, block, each) for block in (256, 512, 1024) for each in (8, 16)]
    return list(dict.fromkeys([backward_heuristic(call, target), *found]))


def _sized(call: MoeUnpermuteCall, block: int, per_thread: int) -> Config:
    """`per_thread` elements of a tile of k rows."""
    block = min(block, next_power_of_2(max(call.rows.shape[2], 1)))
    return Config(block, min(16, warps_for(block * next_power_of_2(call.positions.shape[2]), per_thread)))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
