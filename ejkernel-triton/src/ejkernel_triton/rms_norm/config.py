"""Performance knobs of `rms_norm`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import ConfigSpace, Target

_ROWS = tuple(1 << power for power in range(10))
_ELEMENTS = 1 << 14
"""Most elements of a tile of several rows."""

_SHARED_MEMORY = 96 * 1024
"""What a block gets on every supported device."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    rows: rows that one program normalises; a power of two.
    num_warps: warps per program.
    """

    rows: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    rows: rows of one tile; a power of two.
    num_warps: warps per program.
    programs: programs that share the rows under one parameter; each writes one partial sum of the parameter's gradient.
    num_stages: tiles in flight; above 1 they pass through shared memory.
    """

    rows: int
    num_warps: int
    programs: int
    num_stages: int


def padded_width(call: RmsNormCall) -> int:
    """The width of a tile: the next power of two."""
    return 1 << max(call.x.shape[-1] - 1, 0).bit_length()


def _warps(elements: int, per_thread: int) -> int:
    """A power of two in [1, 32] that gives a thread about so many elements."""
    return 1 << max(0, min(5, (elements // (32 * per_thread)).bit_length() - 1))


def forward_heuristic(call: RmsNormCall, target: Target) -> ForwardConfig:
    width = padded_width(call)
    rows = max(1, min(512, 2048 // width))
    return ForwardConfig(rows, _warps(width * rows, 16))


def forward_space(call: RmsNormCall, target: Target) -> list[ForwardConfig]:
    width = padded_width(call)
    rows = [rows for rows in _ROWS if rows == 1 or 512 <= rows * width <= _ELEMENTS]
    return [ForwardConfig(r, w) for r, w in itertools.product(rows, (1, 2, 4, 8, 16, 32)) if _thread_fits(r * width, w, 64)]


def backward_heuristic(call: RmsNormCall, target: Target) -> BackwardConfig:
    """Three tiles in flight where shared memory holds them: a third faster than one on an H200."""
    width = padded_width(call)
    itemsize = _itemsize(call)
    narrow = width <= 512
    rows = max(1, (2048 if narrow else 16384 // itemsize) // width)
    if 3 * _tile_bytes(call, rows * width) <= _SHARED_MEMORY:
        warps = 2 if narrow else _warps(rows * width, 64 // itemsize)
        return BackwardConfig(rows, warps, 1056 if narrow else 132, 3)
    warps = _warps(width * rows, 16)
    return BackwardConfig(rows, warps, max(132, 132 * 16 // warps), 1)


def backward_space(call: RmsNormCall, target: Target) -> list[BackwardConfig]:
    width = padded_width(call)
    rows = [rows for rows in _ROWS if rows == 1 or 512 <= rows * width <= 8192]
    return [
        BackwardConfig(r, w, programs, stages)
        for r, w, programs, stages in itertools.product(rows, (1, 2, 4, 8, 16, 32), (132, 264, 528, 1056), (1, 2, 3))
        if _thread_fits(r * width, w, 32) and (stages == 1 or stages * _tile_bytes(call, r * width) <= _SHARED_MEMORY)
    ]


def _tile_bytes(call: RmsNormCall, elements: int) -> int:
    """Shared memory of one tile of x and one of its gradient."""
    return 2 * elements * _itemsize(call)


def _itemsize(call: RmsNormCall) -> int:
    return 4 if call.x.dtype == "float32" else 2


def _thread_fits(elements: int, warps: int, most: int) -> bool:
    """Whether a thread has from 4 to `most` elements of a tile; the smallest tile is always admitted with one warp."""
    return elements <= 32 * warps * most and (warps == 1 or elements >= 32 * warps * 4)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
