"""Configs of `add_rms_norm`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows import config as rows_config
from ejkernel_triton._rows.config import (
    MAX_WIDTH_FORWARD,
    BackwardConfig,
    distinct,
    fits_shared_memory,
    itemsize,
    single_pass_forward,
    thread_fits,
    tiles,
)

_ARRAYS_READ = 3
"""By backward: the sum, and the cotangents of both results."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    rows: rows of one program; a power of two, 1 for looped kernels.
    num_warps: warps per program.
    block: columns of one step of a looped kernel, a power of two; 0 = single pass: a program holds whole rows.
    """

    rows: int
    num_warps: int
    block: int = 0


def as_norm(call: AddRmsNormCall) -> NormCall:
    """The normalisation of the sum."""
    return NormCall(x=call.residual, scale=call.scale, epsilon=call.epsilon, scale_offset=call.scale_offset)


def forward_heuristic(call: AddRmsNormCall, target: Target) -> ForwardConfig:
    width = next_power_of_2(call.x.shape[-1])
    if width > MAX_WIDTH_FORWARD // 2:
        return ForwardConfig(1, 16, 8192)
    single = single_pass_forward(width)
    return ForwardConfig(single.rows, single.num_warps)


def forward_space(call: AddRmsNormCall, target: Target) -> list[ForwardConfig]:
    width = next_power_of_2(call.x.shape[-1])
    looped = ((4096, 8), (8192, 8), (8192, 16))
    return distinct(
        forward_heuristic(call, target),
        *(ForwardConfig(*tile) for tile in tiles(width, (8, 16, 32)) if width <= MAX_WIDTH_FORWARD),
        *(ForwardConfig(1, warps, block) for block, warps in looped if width >= 2 * block and thread_fits(block, warps, 32)),
    )


def backward_heuristic(call: AddRmsNormCall, target: Target) -> BackwardConfig:
    """That of the norm, with as many stages as shared memory holds of one array more."""
    found = rows_config.backward_heuristic(as_norm(call), target)
    stages = next(stages for stages in range(found.num_stages, 0, -1) if _fits(call, found, stages, target))
    return dataclasses.replace(found, num_stages=stages)


def backward_space(call: AddRmsNormCall, target: Target) -> list[BackwardConfig]:
    found = rows_config.backward_space(as_norm(call), target)
    return distinct(backward_heuristic(call, target), *(one for one in found if _fits(call, one, one.num_stages, target)))


def _fits(call: AddRmsNormCall, config: BackwardConfig, stages: int, target: Target) -> bool:
    elements = config.rows * (config.block or next_power_of_2(call.x.shape[-1]))
    size = max(itemsize(call.x), itemsize(call.residual))
    return stages == 1 or fits_shared_memory(stages, _ARRAYS_READ * elements * size, target)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
