"""Configs of the row normalisations, and helpers that configs of other row kernels share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ejkernel.call import ArraySpec
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._capability import multiprocessors, shared_memory_limit

_WARPS = (1, 2, 4, 8, 16, 32)
_TILES = (1024, 2048, 4096, 8192)
"""Elements of a tile of several rows."""

MAX_WIDTH_FORWARD = 32768
"""Widest row of a single-pass program; it takes 32 registers per thread."""
MAX_WIDTH_BACKWARD = 8192
"""Widest row of x, its gradient and each parameter's partial sum that a program holds without spills."""
MAX_SPLITS = 16
"""Cooperating programs of one row have one bit each in its counter; they must be co-resident on small devices too."""

MAX_LOOPED_BYTES = 128 * 1024
"""Bytes of a row up to which the second pass of a looped kernel hits the cache."""
_WIDE = 16384
"""Columns from which looped and cooperative kernels are tried; below, one program per row overlaps well enough."""
_MAX_HELD_BYTES = 128 * 1024
"""Bytes of a multiprocessor's registers that prefetched rows may take."""

_RESIDENT_WARPS = 12
"""Warps of cooperating programs with 64 elements per thread that a multiprocessor's registers hold."""

SHARED_MEMORY = 96 * 1024
"""Shared memory of a block on every supported device."""


@renamed_knobs(meet="cooperative")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    rows: rows of one program; a power of two, 1 for looped and cooperative kernels.
    num_warps: warps per program.
    block: columns of one step of a looped kernel or of one split of a cooperative kernel, a power of two; 0 = single pass: a
        program holds whole rows.
    num_stages: pipeline stages of a looped kernel, or of a persistent kernel's loop over rows or splits, one of which is in
        registers and the others in shared memory. 1 = no shared memory: the next row is prefetched to registers.
    cooperative: whether several programs share a row, one split each, instead of one program that loops over it.
    programs: grid size of a persistent kernel, per split if cooperative; 0 = not persistent: one program per row or tile.
    """

    rows: int
    num_warps: int
    block: int = 0
    num_stages: int = 1
    cooperative: bool = False
    programs: int = 0


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    rows: rows of one tile; a power of two.
    num_warps: warps per program.
    programs: programs that share the rows of one parameter; each writes a partial sum of the parameter's gradient.
    num_stages: pipeline stages; above 1 tiles are staged in shared memory.
    block: columns of one tile, a power of two, if a first kernel computes the row sums; 0 = a tile holds whole rows.
    """

    rows: int
    num_warps: int
    programs: int
    num_stages: int
    block: int = 0


def padded_width(call: NormCall) -> int:
    """The width of a tile that holds whole rows."""
    return next_power_of_2(call.x.shape[-1])


def warps_for(elements: int, per_thread: int) -> int:
    """Warps, a power of two in [1, 32], that give each thread about `per_thread` elements."""
    return 1 << max(0, min(5, (elements // (32 * per_thread)).bit_length() - 1))


def itemsize(spec: ArraySpec) -> int:
    return 4 if spec.dtype == "float32" else 2


def rows_of(spec: ArraySpec) -> int:
    return math.prod(spec.shape[:-1])


def thread_fits(elements: int, warps: int, most: int) -> bool:
    """Whether a thread has 4 to `most` elements of a tile; small tiles are allowed with one warp."""
    return elements <= 32 * warps * most and (warps == 1 or elements >= 32 * warps * 4)


def distinct(heuristic: Any, *configs: Any) -> list[Any]:
    """A search space without duplicates, the heuristic's config first."""
    return list(dict.fromkeys((heuristic, *configs)))


def tiles(width: int, elements_per_thread: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and warps of single-pass tiles in a search space; small tiles have one warp."""
    sizes = {max(1, min(512, tile // width)) for tile in _TILES}
    return [
        (rows, warps)
        for rows, warps in itertools.product(sorted(sizes), _WARPS)
        if rows * width // (32 * warps) in elements_per_thread or (warps == 1 and rows * width < 32 * min(elements_per_thread))
    ]


# Looped and cooperative kernels


def looped_configs(width: int, size: int) -> list[ForwardConfig]:
    """Looped configs of a search space, with two passes over a row; `size` is bytes read per column."""
    return [
        ForwardConfig(1, warps, block, stages)
        for block, warps, stages in itertools.product((4096, 8192), (4, 8, 16), (1, 3))
        if width >= max(_WIDE, 2 * block) and thread_fits(block, warps, 32)
        if stages == 1 or stages * block * size <= SHARED_MEMORY
    ]


def cooperative_config(width: int, size: int) -> ForwardConfig | None:
    """A cooperative config for elements of `size` bytes: splits of 16 KiB, or 32 KiB if there would be too many; None if the
    row is too wide."""
    for block, warps in ((16384 // size, 4), (32768 // size, 8)):
        if width <= MAX_SPLITS * block:
            return ForwardConfig(1, warps, block, 1, True)
    return None


def cooperative_configs(width: int, size: int) -> list[ForwardConfig]:
    """Cooperative configs of a search space."""
    return [
        ForwardConfig(1, warps, block, 1, True)
        for block, warps in ((4096, 4), (8192, 4), (8192, 8), (16384, 8), (16384, 16))
        if width >= _WIDE and 2 * block <= width <= MAX_SPLITS * block and thread_fits(block, warps, 128 // size)
    ]


# Persistent kernels


def _resident_programs(target: Target, warps: int, max_warps: int) -> int:
    """Co-resident programs if a multiprocessor's registers hold `max_warps`."""
    return (multiprocessors(target) or 132) * max(1, max_warps // warps)


def persistent_configs(width: int, size: int, target: Target) -> list[ForwardConfig]:
    """Persistent single-pass configs of a search space; `size` is bytes read per column.

    At most half of a multiprocessor's 256 KiB of registers hold prefetched rows. float32 values take the rest: 128 registers
    per thread with 64 elements, 64 with 32.
    """
    return [
        ForwardConfig(1, warps, 0, stages, False, _resident_programs(target, warps, 16 if width // (32 * warps) > 32 else 32))
        for warps, stages in itertools.product((8, 16, 32), (1, 2, 3))
        if width >= _WIDE and 16 <= width // (32 * warps) <= 64
        if width * size * (2 if stages == 1 else 1) <= _MAX_HELD_BYTES and fits_shared_memory(stages, width * size, target)
    ]


def persistent_config(width: int, rows: int, size: int, target: Target) -> ForwardConfig | None:
    """The persistent single-pass config of a heuristic; None if programs have too few rows or the next row does not fit."""
    for stages in (3, 2):
        found = ForwardConfig(1, 32, 0, stages, False, _resident_programs(target, 32, 32))
        if (
            width * size <= _MAX_HELD_BYTES
            and width <= 32768
            and rows >= 4 * found.programs
            and fits_shared_memory(stages, width * size, target)
        ):
            return found
    return None


def fits_shared_memory(stages: int, tile_bytes: int, target: Target) -> bool:
    """Whether shared memory holds the prefetched tiles: all of `stages` but one, which is in registers."""
    return (stages - 1) * tile_bytes + 2048 <= shared_memory_limit(target)


def persistent_cooperative_configs(columns: int, size: int, target: Target, arrays: int = 1) -> list[ForwardConfig]:
    """Persistent cooperative configs of a search space, for rows of `arrays` arrays.

    128 registers per thread hold 64 elements, and the previous row's of one array only.
    """
    found = []
    tiles_of_splits = ((8192, 4), (16384, 8), *(((32768, 16),) if arrays == 1 else ()), (8192, 8), (16384, 16))
    for (block, warps), stages in itertools.product(tiles_of_splits, (2, 3)):
        at_once = _RESIDENT_WARPS if block > 32 * 32 * warps else 16
        legal = columns > _WIDE and 2 * block <= columns <= MAX_SPLITS * block and thread_fits(block, warps, 128 // size)
        if legal and fits_shared_memory(stages, max(1, at_once // warps) * block * size * arrays, target):
            programs = max(1, _resident_programs(target, warps, at_once) // -(-columns // block))
            found.append(ForwardConfig(1, warps, block, stages, True, programs))
    return found


def persistent_cooperative_config(columns: int, rows: int, size: int, target: Target, arrays: int = 1) -> ForwardConfig | None:
    """The persistent cooperative config of a heuristic; None if programs are not co-resident, have too few rows, or the next
    split does not fit."""
    least = 16384 // size
    for found in persistent_cooperative_configs(columns, size, target, arrays):
        if multiprocessors(target) and found.block >= least and found.num_stages == 2 and rows >= 4 * found.programs:
            return found
    return None


def single_pass_forward(width: int) -> ForwardConfig:
    """Whole rows in registers. Programs with few warps overlap better, so wide rows give each thread 32 elements, not 16."""
    rows = max(1, min(512, 2048 // width))
    return ForwardConfig(rows, warps_for(width * rows, 32 if width >= 8192 else 16))


def forward_heuristic(call: NormCall, target: Target) -> ForwardConfig:
    """Looped up to 128 KiB of a row, persistent cooperative beyond: the fastest on an H200."""
    width, size, rows = padded_width(call), itemsize(call.x), rows_of(call.x)
    if width <= _WIDE:
        return single_pass_forward(width)
    looped, few = ForwardConfig(1, 16, 8192), rows < (multiprocessors(target) or 132)
    if few and width <= MAX_WIDTH_FORWARD:
        return single_pass_forward(width)
    if not few and width * size <= MAX_LOOPED_BYTES:
        return looped
    persistent = persistent_cooperative_config(call.x.shape[-1], rows, size, target)
    return persistent or cooperative_config(width, size) or looped


def forward_space(call: NormCall, target: Target) -> list[ForwardConfig]:
    width, size = padded_width(call), itemsize(call.x)
    return distinct(
        forward_heuristic(call, target),
        *(ForwardConfig(*tile) for tile in tiles(width, (8, 16, 32, 64)) if width <= MAX_WIDTH_FORWARD),
        *looped_configs(width, size),
        *cooperative_configs(width, size),
        *persistent_cooperative_configs(call.x.shape[-1], size, target),
    )


def backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    """Three pipeline stages if shared memory holds them, a third faster than one on an H200.

    If rows are read twice, column tiles have 4096 elements: two long rows without pipelining, or four short ones if a row has
    many tiles.
    """
    width, size = padded_width(call), itemsize(call.x)
    if width > MAX_WIDTH_BACKWARD:
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
    single_pass = [
        BackwardConfig(rows, warps, programs, stages)
        for rows, warps in tiles(width, (16, 32))
        for programs, stages in itertools.product(sorted({min(1056, max(132, 132 * k // warps)) for k in (8, 16)}), (1, 3))
        if width <= 2 * MAX_WIDTH_BACKWARD
        if stages == 1 or fits_shared_memory(stages, _tile_bytes(call, rows * width), target)
    ]
    split = [
        BackwardConfig(rows, warps, programs, stages, block)
        for rows, warps, stages, block in ((4, 4, 3, 1024), (2, 8, 1, 2048), (2, 4, 3, 2048))
        for programs in (16, 32, 64, 128)
        if width >= MAX_WIDTH_BACKWARD and fits_shared_memory(stages, _tile_bytes(call, rows * block), target)
    ]
    return distinct(backward_heuristic(call, target), *single_pass, *split)


def _tile_bytes(call: NormCall, elements: int) -> int:
    """Shared memory of one tile of x and of its gradient."""
    return 2 * elements * itemsize(call.x)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
