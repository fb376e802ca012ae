"""Config of `fused_linear`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from ejkernel.operations.fused_linear.interface import FusedLinearCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block, next_power_of_2
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton.fused_linear.capability import in_one_kernel, rows_of

MAX_VECTOR_ROWS = 8
"""Rows of x that a program multiplies without tensor cores: each is an unrolled sum of its own."""
_VECTOR_ROWS = 2
"""Beyond these, FMAs take longer than reading the weight."""
_WARP_GROUP_PROGRAMS = 64
"""From so many programs of 64 columns on, few wide ones read as fast as many narrow ones."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    mma: with tensor cores, of rows padded to 16; else with FMAs, up to `MAX_VECTOR_ROWS` rows.
    block_n: columns of the result per program; a power of two, with mma at least 16.
    block_k: inputs per step; a power of two.
    num_warps: warps per program.
    num_stages: steps whose tiles are in shared memory, with mma.
    """

    mma: bool
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.mma and min(self.block_n, self.block_k) < MIN_DOT_SIZE:
            raise ValueError(f"block_n: got {self.block_n} x {self.block_k}, expected at least {MIN_DOT_SIZE} each with mma")


def heuristic(call: FusedLinearCall, target: Target) -> Config:
    """A weight in one wave of programs, each with some 16 kB in flight; a wide one in many waves, with more each."""
    rows, columns, sides = _sizes(call)
    if rows <= _VECTOR_ROWS:
        wide = columns * sides >= 128 * HOPPER_MULTIPROCESSORS
        block_n = (8 if wide else 4) // sides
        while block_n > 1 and columns < 2 * HOPPER_MULTIPROCESSORS * block_n:
            block_n //= 2
        return _vector(call, block_n, 1024 if wide else 2048, 4)
    # 64 rows of a weight are multiplied by whole warp groups; a narrow one needs programs more than that
    block_n, block_k = (64, 128) if columns >= 64 * _WARP_GROUP_PROGRAMS else (16, 512 // sides)
    shapes = ((block_n, block_k, 4, 4), (block_n, block_k // 2, 4, 4), (16, 64, 4, 3), (16, 32, 4, 2))
    tiles = [_mma(call, *shape) for shape in shapes]
    return next((tile for tile in tiles if _fits(call, tile, target)), tiles[-1])


def search_space(call: FusedLinearCall, target: Target) -> list[Config]:
    if not in_one_kernel(call):
        return [heuristic(call, target)]
    return list(dict.fromkeys([heuristic(call, target), *_space(call, target)]))


def _space(call: FusedLinearCall, target: Target) -> Iterator[Config]:
    rows, _, sides = _sizes(call)
    if rows <= MAX_VECTOR_ROWS:
        for held, block_k, warps in ((2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (4, 4096, 8), (8, 1024, 4), (8, 2048, 8)):
            if rows <= _VECTOR_ROWS or held * block_k // warps <= 1024:
                yield _vector(call, held // sides, block_k, warps)
    if rows > 2:
        for block_n, block_k, warps, stages in (
            (16, 128, 4, 5),
            (16, 256, 4, 4),
            (16, 512, 4, 3),
            (16, 512, 8, 4),
            (32, 128, 4, 5),
            (32, 256, 4, 3),
            (64, 64, 4, 6),
            (64, 128, 4, 4),
            (128, 64, 4, 5),
        ):
            if block_k * sides > 512:  # its registers spill
                continue
            tile = _mma(call, block_n, block_k, warps, stages)
            if _fits(call, tile, target):
                yield tile


def _sizes(call: FusedLinearCall) -> tuple[int, int, int]:
    """Rows of x, columns of the result, and rows of a weight for each of these."""
    return rows_of(call)[1], call.columns, 1 if call.activation is None else 2


def vector_of(call: FusedLinearCall) -> int:
    """Elements in 16 bytes."""
    return 16 // jnp.dtype(call.x.dtype).itemsize


def _vector(call: FusedLinearCall, block_n: int, block_k: int, num_warps: int) -> Config:
    """No larger than the weight; 16 bytes of it for each thread and row. float32 has half as many inputs in as many bytes."""
    vector = vector_of(call)
    block_k = max(vector, min(block_k * vector // 8, next_power_of_2(call.x.shape[2])))
    num_warps = max(1, min(num_warps, block_k // (32 * vector)))
    return Config(False, min(block_n, next_power_of_2(call.columns)), block_k, num_warps)


def _mma(call: FusedLinearCall, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    """No larger than the weight; without tensor cores, in float32, small."""
    block_n, block_k = min(block_n, dot_block(call.columns)), min(block_k, dot_block(call.x.shape[2]))
    if call.x.dtype == "float32":
        block_n, block_k, num_stages = min(block_n, 32), min(block_k, 32), min(num_stages, 2)
    return Config(True, block_n, block_k, num_warps, num_stages)


def _fits(call: FusedLinearCall, config: Config, target: Target) -> bool:
    """In shared memory: the tiles of each stage, and a normed one of x."""
    rows, _, sides = _sizes(call)
    step = config.block_k * jnp.dtype(call.x.dtype).itemsize
    held = (config.block_n * sides + dot_block(rows)) * config.num_stages + dot_block(rows)
    return held * step + 4 * config.block_k * config.num_stages <= shared_memory_limit(target)


FORWARD = ConfigSpace(Config, heuristic, search_space)
