"""Configs of `scaled_matmul`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import MIN_DOT_SIZE, next_power_of_2
from ejkernel_triton._capability import multiprocessors, shared_memory_limit

LEAST = MIN_DOT_SIZE
"""Fewest rows and columns of a tile."""
LEAST_DEPTH = 32
"""Shortest contraction of an MMA of one byte."""
_HOPPER: tuple[int, int] = (9, 0)
_FEW = 64
"""Rows up to which loading rhs dominates."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block_m: rows of a tile; a power of two, like the next two.
    block_n: columns of a tile.
    block_k: depth of a step.
    num_warps: warps per program.
    num_stages: pipeline stages.
    l2_swizzle: row tiles that visit every column tile before the next row tiles start, for L2 reuse.
    transpose_first: whether XLA writes a `[K, N]` rhs as `[N, K]` first, as float8 and int8 units read it. Else each tile is
        transposed on its way to shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    l2_swizzle: int = 8
    transpose_first: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_m", LEAST), ("block_n", LEAST), ("block_k", LEAST_DEPTH)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise ValueError(f"{name}: got {size}, expected a power of two of at least {least}")
        if min(self.num_warps, self.num_stages, self.l2_swizzle) < 1:
            raise ValueError(f"{self}: num_warps, num_stages and l2_swizzle are at least 1")


def product_of(call: ScaledMatmulCall) -> tuple[int, int]:
    """Members with a matrix or column scales of their own, and rows of each."""
    batch, rows, _ = call.lhs.shape
    shared = call.rhs.shape[0] == 1 == call.rhs_scale.shape[0]
    return (1, batch * rows) if shared else (batch, rows)


def programs(members: int, rows: int, columns: int, block_m: int, block_n: int) -> int:
    return members * -(-rows // block_m) * -(-columns // block_n)


def widens(call: ScaledMatmulCall, target: Target) -> bool:
    """Whether float8 is multiplied in float16, which holds all its values: below 8.9, which has no float8 units, and where these
    would sum in fewer bits than are asked for."""
    return call.in_float8 and ((target.capability or _HOPPER) < (8, 9) or call.precision != "default")


def forward_heuristic(call: ScaledMatmulCall, target: Target) -> Config:
    return next(_configs(call, target, gradient=False))


def backward_heuristic(call: ScaledMatmulCall, target: Target) -> Config:
    return next(_configs(call, target, gradient=True))


def forward_space(call: ScaledMatmulCall, target: Target) -> list[Config]:
    return _space(call, target, gradient=False)


def backward_space(call: ScaledMatmulCall, target: Target) -> list[Config]:
    return _space(call, target, gradient=True)


def _space(call: ScaledMatmulCall, target: Target, *, gradient: bool) -> list[Config]:
    """The heuristic's tile with other L2 swizzles, and as it lies or transposed first, and other tiles."""
    found = list(_configs(call, target, gradient=gradient))
    others = [dataclasses.replace(found[0], l2_swizzle=l2_swizzle) for l2_swizzle in (4, 16)]
    if not call.transpose_rhs:
        others.append(dataclasses.replace(found[0], transpose_first=not found[0].transpose_first))
    return list(dict.fromkeys([*found, *others]))


def _configs(call: ScaledMatmulCall, target: Target, *, gradient: bool) -> Iterator[Config]:
    """Those that fit the device, the heuristic's first; the last fits everywhere."""
    members, rows = product_of(call)
    few = rows <= _FEW
    many = members * rows * call.columns >= 128 * 128 * (multiprocessors(target) or 1)
    shapes = _SHAPES_OF_FEW if few else _SHAPES if many else (*_SMALL, *_SHAPES)
    for block_m, block_n, block_k, warps, stages in (*shapes, _LAST):
        found = Config(
            _cut(block_m, rows, LEAST),
            _cut(block_n, call.columns, LEAST),
            _cut(block_k, call.lhs.shape[2], LEAST_DEPTH),
            warps,
            stages,
            transpose_first=not call.transpose_rhs and not few,
        )
        if _fits(call, target, found, gradient=gradient):
            yield found


_SHAPES = ((128, 256, 128, 8, 4), (128, 128, 128, 8, 4), (128, 128, 128, 4, 3), (256, 128, 128, 8, 3), (128, 128, 64, 8, 4))
"""Rows, columns, depth, warps and stages."""
_SMALL = ((64, 128, 128, 4, 4), (64, 64, 128, 4, 5))
"""Where large tiles leave multiprocessors idle."""
_SHAPES_OF_FEW = ((64, 32, 256, 4, 4), (16, 32, 256, 4, 4), (64, 32, 128, 4, 6), (64, 64, 128, 4, 4), (16, 64, 256, 4, 3))
_LAST = (32, 32, 32, 4, 2)


def _cut(block: int, size: int, least: int) -> int:
    """No larger than the array needs."""
    return max(least, min(block, next_power_of_2(size)))


def _fits(call: ScaledMatmulCall, target: Target, config: Config, *, gradient: bool) -> bool:
    """Whether a tile fits in shared memory, where a widened one may take two bytes, and its sums in registers, more of which a
    gradient's two reductions need."""
    step = (config.block_m + config.block_n) * config.block_k * (2 if widens(call, target) else 1)
    end = config.block_m * config.block_n * 4
    held = config.block_m * config.block_n // (32 * config.num_warps)
    in_registers = gradient or widens(call, target) or (target.capability or _HOPPER) < _HOPPER
    return max(config.num_stages * step, end) <= shared_memory_limit(target) and held <= (64 if in_registers else 128)


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
