"""Configs of `newton_schulz`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton.grouped_matmul.config import Tile, readable_by_tma

_TMA_ON = (9, 0)


@dataclasses.dataclass(frozen=True)
class Config:
    """A `grouped_matmul.config.Tile` for each kernel.

    Attributes:
        gram_*: of symmetric products; block_m is a multiple of block_n.
        update_*: of the product with X.
    """

    gram_block_m: int
    gram_block_n: int
    gram_block_k: int
    gram_num_warps: int
    gram_num_stages: int
    gram_programs: int
    gram_tma: bool
    update_block_m: int
    update_block_n: int
    update_block_k: int
    update_num_warps: int
    update_num_stages: int
    update_l2_swizzle: int
    update_programs: int
    update_tma: bool

    def __post_init__(self) -> None:
        _ = self.gram, self.update
        if self.gram_block_m % self.gram_block_n:
            raise ValueError(f"gram_block_m: got {self.gram_block_m}, expected a multiple of gram_block_n {self.gram_block_n}")

    @classmethod
    def of(cls, gram: Tile, update: Tile) -> Config:
        first = dataclasses.asdict(gram)
        del first["l2_swizzle"]
        return cls(*first.values(), *dataclasses.astuple(update))

    @property
    def gram(self) -> Tile:
        sizes = self.gram_block_m, self.gram_block_n, self.gram_block_k, self.gram_num_warps, self.gram_num_stages
        return Tile(*sizes, programs=self.gram_programs, tma=self.gram_tma)

    @property
    def update(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[7:])


_Shape = tuple[int, int, int, int, int]
"""Block sizes, warps and stages."""
_SMALL = ((64, 64, 64, 4, 3), (32, 32, 32, 4, 2), (16, 16, 32, 4, 2))
_GRAM = ((128, 128, 64, 8, 4), (128, 128, 64, 8, 3), *_SMALL)
_UPDATE = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), *_SMALL)
_EXACT = ((64, 64, 16, 8, 2), (32, 32, 16, 4, 2), (16, 16, 16, 4, 1))
"""For float32, without tensor cores."""
_MORE_GRAM = ((256, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 64, 64, 4, 4), (128, 64, 128, 4, 3))
_MORE_UPDATE = ((256, 128, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3))


def gram_tiles(rows: int, tile: Tile) -> int:
    """Tiles of a symmetric matrix with elements on or below the diagonal."""
    down = -(-rows // tile.block_m)
    return tile.block_m // tile.block_n * down * (down + 1) // 2


def update_tiles(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.block_m) * -(-columns // tile.block_n)


@dataclasses.dataclass(frozen=True)
class _Product:
    """One kernel's: `height x depth` times `depth x width`, a symmetric one if height is width."""

    height: int
    width: int
    depth: int
    exact: bool
    tma: bool
    gram: bool
    target: Target

    def tile(self, shape: _Shape, *, tma: bool) -> Tile:
        """No larger than the product; with TMA one program for each multiprocessor."""
        block_m, block_n, block_k, warps, stages = shape
        block_m, block_n = min(block_m, dot_block(self.height)), min(block_n, dot_block(self.width))
        small = block_m * block_n < 64 * 64
        sizes = block_m, block_n, min(block_k, dot_block(self.depth)), min(warps, 4) if small else warps, stages
        tma = tma and self.tma
        return Tile(*sizes, programs=HOPPER_MULTIPROCESSORS if tma else 0, tma=tma)

    def fits(self, tile: Tile) -> bool:
        """In shared memory and registers."""
        itemsize = 4 if self.exact else 2
        step = (tile.block_m + tile.block_n) * tile.block_k * itemsize * tile.num_stages
        end = tile.block_m * tile.block_n * itemsize
        total = step + end + 1024 if tile.tma else max(step, end)
        in_registers = self.exact or (self.target.capability or _TMA_ON) < _TMA_ON
        held = tile.block_m * tile.block_n // (32 * tile.num_warps)
        return total <= shared_memory_limit(self.target) and held <= (64 if in_registers else 128)

    def heuristic(self) -> Tile:
        tiles = [self.tile(shape, tma=tma) for shape in self.shapes for tma in (self.tma, False)]
        return next(filter(self.fits, tiles), tiles[-1])

    def space(self) -> list[Tile]:
        more = () if self.exact else _MORE_GRAM if self.gram else _MORE_UPDATE
        tiles = [self.tile(shape, tma=tma) for shape in (*self.shapes[:2], *more) for tma in (False, True)]
        chosen = self.heuristic()
        swizzled = [] if self.gram else [dataclasses.replace(chosen, l2_swizzle=l2_swizzle) for l2_swizzle in (4, 16)]
        return list(dict.fromkeys([chosen, *filter(self.fits, tiles), *swizzled]))

    @property
    def shapes(self) -> tuple[_Shape, ...]:
        return _EXACT if self.exact else _GRAM if self.gram else _UPDATE


def _products(call: NewtonSchulzCall, target: Target) -> tuple[_Product, _Product]:
    _, rows, columns = call.x.shape
    exact = call.dtype == "float32"
    tma = target.capability == _TMA_ON and all(readable_by_tma(size, call.dtype) for size in (rows, columns))
    return (
        _Product(rows, rows, columns, exact, tma, True, target),
        _Product(rows, columns, rows, exact, tma, False, target),
    )


def heuristic(call: NewtonSchulzCall, target: Target) -> Config:
    return Config.of(*(product.heuristic() for product in _products(call, target)))


def search_space(call: NewtonSchulzCall, target: Target) -> list[Config]:
    """Varies one kernel at a time: the two do not influence each other."""
    gram, update = (product.space() for product in _products(call, target))
    pairs = [(tile, update[0]) for tile in gram] + [(gram[0], tile) for tile in update]
    return list(dict.fromkeys(Config.of(*pair) for pair in pairs))


FORWARD = ConfigSpace(Config, heuristic, search_space)
