"""Configs of `grouped_matmul`, limited by shared memory and registers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import FEWER_MULTIPROCESSORS, HOPPER_MULTIPROCESSORS
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.mosaic_gpu._device import SHARED_MEMORY, SHARED_MEMORY_SLACK

STEP_BYTES = 128
"""Bytes of a row of one step: the widest TMA swizzle."""
DEPTH = 64
"""K of one step, for 16-bit operands."""
CONSUMERS = 2
"""Consumer warpgroups."""
PRODUCER_REGISTERS = 40
_CHUNK_BYTES = 128
_MAX_SUMS = 128
"""float32 accumulators of one thread; the rest of its 232 registers holds addresses and the epilogue."""
MAX_PROMOTED_SUMS = 96
"""The same with promoted accumulation, which keeps as many accumulators of one step besides."""


def depth_of(dtype: Any) -> int:
    """K of one step: 64 for 16-bit operands, 128 for float8."""
    return STEP_BYTES // jnp.dtype(dtype).itemsize


def chunk_width(dtype: Any) -> int:
    """Columns of an epilogue store."""
    return _CHUNK_BYTES // jnp.dtype(dtype).itemsize


@renamed_knobs(stages="num_stages", band="l2_swizzle", slots="epilogue_stages")
@dataclasses.dataclass(frozen=True)
class Tile:
    """How a matrix multiplication is tiled.

    Attributes:
        block_m: rows of a tile: 64, 128 or 256; 128 or 256 for the gradient of rhs.
        block_n: columns of a tile: 64, 128, 192 or 256; 128 or 256 for the gradient of rhs.
        num_stages: pipeline stages.
        l2_swizzle: row tiles per swizzle group. A group visits every column tile before the next group starts, for L2 reuse.
        cluster: blocks of a cluster, with adjacent row tiles and TMA multicast of the other operand: 1 or 2.
        programs: blocks or clusters of a persistent kernel; 0 = one per tile.
        epilogue_stages: epilogue stores of one consumer in flight: 2 or 4.
    """

    block_m: int
    block_n: int
    num_stages: int
    l2_swizzle: int = 8
    cluster: int = 1
    programs: int = 0
    epilogue_stages: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", (64, 128, 256)),
            ("block_n", (64, 128, 192, 256)),
            ("cluster", (1, 2)),
            ("epilogue_stages", (2, 4)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected one of {allowed}")
        if min(self.num_stages - 1, self.l2_swizzle, self.programs + 1) < 1:
            raise ValueError(f"{self}: stages is at least 2, band at least 1, programs at least 0")
        if self.sums > _MAX_SUMS or self.own_columns % 64:
            raise ValueError(f"{self}: each half of a tile has whole 64 columns and at most {128 * _MAX_SUMS} elements")

    @property
    def height(self) -> int:
        """Rows of a cluster's tile."""
        return self.block_m * self.cluster

    @property
    def split_rows(self) -> bool:
        """Whether consumers split the rows of a tile, or its columns."""
        return self.block_m > 64

    @property
    def own_rows(self) -> int:
        """Of a consumer."""
        return self.block_m // CONSUMERS if self.split_rows else self.block_m

    @property
    def own_columns(self) -> int:
        """Of a consumer."""
        return self.block_n if self.split_rows else self.block_n // CONSUMERS

    @property
    def sums(self) -> int:
        """Accumulators of a consumer thread."""
        return self.own_rows * self.own_columns // 128

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block, with mbarriers: pipeline stages and epilogue stages, for any dtype."""
        step = (self.block_m + self.block_n) * STEP_BYTES
        return self.num_stages * step + CONSUMERS * self.epilogue_stages * self.own_rows * _CHUNK_BYTES + SHARED_MEMORY_SLACK


@renamed_knobs(
    lhs_stages="lhs_num_stages",
    lhs_band="lhs_l2_swizzle",
    lhs_slots="lhs_epilogue_stages",
    rhs_stages="rhs_num_stages",
    rhs_band="rhs_l2_swizzle",
    rhs_slots="rhs_epilogue_stages",
)
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A `Tile` for each kernel.

    Attributes:
        lhs_*: of the gradient of lhs, the cotangent times the matrices; for float8, of the unscaled output.
        rhs_*: of the gradient of the matrices, with rows and columns of a stored matrix; for float8, of sums over rows.
    """

    lhs_block_m: int
    lhs_block_n: int
    lhs_num_stages: int
    lhs_l2_swizzle: int
    lhs_cluster: int
    lhs_programs: int
    lhs_epilogue_stages: int
    rhs_block_m: int
    rhs_block_n: int
    rhs_num_stages: int
    rhs_l2_swizzle: int
    rhs_cluster: int
    rhs_programs: int
    rhs_epilogue_stages: int

    def __post_init__(self) -> None:
        _ = self.tile_of_lhs
        tile = self.tile_of_rhs
        if tile.block_m < 128 or tile.block_n % 128:
            raise ValueError(f"{tile}: a matrix's gradient has tiles of 128 or 256 rows and columns")

    @classmethod
    def of(cls, lhs: Tile, rhs: Tile) -> BackwardConfig:
        return cls(*dataclasses.astuple(lhs), *dataclasses.astuple(rhs))

    @property
    def tile_of_lhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[:7])

    @property
    def tile_of_rhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[7:])


@dataclasses.dataclass(frozen=True)
class _Product:
    """One of the kernels' matrix multiplications.

    Attributes:
        mean: mean rows per group.
        high: rows of the output, or of a matrix for the gradient of rhs.
        wide: columns of the output.
        outer: whether this is the gradient of matrices.
        promoted: whether operands are float8, with promoted accumulation.
    """

    mean: int
    high: int
    wide: int
    outer: bool
    promoted: bool = False


def _product_of(call: GroupedMatmulCall, kind: str) -> _Product:
    """Of `kind` "forward", "lhs" or "rhs"."""
    batch, rows, inner = call.lhs.shape
    outer = kind == "rhs"
    kind = "forward" if kind == "lhs" and call.in_float8 else kind
    high, wide = (call.columns, inner) if kind == "lhs" or (outer and call.transpose_rhs) else (inner, call.columns)
    mean = rows // max(call.group_sizes.shape[1], 1)
    return _Product(mean=mean, high=high if outer else batch * rows, wide=wide, outer=outer, promoted=call.in_float8)


_FEW = 80
"""Mean rows per group below which loading the matrices dominates, and a tile of 128 rows would be mostly empty."""
_L2_SWIZZLE = 16


def _multiprocessors(target: Target) -> int:
    """Multiprocessors; the H20 and the H100 PCIe have fewer than others."""
    words = target.device_kind.split()
    return next((count for name, count in FEWER_MULTIPROCESSORS.items() if name in words), HOPPER_MULTIPROCESSORS)


def _heuristic(product: _Product, target: Target) -> Tile:
    """The largest tile; fewer rows for small groups, fewer columns for narrow outputs."""
    if product.outer:
        return _filled(target, 128, 128 if product.wide <= 128 else 256)
    if product.mean < _FEW:
        return _filled(target, 64, 128)
    if product.promoted:
        return _filled(target, 128, _promoted_width(product.wide))
    widths = (128,) if product.wide <= 128 else (192, 256)
    return _filled(target, 128, min(widths, key=lambda width: (-(-product.wide // width) * width, -width)))


def _promoted_width(wide: int) -> int:
    """192, which loads a sixth less than 128, unless that pads more than 1/16 of the columns."""
    padded = {width: -(-wide // width) * width for width in (128, 192)}
    return 192 if 16 * padded[192] <= 17 * min(padded.values()) else 128


def _filled(
    target: Target, block_m: int, block_n: int, *, l2_swizzle: int = _L2_SWIZZLE, cluster: int = 1, epilogue_stages: int = 2
) -> Tile:
    """A persistent tile with as many stages as fit, up to 8."""
    programs = _multiprocessors(target) // cluster
    tiles = (
        Tile(block_m, block_n, num_stages, l2_swizzle, cluster, programs, epilogue_stages) for num_stages in range(8, 1, -1)
    )
    return next(tile for tile in tiles if tile.shared_memory <= SHARED_MEMORY)


def _space(product: _Product, target: Target) -> list[Tile]:
    """The heuristic's tile with other L2 swizzles, more epilogue stages, or not persistent; other shapes, and clusters.

    For float8 only shapes that leave registers for a second set of accumulators.
    """
    chosen = _heuristic(product, target)
    fill = functools.partial(_filled, target, chosen.block_m, chosen.block_n)
    found = [
        chosen,
        *(fill(l2_swizzle=l2_swizzle) for l2_swizzle in (4, 8, 32)),
        fill(epilogue_stages=4),
        dataclasses.replace(chosen, programs=0),
    ]
    if product.outer:
        shapes = ((128, 256), (256, 128), (128, 128))
    elif product.mean < _FEW:
        shapes = ((64, 128), (64, 256), (128, 128))
    elif product.promoted:
        shapes = ((128, 192), (128, 128), (64, 256), (256, 64))
    else:
        shapes = ((128, 256), (128, 192), (256, 128), (128, 128))
    for (block_m, block_n), cluster in itertools.product(shapes, (1, 2)):
        if block_m > 64 or cluster == 1:
            found.append(_filled(target, block_m, block_n, l2_swizzle=_L2_SWIZZLE // cluster, cluster=cluster))
    widest = chosen.block_n if product.promoted else 256 if product.wide > 128 else 128
    found.append(_filled(target, 128, widest, l2_swizzle=_L2_SWIZZLE // 2, cluster=2, epilogue_stages=4))
    return list(dict.fromkeys(found))


def forward_heuristic(call: GroupedMatmulCall, target: Target) -> Tile:
    return _heuristic(_product_of(call, "forward"), target)


def forward_space(call: GroupedMatmulCall, target: Target) -> list[Tile]:
    return _space(_product_of(call, "forward"), target)


def backward_heuristic(call: GroupedMatmulCall, target: Target) -> BackwardConfig:
    return BackwardConfig.of(*(_heuristic(_product_of(call, kind), target) for kind in ("lhs", "rhs")))


def backward_space(call: GroupedMatmulCall, target: Target) -> list[BackwardConfig]:
    """Varies one kernel at a time: the two do not influence each other."""
    lhs, rhs = (_space(_product_of(call, kind), target) for kind in ("lhs", "rhs"))
    return list(dict.fromkeys(BackwardConfig.of(*pair) for pair in [(x, rhs[0]) for x in lhs] + [(lhs[0], x) for x in rhs]))


FORWARD = ConfigSpace(Tile, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
