"""Performance knobs of `softmax`."""

from __future__ import annotations

import itertools

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import power_of_two
from ejkernel_triton._rows.config import (
    ForwardConfig,
    held_forward,
    itemsize,
    rows_of_tile,
    sharing_config,
    sharing_configs,
    thread_fits,
    walking_configs,
    warps_for,
)

Config = ForwardConfig
"""Of both phases: rows of a program, blocks that it walks over, or parts that programs share."""

WIDEST_FORWARD = 32768
WIDEST_BACKWARD = {2: 32768, 4: 16384}
"""By bytes of an element. Wider rows are shared by programs; a program holds at most 32 registers per thread of each row."""


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    width = power_of_two(call.x.shape[-1])
    if width <= WIDEST_FORWARD:
        return held_forward(width)
    return sharing_config(width, itemsize(call.x)) or Config(1, 4, 4096, 3)


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    width = power_of_two(call.x.shape[-1])
    if width > WIDEST_BACKWARD[itemsize(call.x)]:
        return sharing_config(width, itemsize(call.x)) or Config(1, 16, 8192)
    rows = max(1, min(512, 2048 // width))
    return Config(rows, warps_for(width * rows, 16))


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return _space(call, WIDEST_FORWARD, 1)


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return _space(call, WIDEST_BACKWARD[itemsize(call.x)], 2)


def _space(call: SoftmaxCall, widest: int, arrays: int) -> list[Config]:
    """`arrays` are read for each element."""
    width = power_of_two(call.x.shape[-1])
    held = [
        Config(rows, warps)
        for rows, warps in itertools.product(rows_of_tile(width), (1, 2, 4, 8, 16, 32))
        if width <= widest and thread_fits(rows * width, warps, 64 // arrays)
    ]
    size = itemsize(call.x)
    return held + walking_configs(width, arrays * size, 16384) + sharing_configs(width, size, 16384)


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
