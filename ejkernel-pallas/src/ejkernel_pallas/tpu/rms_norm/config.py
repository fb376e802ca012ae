"""Configs of `rms_norm` on TPU."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import ConfigSpace, Target

SUBLANES = 16
"""Rows of one bfloat16 register tile; float32 needs half of it."""
_LANES = 128
_MOST_ELEMENTS = 1 << 19


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    rows: rows of a tile, a multiple of 16; fewer when the array has fewer.
    """

    rows: int


def _rows(call: RmsNormCall, elements: int) -> int:
    """Rows of a tile of at most so many elements, lanes padded."""
    width = -(-max(call.x.shape[-1], 1) // _LANES) * _LANES
    return max(SUBLANES, min(1024, elements // width // SUBLANES * SUBLANES))


def forward_heuristic(call: RmsNormCall, target: Target) -> Config:
    return Config(_rows(call, _MOST_ELEMENTS // 2))


def backward_heuristic(call: RmsNormCall, target: Target) -> Config:
    return Config(_rows(call, _MOST_ELEMENTS // 4))


def forward_space(call: RmsNormCall, target: Target) -> list[Config]:
    return [Config(rows) for rows in sorted({_rows(call, _MOST_ELEMENTS >> shift) for shift in range(1, 6)})]


def backward_space(call: RmsNormCall, target: Target) -> list[Config]:
    return [Config(rows) for rows in sorted({_rows(call, _MOST_ELEMENTS >> shift) for shift in range(2, 6)})]


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
