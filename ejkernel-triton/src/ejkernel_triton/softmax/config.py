"""Performance knobs of `softmax`."""

from __future__ import annotations

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import power_of_two
from ejkernel_triton._rows.config import (
    WIDEST_WALK,
    ForwardConfig,
    distinct,
    held_forward,
    itemsize,
    rows_of,
    sharing_config,
    sharing_configs,
    streaming_config,
    streaming_configs,
    streaming_parts_config,
    streaming_parts_configs,
    tiles,
    walking_configs,
    warps_for,
)

Config = ForwardConfig
"""Of both phases: rows of a program, blocks that it walks over, or parts that programs share. Programs stay (`programs`) for whole
rows in forward, for parts in backward; in the other phase there is one for each."""

WIDEST_FORWARD = 32768
WIDEST_BACKWARD = {2: 32768, 4: 16384}
"""By bytes of an element. Wider rows are shared by programs; a program holds at most 32 registers per thread of each row."""


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    width = power_of_two(call.x.shape[-1])
    if width <= 16384:
        return held_forward(width)
    size, rows = itemsize(call.x), rows_of(call.x)
    if width > WIDEST_FORWARD:
        return sharing_config(width, size) or Config(1, 4, 4096, 3)
    return streaming_config(width, rows, size, target) or held_forward(width)


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """On an H200 programs that stay for parts of rows were ahead of those that come and go beyond 128 KiB of each array."""
    width, size = power_of_two(call.x.shape[-1]), itemsize(call.x)
    if width > WIDEST_BACKWARD[size]:
        staying = None
        if width * size > WIDEST_WALK:
            staying = streaming_parts_config(call.x.shape[-1], rows_of(call.x), size, target, 2)
        return staying or sharing_config(width, size) or Config(1, 16, 8192)
    rows = max(1, min(512, 2048 // width))
    return Config(rows, warps_for(width * rows, 16))


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    """The mask, a byte for each element, is in flight as well."""
    width, size = power_of_two(call.x.shape[-1]), itemsize(call.x)
    return distinct(
        forward_heuristic(call, target),
        *(Config(*tile) for tile in tiles(width, (8, 16, 32, 64)) if width <= WIDEST_FORWARD),
        *walking_configs(width, size),
        *sharing_configs(width, size),
        *streaming_configs(width, size + (call.where is not None), target),
    )


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    width, size = power_of_two(call.x.shape[-1]), itemsize(call.x)
    return distinct(
        backward_heuristic(call, target),
        *(Config(*tile) for tile in tiles(width, (8, 16, 32)) if width <= WIDEST_BACKWARD[size]),
        *walking_configs(width, 2 * size),
        *sharing_configs(width, size),
        *streaming_parts_configs(call.x.shape[-1], size, target, 2),
    )


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
