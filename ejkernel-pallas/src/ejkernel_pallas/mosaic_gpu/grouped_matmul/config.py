"""Performance knobs of `grouped_matmul`: tiles of the kernels, what they take of a multiprocessor, and which are tried."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import FEWER_MULTIPROCESSORS, HOPPER_MULTIPROCESSORS
from ejkernel_pallas.mosaic_gpu._call import SHARED_MEMORY, SHARED_MEMORY_SLACK

STEP_BYTES = 128
"""Of a row of one step, the widest that the copy engine swizzles."""
DEPTH = 64
"""Of one step in a half."""
CONSUMERS = 2
"""Warpgroups that multiply."""
PRODUCER_REGISTERS = 40
_CHUNK_BYTES = 128
_MOST_SUMS = 128
"""Float32 sums of one thread; the other half of its 232 registers holds addresses and what is stored."""
MOST_SUMS_BESIDE = 96
"""The same where products are promoted: beside them are as many sums of one step."""


def depth_of(dtype: Any) -> int:
    """Of one step: 64 of a half, 128 of float8."""
    return STEP_BYTES // jnp.dtype(dtype).itemsize


def chunk_width(dtype: Any) -> int:
    """Columns of a result that are stored together."""
    return _CHUNK_BYTES // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is cut into units.

    Attributes:
        block_m: rows of a unit of one block: 64, 128 or 256; of a matrix's gradient 128 or 256.
        block_n: columns of a unit: 64, 128, 192 or 256; of a matrix's gradient 128 or 256.
        stages: steps in flight.
        band: tiles of rows that use every tile of columns one after the other, so that it stays in the L2 cache.
        cluster: blocks that take neighbouring tiles of rows and share the copies of the other operand: 1 or 2.
        programs: blocks, or clusters, that share all units; 0 = one per unit.
        slots: chunks of a result that one consumer may have on their way out: 2 or 4.
    """

    block_m: int
    block_n: int
    stages: int
    band: int = 8
    cluster: int = 1
    programs: int = 0
    slots: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (
            ("block_m", (64, 128, 256)),
            ("block_n", (64, 128, 192, 256)),
            ("cluster", (1, 2)),
            ("slots", (2, 4)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected one of {allowed}")
        if min(self.stages - 1, self.band, self.programs + 1) < 1:
            raise ValueError(f"{self}: stages is at least 2, band at least 1, programs at least 0")
        if self.sums > _MOST_SUMS or self.own_columns % 64:
            raise ValueError(f"{self}: each half of a tile has whole 64 columns and at most {128 * _MOST_SUMS} elements")

    @property
    def height(self) -> int:
        """Rows of a unit."""
        return self.block_m * self.cluster

    @property
    def split_rows(self) -> bool:
        """Whether each consumer takes half of the rows of a tile, or half of its columns."""
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
        """Of a thread of a consumer."""
        return self.own_rows * self.own_columns // 128

    @property
    def shared_memory(self) -> int:
        """Bytes of a block, barriers included: steps in flight, of any dtype of the operands, and chunks of the result of any."""
        step = (self.block_m + self.block_n) * STEP_BYTES
        return self.stages * step + CONSUMERS * self.slots * self.own_rows * _CHUNK_BYTES + SHARED_MEMORY_SLACK


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A `Tile` for each kernel.

    Attributes:
        lhs_*: of the gradient of lhs, a product of the cotangent with the matrices; of float8, of the product without scales.
        rhs_*: of the gradient of the matrices: rows and columns of a matrix as it is stored; of float8, of sums over rows.
    """

    lhs_block_m: int
    lhs_block_n: int
    lhs_stages: int
    lhs_band: int
    lhs_cluster: int
    lhs_programs: int
    lhs_slots: int
    rhs_block_m: int
    rhs_block_n: int
    rhs_stages: int
    rhs_band: int
    rhs_cluster: int
    rhs_programs: int
    rhs_slots: int

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
    """One of the kernels' products.

    Attributes:
        mean: rows of a mean group.
        high: rows of the result, or of a matrix for its gradient.
        wide: columns of the result.
        outer: whether this is the gradient of matrices.
        promoted: whether the operands are float8, and sums of steps are promoted.
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
"""Rows of a mean group below which reading the matrices is the work, and a tile of 128 rows would hold little."""
_BAND = 16


def _multiprocessors(target: Target) -> int:
    """Of the device, where it is not a full one: the H20, the H100 for PCIe."""
    words = target.device_kind.split()
    return next((count for name, count in FEWER_MULTIPROCESSORS.items() if name in words), HOPPER_MULTIPROCESSORS)


def _heuristic(product: _Product, target: Target) -> Tile:
    """The largest tile; a lower one for small groups, a narrower one for narrow results."""
    if product.outer:
        return _filled(target, 128, 128 if product.wide <= 128 else 256)
    if product.mean < _FEW:
        return _filled(target, 64, 128)
    if product.promoted:
        return _filled(target, 128, _promoted_width(product.wide))
    widths = (128,) if product.wide <= 128 else (192, 256)
    return _filled(target, 128, min(widths, key=lambda width: (-(-product.wide // width) * width, -width)))


def _promoted_width(wide: int) -> int:
    """Of 128 and 192 the wider, which copies a sixth less, unless more than 1/16 of its columns would lie behind the end."""
    padded = {width: -(-wide // width) * width for width in (128, 192)}
    return 192 if 16 * padded[192] <= 17 * min(padded.values()) else 128


def _filled(target: Target, block_m: int, block_n: int, *, band: int = _BAND, cluster: int = 1, slots: int = 2) -> Tile:
    """As many stages as fit, up to 8; one block per multiprocessor."""
    programs = _multiprocessors(target) // cluster
    tiles = (Tile(block_m, block_n, stages, band, cluster, programs, slots) for stages in range(8, 1, -1))
    return next(tile for tile in tiles if tile.shared_memory <= SHARED_MEMORY)


def _space(product: _Product, target: Target) -> list[Tile]:
    """The heuristic's tile in other bands, with more of the result in flight, not persistent; other shapes, and clusters.

    Of float8 those shapes that leave registers for a second set of sums.
    """
    chosen = _heuristic(product, target)
    fill = functools.partial(_filled, target, chosen.block_m, chosen.block_n)
    found = [chosen, *(fill(band=band) for band in (4, 8, 32)), fill(slots=4), dataclasses.replace(chosen, programs=0)]
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
            found.append(_filled(target, block_m, block_n, band=_BAND // cluster, cluster=cluster))
    widest = chosen.block_n if product.promoted else 256 if product.wide > 128 else 128
    found.append(_filled(target, 128, widest, band=_BAND // 2, cluster=2, slots=4))
    return list(dict.fromkeys(found))


def forward_heuristic(call: GroupedMatmulCall, target: Target) -> Tile:
    return _heuristic(_product_of(call, "forward"), target)


def forward_space(call: GroupedMatmulCall, target: Target) -> list[Tile]:
    return _space(_product_of(call, "forward"), target)


def backward_heuristic(call: GroupedMatmulCall, target: Target) -> BackwardConfig:
    return BackwardConfig.of(*(_heuristic(_product_of(call, kind), target) for kind in ("lhs", "rhs")))


def backward_space(call: GroupedMatmulCall, target: Target) -> list[BackwardConfig]:
    """Each kernel varied alone: the two do not influence each other."""
    lhs, rhs = (_space(_product_of(call, kind), target) for kind in ("lhs", "rhs"))
    return list(dict.fromkeys(BackwardConfig.of(*pair) for pair in [(x, rhs[0]) for x in lhs] + [(lhs[0], x) for x in rhs]))


FORWARD = ConfigSpace(Tile, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
