"""Configs of `grouped_matmul`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._numerics import dot_precision

SCRATCH = 256
"""Bytes of two TMA descriptors."""
_TMA_ON = (9, 0)
"""The compute capability on which TMA was measured; others load through pointers."""
_TMA_BYTES = 16
"""Alignment of rows that TMA requires."""


@renamed_knobs(band="l2_swizzle")
@dataclasses.dataclass(frozen=True)
class Tile:
    """How a matrix multiplication is tiled.

    Attributes:
        block_m: rows of an output tile; a power of two, like `block_n` and `block_k`.
        block_n: columns of an output tile.
        block_k: depth of one step; for a matrix's gradient, rows of lhs.
        num_warps: warps per program.
        num_stages: pipeline stages.
        l2_swizzle: row tiles per swizzle group. A group visits every column tile before the next group starts, for L2 reuse.
        programs: grid size of a persistent kernel; 0 = one program per tile.
        tma: whether tiles are TMA loads; the next tile is then prefetched while one is stored.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    l2_swizzle: int = 8
    programs: int = 0
    tma: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size < MIN_DOT_SIZE or size & (size - 1):
                raise ValueError(f"{name}: got {size}, expected a power of two of at least {MIN_DOT_SIZE}")
        if min(self.num_warps, self.num_stages, self.l2_swizzle, self.programs + 1) < 1:
            raise ValueError(f"{self}: num_warps, num_stages and band are at least 1, programs at least 0")


@renamed_knobs(lhs_band="lhs_l2_swizzle", rhs_band="rhs_l2_swizzle")
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A `Tile` for each kernel.

    Attributes:
        lhs_*: of the gradient of lhs, the cotangent times the matrices.
        rhs_*: of the gradient of the matrices, with one program per tile of a matrix; block_k is rows of lhs per step.
    """

    lhs_block_m: int
    lhs_block_n: int
    lhs_block_k: int
    lhs_num_warps: int
    lhs_num_stages: int
    lhs_l2_swizzle: int
    lhs_programs: int
    lhs_tma: bool
    rhs_block_m: int
    rhs_block_n: int
    rhs_block_k: int
    rhs_num_warps: int
    rhs_num_stages: int
    rhs_l2_swizzle: int

    def __post_init__(self) -> None:
        _ = self.tile_of_lhs, self.tile_of_rhs

    @classmethod
    def of(cls, lhs: Tile, rhs: Tile) -> BackwardConfig:
        return cls(*dataclasses.astuple(lhs), *dataclasses.astuple(rhs)[:6])

    @property
    def tile_of_lhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[:8])

    @property
    def tile_of_rhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[8:])


@dataclasses.dataclass(frozen=True)
class _Product:
    """One of the kernels' matrix multiplications, `height x depth` times `depth x width`.

    Attributes:
        height: rows of all groups, or of a matrix for the gradient of rhs.
        width: columns.
        depth: contracted dimension.
        mean: rows of a mean group.
        itemsize: bytes of an element of the left operand.
        stored: bytes of a stored element of the right operand.
        out: bytes of an element of the result.
        exact: float32 without tensor cores.
        outer: whether this is the gradient of matrices.
        partial: whether the kernel also computes partial sums of a scale's gradient.
        tma: whether TMA can load the operands.
        target: of the call.
    """

    height: int
    width: int
    depth: int
    mean: int
    itemsize: int
    stored: int
    out: int
    exact: bool
    outer: bool
    partial: bool
    tma: bool
    target: Target

    def fits(self, tile: Tile) -> bool:
        """Whether a tile fits in shared memory (pipeline stages, a converted operand, the epilogue) and registers."""
        right = tile.block_n * tile.block_k
        step = tile.block_m * tile.block_k * self.itemsize + right * self.stored
        end = tile.block_m * tile.block_n * self.out
        if tile.tma:
            total = tile.num_stages * step + end + 1024
        else:
            total = max(tile.num_stages * step + (right * self.itemsize if self.stored != self.itemsize else 0), end)
        held = tile.block_m * tile.block_n // (32 * tile.num_warps)
        in_registers = self.itemsize == 4 or self.partial or (self.target.capability or _TMA_ON) < _TMA_ON
        most = 64 if in_registers else 128
        return total <= shared_memory_limit(self.target) and held <= most

    def cut(self, tile: Tile) -> Tile:
        """Clip a tile to the array sizes, and disable TMA where it cannot load the operands."""
        block_m, block_n = min(tile.block_m, dot_block(self.height)), min(tile.block_n, dot_block(self.width))
        small = block_m * block_n < 64 * 64
        return dataclasses.replace(
            tile,
            block_m=block_m,
            block_n=block_n,
            block_k=min(tile.block_k, dot_block(self.depth)),
            num_warps=min(tile.num_warps, 4) if small else tile.num_warps,
            tma=tile.tma and self.tma,
        )


def readable_by_tma(width: int, dtype: Any) -> bool:
    """Whether TMA can load tiles of rows of this width: 16-bit elements and aligned rows."""
    itemsize = jnp.dtype(dtype).itemsize
    return itemsize == 2 and width > 0 and width * itemsize % _TMA_BYTES == 0


def _product_of(call: GroupedMatmulCall, target: Target, kind: str) -> _Product:
    """Of `kind` "forward", "lhs" or "rhs"."""
    itemsize = jnp.dtype(call.product_dtype).itemsize
    batch, rows, inner = call.lhs.shape
    columns = call.columns
    outer = kind == "rhs"
    out = {"forward": call.preferred_element_type, "lhs": call.lhs.dtype, "rhs": call.rhs.dtype}[kind]
    wide = (columns, inner) if kind == "lhs" or (outer and call.transpose_rhs) else (inner, columns)
    readable = all(readable_by_tma(size, call.product_dtype) for size in (inner, columns))
    return _Product(
        height=wide[0] if outer else batch * rows,
        width=wide[1],
        depth=rows if outer else wide[0],
        mean=rows // max(call.group_sizes.shape[1], 1),
        itemsize=itemsize,
        stored=itemsize if outer else jnp.dtype(call.rhs.dtype).itemsize,
        out=jnp.dtype(out).itemsize,
        exact=itemsize == 4 and dot_precision(call.precision, call.product_dtype) == "ieee",
        outer=outer,
        partial=outer and call.rhs_scale is not None,
        tma=readable and not outer and call.rhs.dtype == call.product_dtype and target.capability == _TMA_ON,
        target=target,
    )


_Shape = tuple[int, ...]
"""Block sizes, warps and stages."""
_EXACT = ((128, 128, 16, 8, 2), (64, 64, 16, 8, 2), (32, 32, 16, 4, 2), (16, 16, 16, 4, 1))
"""For float32 without tensor cores."""
_SINGLE = ((128, 128, 32, 8, 3), (64, 64, 32, 4, 3), (64, 64, 32, 4, 2), (32, 32, 32, 4, 2), (16, 16, 16, 4, 1))
"""For float32 on tensor cores."""
_HALF = (
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 32, 8, 3)),
    *((64, 128, 64, 4, 3), (64, 64, 64, 4, 2), (32, 32, 32, 4, 2), (16, 16, 16, 4, 1)),
)
_MORE = ((256, 128, 64, 8, 3), (128, 128, 64, 4, 3))
_OUTER_MORE = ((128, 256, 64, 8, 4), (128, 256, 32, 8, 6), *_MORE)
"""More candidates of the search space, the second list for gradients of matrices."""
_LOW = ((128, 128, 4, 4), (128, 64, 4, 4), (64, 128, 4, 3), (64, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))
"""Columns, depth, warps and stages for groups with so few rows that loading the matrices dominates."""
_FEW = 64
"""Mean rows per group below which that holds."""


def _shapes(product: _Product) -> tuple[_Shape, ...]:
    """The best first; the last fits everywhere."""
    shapes = _EXACT if product.exact else _SINGLE if product.itemsize == 4 else _HALF
    if product.outer or product.mean >= _FEW:
        return shapes
    height = dot_block(product.mean)
    if shapes is _HALF:
        return tuple((height, *shape) for shape in _LOW)
    return tuple((min(rows, height), *shape) for rows, *shape in shapes)


def _tile(product: _Product, shape: _Shape, *, tma: bool) -> Tile:
    """One program per tile, or with TMA one per multiprocessor. `l2_swizzle` as measured on an H200."""
    block_m, block_n, block_k, warps, stages = shape
    tile = product.cut(Tile(block_m, block_n, block_k, warps, stages, l2_swizzle=16 if product.outer else 8, tma=tma))
    return dataclasses.replace(tile, programs=HOPPER_MULTIPROCESSORS) if tile.tma else tile


def _heuristic(product: _Product) -> Tile:
    tiles = (_tile(product, shape, tma=tma) for shape in _shapes(product) for tma in (product.tma, False))
    return next(filter(product.fits, tiles), _tile(product, _shapes(product)[-1], tma=False))


def _space(product: _Product) -> list[Tile]:
    """The heuristic's tile with other L2 swizzles, and other large tiles, each with pointers and with TMA."""
    chosen = _heuristic(product)
    shapes = _shapes(product)
    more = shapes[2:-2]
    if shapes is _HALF:
        more = _OUTER_MORE if product.outer else _MORE
    found = [dataclasses.replace(chosen, l2_swizzle=l2_swizzle) for l2_swizzle in (4, 8, 16)]
    found += [_tile(product, shape, tma=tma) for shape in (*shapes[:2], *more) for tma in (False, True)]
    return list(dict.fromkeys([chosen, *filter(product.fits, found)]))


def forward_heuristic(call: GroupedMatmulCall, target: Target) -> Tile:
    return _heuristic(_product_of(call, target, "forward"))


def forward_space(call: GroupedMatmulCall, target: Target) -> list[Tile]:
    return _space(_product_of(call, target, "forward"))


def backward_heuristic(call: GroupedMatmulCall, target: Target) -> BackwardConfig:
    return BackwardConfig.of(*(_heuristic(_product_of(call, target, kind)) for kind in ("lhs", "rhs")))


def backward_space(call: GroupedMatmulCall, target: Target) -> list[BackwardConfig]:
    """Varies one kernel at a time: the two do not influence each other."""
    lhs, rhs = (_space(_product_of(call, target, kind)) for kind in ("lhs", "rhs"))
    return list(dict.fromkeys(BackwardConfig.of(*pair) for pair in [(x, rhs[0]) for x in lhs] + [(lhs[0], x) for x in rhs]))


FORWARD = ConfigSpace(Tile, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
