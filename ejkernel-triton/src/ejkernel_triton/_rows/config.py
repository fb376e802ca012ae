"""Performance knobs of the normalisations over rows, and what other kernels over rows size tiles by."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel._arrays import ArraySpec
from ejkernel.operations._rows.interface import NormCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import power_of_two

_ROWS = tuple(1 << power for power in range(10))
_WARPS = (1, 2, 4, 8, 16, 32)
_ELEMENTS = 1 << 14
"""Most elements of a tile of several rows."""

WIDEST_FORWARD = 32768
"""Wider rows are shared by programs; a row of this width is held in 32 registers per thread."""
WIDEST_BACKWARD = 8192
"""A program holds a row of x, of the gradient and of each parameter's partial sum, up to this width without spills."""
MOST_PARTS = 16
"""Programs that meet over one row have a bit each in a word; together they must fit on small devices too."""

SHARED_MEMORY = 96 * 1024
"""What a block gets on every supported device."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    rows: rows that one program normalises; a power of two, 1 where rows are walked over or shared.
    num_warps: warps per program.
    block: columns of one step where a program walks over its row, or of a part where programs share it, a power of two;
        0 = a program holds whole rows.
    num_stages: steps in flight where a program walks over its row; rows, or parts, where it walks over rows (`programs`), one
        of which is in registers and the others in shared memory. 1 = no shared memory: whole rows wait in registers.
    meet: whether programs share a row, a part each, instead of one that walks over it.
    programs: programs that walk over the rows, for each part where they share rows; 0 = one for each row or tile.
    """

    rows: int
    num_warps: int
    block: int = 0
    num_stages: int = 1
    meet: bool = False
    programs: int = 0


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    rows: rows of one tile; a power of two.
    num_warps: warps per program.
    programs: programs that share the rows under one parameter; each writes one partial sum of the parameter's gradient.
    num_stages: tiles in flight; above 1 they pass through shared memory.
    block: columns of one tile, a power of two, where sums over rows are made before or programs share rows; 0 = a tile holds
        whole rows.
    stream: one pass by programs that hold what they read as it is stored, a row (`rows` 1), or with `block` a part of rows that
        programs share.
    """

    rows: int
    num_warps: int
    programs: int
    num_stages: int
    block: int = 0
    stream: bool = False


def padded_width(call: NormCall) -> int:
    """The width of a tile that holds whole rows."""
    return power_of_two(call.x.shape[-1])


def warps_for(elements: int, per_thread: int) -> int:
    """A power of two in [1, 32] that gives a thread about so many elements."""
    return 1 << max(0, min(5, (elements // (32 * per_thread)).bit_length() - 1))


def itemsize(spec: ArraySpec) -> int:
    return 4 if spec.dtype == "float32" else 2


def thread_fits(elements: int, warps: int, most: int) -> bool:
    """Whether a thread has from 4 to `most` elements of a tile; the smallest tile is always admitted with one warp."""
    return elements <= 32 * warps * most and (warps == 1 or elements >= 32 * warps * 4)


def rows_of_tile(width: int, most: int = _ELEMENTS) -> list[int]:
    """Numbers of rows in a search space: one, or as many as make a tile of 512 to `most` elements."""
    return [rows for rows in _ROWS if rows == 1 or 512 <= rows * width <= most]


def walking_configs(width: int, size: int, least: int) -> list[ForwardConfig]:
    """Configs of a search space that walk over rows in two passes, for rows of at least `least` columns; `size` in bytes."""
    return [
        ForwardConfig(1, warps, block, stages)
        for block, warps, stages in itertools.product((2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32), (1, 2, 3))
        if least <= width and 2 * block <= width and thread_fits(block, warps, 32) and block >= 32 * warps * 8
        if stages == 1 or stages * block * size <= SHARED_MEMORY
    ]


def sharing_config(width: int, size: int) -> ForwardConfig | None:
    """Programs that share a row of elements of `size` bytes, parts of 16 KiB, or 32 where there would be too many; None for a row
    that is too wide."""
    for block, warps in ((16384 // size, 4), (32768 // size, 8)):
        if width <= MOST_PARTS * block:
            return ForwardConfig(1, warps, block, 1, True)
    return None


def sharing_configs(width: int, size: int, least: int) -> list[ForwardConfig]:
    """Configs of a search space whose programs share rows, for rows of at least `least` columns."""
    return [
        ForwardConfig(1, warps, block, 1, True)
        for block, warps in itertools.product((4096, 8192, 16384, 32768), (4, 8, 16))
        if least <= width and 2 * block <= width <= MOST_PARTS * block and thread_fits(block, warps, 128 // size)
    ]


def held_forward(width: int) -> ForwardConfig:
    """Whole rows in registers. Programs of few warps overlap better: wide rows give a thread 32 elements, not 16."""
    rows = max(1, min(512, 2048 // width))
    return ForwardConfig(rows, warps_for(width * rows, 32 if width >= 8192 else 16))


def forward_heuristic(call: NormCall, target: Target) -> ForwardConfig:
    width = padded_width(call)
    if width <= WIDEST_FORWARD:
        return held_forward(width)
    return sharing_config(width, itemsize(call.x)) or ForwardConfig(1, 16, 4096)


def forward_space(call: NormCall, target: Target) -> list[ForwardConfig]:
    width = padded_width(call)
    held = [
        ForwardConfig(rows, warps)
        for rows, warps in itertools.product(rows_of_tile(width), _WARPS)
        if width <= WIDEST_FORWARD and thread_fits(rows * width, warps, 64)
    ]
    size = itemsize(call.x)
    return held + walking_configs(width, size, 16384) + sharing_configs(width, size, 16384)


def backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    """Three tiles in flight where shared memory holds them: a third faster than one on an H200.

    Tiles of some columns have 4096 elements: two long rows, or four short ones in flight where a row has many tiles.
    """
    width = padded_width(call)
    size = itemsize(call.x)
    if width > WIDEST_BACKWARD:
        return BackwardConfig(4, 4, 32 if width <= 65536 else 16, 3, 1024)
    narrow = width <= 512
    rows = max(1, (1024 if width < 64 else 2048 if narrow else 16384 // size) // width)
    if 3 * _tile_bytes(call, rows * width) <= SHARED_MEMORY:
        warps = 2 if narrow else warps_for(rows * width, 64 // size)
        return BackwardConfig(rows, warps, 1056 if narrow else 132, 3)
    warps = warps_for(width * rows, 16)
    return BackwardConfig(rows, warps, max(132, 132 * 16 // warps), 1)


def backward_space(call: NormCall, target: Target) -> list[BackwardConfig]:
    width = padded_width(call)
    held = [
        BackwardConfig(rows, warps, programs, stages)
        for rows, warps, programs, stages in itertools.product(
            rows_of_tile(width, 8192), _WARPS, (132, 264, 528, 1056), (1, 2, 3)
        )
        if width <= 2 * WIDEST_BACKWARD and thread_fits(rows * width, warps, 32)
        if stages == 1 or stages * _tile_bytes(call, rows * width) <= SHARED_MEMORY
    ]
    split = [
        BackwardConfig(rows, warps, programs, stages, block)
        for rows, warps, programs, stages, block in itertools.product((1, 2, 4, 8), (4, 8), (32, 64, 128), (1, 3), (1024, 2048))
        if width >= 8192 and thread_fits(rows * block, warps, 32)
        if stages == 1 or stages * _tile_bytes(call, rows * block) <= SHARED_MEMORY
    ]
    return held + split


def _tile_bytes(call: NormCall, elements: int) -> int:
    """Shared memory of one tile of x and one of its gradient."""
    return 2 * elements * itemsize(call.x)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
