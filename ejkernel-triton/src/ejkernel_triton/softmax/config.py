"""Performance knobs of `softmax`."""

from __future__ import annotations

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import (
    MAX_LOOPED_BYTES,
    ForwardConfig,
    cooperative_config,
    cooperative_configs,
    distinct,
    itemsize,
    looped_configs,
    persistent_config,
    persistent_configs,
    persistent_cooperative_config,
    persistent_cooperative_configs,
    rows_of,
    single_pass_forward,
    tiles,
    warps_for,
)

Config = ForwardConfig
"""Of both phases. Kernels can be persistent (`programs`) for whole rows in forward and for splits in backward."""

MAX_WIDTH_FORWARD = 32768
MAX_WIDTH_BACKWARD = {2: 32768, 4: 16384}
"""Widest rows of single-pass programs, by bytes of an element: each row takes at most 32 registers per thread."""


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    width = next_power_of_2(call.x.shape[-1])
    if width <= 16384:
        return single_pass_forward(width)
    size, rows = itemsize(call.x), rows_of(call.x)
    if width > MAX_WIDTH_FORWARD:
        return cooperative_config(width, size) or Config(1, 4, 4096, 3)
    return persistent_config(width, rows, size, target) or single_pass_forward(width)


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """Persistent cooperative beyond 128 KiB of a row: faster than cooperative on an H200."""
    width, size = next_power_of_2(call.x.shape[-1]), itemsize(call.x)
    if width > MAX_WIDTH_BACKWARD[size]:
        persistent = None
        if width * size > MAX_LOOPED_BYTES:
            persistent = persistent_cooperative_config(call.x.shape[-1], rows_of(call.x), size, target, 2)
        return persistent or cooperative_config(width, size) or Config(1, 16, 8192)
    rows = max(1, min(512, 2048 // width))
    return Config(rows, warps_for(width * rows, 16))


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    """The mask, one byte per element, is prefetched as well."""
    width, size = next_power_of_2(call.x.shape[-1]), itemsize(call.x)
    return distinct(
        forward_heuristic(call, target),
        *(Config(*tile) for tile in tiles(width, (8, 16, 32, 64)) if width <= MAX_WIDTH_FORWARD),
        *looped_configs(width, size),
        *cooperative_configs(width, size),
        *persistent_configs(width, size + (call.where is not None), target),
    )


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    width, size = next_power_of_2(call.x.shape[-1]), itemsize(call.x)
    return distinct(
        backward_heuristic(call, target),
        *(Config(*tile) for tile in tiles(width, (8, 16, 32)) if width <= MAX_WIDTH_BACKWARD[size]),
        *looped_configs(width, 2 * size),
        *cooperative_configs(width, size),
        *persistent_cooperative_configs(call.x.shape[-1], size, target, 2),
    )


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
