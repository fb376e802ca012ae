"""How `quantized_matmul` is tiled, and from how many rows on weights are unpacked to memory first."""

from __future__ import annotations

import dataclasses
import math

from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.quantization.format import WORD
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._capability import multiprocessors

LEAST_PERIODS = 8
"""Narrowest right operand of an MMA."""
LEAST_DEPTH = 16
"""Shortest contraction of an MMA, and its rows."""
_MANY_ROWS = 512
"""Rows of x above which unpacking once is cheaper than unpacking for every tile of rows, where tiles may have many rows."""
_MANY_ROWS_OF_A_GROUP = 256
"""The same of the rows of a group, whose matrix is then multiplied as `grouped_matmul` does."""
_MOST_UNPACKED = 2**30
"""Bytes of the matrices of groups that may be unpacked."""
_WGMMA_ROWS = 64
"""Rows of a tile of a warpgroup. Where tiles have 16 rows only, more rows than these are unpacked once."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Of one product with packed weights. Stored rows and periods are those of the weights, whichever of them is contracted.

    Attributes:
        block_m: rows of x, or of the cotangent, of one program; a power of two, like the next two.
        block_rows: stored rows of a tile of weights.
        block_periods: periods of a tile: the fewest codes that fill whole words, which is 8 for 4 bits.
        split_k: sections of the contracted dimension, each summed by a program of its own.
        num_warps: warps per program.
        num_stages: pipeline stages.
        unpack: whether the weights are unpacked to memory first, and multiplied by XLA or, in groups, as `grouped_matmul` does; the
            other fields do not matter then.
    """

    block_m: int
    block_rows: int
    block_periods: int
    split_k: int
    num_warps: int
    num_stages: int
    unpack: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_m", LEAST_DEPTH), ("block_rows", LEAST_DEPTH), ("block_periods", LEAST_PERIODS)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise ValueError(f"{name}: got {size}, expected a power of two of at least {least}")
        if min(self.split_k, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"{self}: split_k, num_warps and num_stages are at least 1")


def period_of(bits: int) -> int:
    """Codes that fill whole words."""
    return WORD // math.gcd(bits, WORD)


def intervals_of(matrices: int) -> int:
    """Of the rows of a member in groups: those of each matrix, those before and those behind."""
    return matrices + 2


@dataclasses.dataclass(frozen=True)
class Product:
    """One product: the forward one, or the gradient of x.

    Attributes:
        members: products with weights of their own; with groups, those that have rows if as many have as can.
        rows: of x in each, in the mean.
        stored_rows: of the weights.
        columns: stored columns, along which codes are packed.
        packed_inner: whether the contraction runs along them.
        itemsize: bytes of an element of x.
        unpacked: bytes of all weights in the dtype of x.
        bits: of a code.
        grouped: whether rows are in groups.
        target: of the call.
    """

    members: int
    rows: int
    stored_rows: int
    columns: int
    packed_inner: bool
    itemsize: int
    unpacked: int
    bits: int
    grouped: bool
    target: Target

    @property
    def period(self) -> int:
        return period_of(self.bits)

    @property
    def hopper(self) -> bool:
        """Whether a warpgroup's MMAs take many rows without unpacking weights for each warp."""
        return self.target.capability is not None and (9, 0) <= self.target.capability < (12, 0)

    def config(self, block_m: int, block_rows: int, block_periods: int, warps: int, stages: int, load: float = 3.0) -> Config:
        """Blocks cut to the arrays, and as many sections as give `load` programs of four warps per multiprocessor.

        Sections are not made where their partial results would be more than the weights.
        """
        least = LEAST_DEPTH if self.packed_inner else LEAST_PERIODS
        block_periods = max(min(block_periods, next_power_of_2(-(-self.columns // self.period))), least)
        block_rows = max(min(block_rows, next_power_of_2(self.stored_rows)), LEAST_DEPTH)
        if not self.packed_inner and block_m < _WGMMA_ROWS and block_periods < LEAST_PERIODS * warps:
            warps = 1  # warps are laid along periods; more of them would unpack the same weights
        out, inner = -(-self.stored_rows // block_rows), -(-self.columns // (block_periods * self.period))
        if not self.packed_inner:
            out, inner = inner, out
        programs = self.members * -(-self.rows // block_m) * out
        wanted = load * max(4 // warps, 1) * (multiprocessors(self.target) or HOPPER_MULTIPROCESSORS)
        partial = 4 * self.rows * (self.stored_rows if self.packed_inner else self.columns)
        most = max(self.stored_rows * self.columns * self.bits // 8 // max(partial, 1), 1)
        split = max(min(int(wanted // max(programs, 1)), inner // 2, most), 1)
        return Config(block_m, block_rows, block_periods, split, warps, stages)


def product_of(call: QuantizedMatmulCall, target: Target, *, gradient: bool) -> Product:
    shared = all(array.shape[0] == 1 for array in (call.w, call.scales, call.zeros) if array is not None)
    batch, rows, _ = call.x.shape
    members = 1 if shared else batch
    if call.group_sizes is not None:
        members = max(min(batch * call.matrices, batch * rows), 1)
    itemsize = call.x.nbytes // max(call.x.size, 1) or 4
    return Product(
        members=members,
        rows=-(-batch * rows // members),
        stored_rows=call.stored_rows,
        columns=call.packed_columns,
        packed_inner=call.transpose != gradient,
        itemsize=itemsize,
        unpacked=(1 if shared else batch) * call.matrices * call.stored_rows * call.packed_columns * itemsize,
        bits=call.bits,
        grouped=call.group_sizes is not None,
        target=target,
    )


def _shapes(product: Product) -> list[tuple[int, int, int, int, int]]:
    """block_m, block_rows, block_periods, warps and stages; the heuristic's first."""
    if product.itemsize == 4:
        return [(16, 16, 16 if product.packed_inner else 8, 1, 2)]
    if product.packed_inner:
        periods = 32 if product.period <= 8 else 16
        small = [(16, 64, periods, 4, 4), (16, 64, periods, 4, 3), (16, 128, 16, 4, 4), (16, 32, periods, 2, 4)]
        stages = 3 if product.period <= 16 else 2
        large = [(64, 64, 16, 4, stages), (64, 128, 16, 4, stages), (64, 64, periods, 4, stages)]
        many = (128, 128, 16, 8, stages)
    elif product.period <= 16 and product.bits in (2, 4, 8):
        small = [(16, 64, 32, 4, 4), (16, 32, 32, 4, 5), (16, 128, 32, 4, 3), (16, 32, 16, 1, 4)]
        large = [(64, 64, 32 if product.period < 16 else 16, 4, 3), (64, 64, 16, 4, 3), (64, 32, 32, 4, 4)]
        many = (128, 64, large[0][2], 8, 3)
    else:
        return [(16, 32, 8, 1, 3), (16, 64, 8, 1, 3)]
    if not product.hopper or product.rows <= LEAST_DEPTH:
        return small
    if product.grouped and product.packed_inner:
        large = sorted(large, key=lambda shape: -shape[1])
    if product.rows <= _WGMMA_ROWS or product.period > 16:
        return large
    return [*large, many] if product.grouped and (product.packed_inner or product.bits < 8) else [many, *large]


def _unpacking(product: Product) -> Config:
    return dataclasses.replace(product.config(16, 16, 32, 4, 1), split_k=1, unpack=True)


def _may_unpack(product: Product) -> bool:
    return not product.grouped or product.unpacked <= _MOST_UNPACKED


def _heuristic(product: Product) -> Config:
    most = _WGMMA_ROWS
    if product.hopper and product.itemsize == 2 and product.period <= 16:
        most = _MANY_ROWS_OF_A_GROUP if product.grouped else _MANY_ROWS
    return _unpacking(product) if product.rows > most and _may_unpack(product) else product.config(*_shapes(product)[0])


def _space(product: Product) -> list[Config]:
    found = [_heuristic(product), *(product.config(*shape) for shape in _shapes(product))]
    found += [product.config(*_shapes(product)[0], load=load) for load in (2.0, 4.0, 6.0)]
    return list(dict.fromkeys([*found, _unpacking(product)] if _may_unpack(product) else found))


def forward_heuristic(call: QuantizedMatmulCall, target: Target) -> Config:
    return _heuristic(product_of(call, target, gradient=False))


def forward_space(call: QuantizedMatmulCall, target: Target) -> list[Config]:
    return _space(product_of(call, target, gradient=False))


def backward_heuristic(call: QuantizedMatmulCall, target: Target) -> Config:
    return _heuristic(product_of(call, target, gradient=True))


def backward_space(call: QuantizedMatmulCall, target: Target) -> list[Config]:
    return _space(product_of(call, target, gradient=True))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
