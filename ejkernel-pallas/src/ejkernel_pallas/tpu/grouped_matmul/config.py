"""Configs of `grouped_matmul` on TPU, limited by VMEM.

Among the tiles that fit, the heuristic takes the fastest by a simple model of FLOPs, traffic and grid steps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping

from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.tpu.grouped_matmul.schedule import max_matrix_items

_LANES = 128
_SUBLANES = 8
_MIB = 1 << 20
_DEFAULT_VMEM = 16 * _MIB
"""Default VMEM limit of every TPU."""
_SLACK = 2 * _MIB
"""For spilled registers, semaphores and compiler scratch."""
_STEP_SECONDS = 0.4e-6
"""Overhead of one grid step; the Pallas documentation says 0.35 microseconds."""
_HEIGHTS = (64, 128, 256, 512, 1024)
_WIDTHS = (128, 256, 512, 1024, 2048)
MAX_BLOCK_M = _HEIGHTS[-1]
MAX_ITEMS = 24576
"""Their lists take 768 KiB of the 1 MiB of SMEM."""
_MAX_MULTIPLICATIONS = 1 << 30
"""Largest number of multiplications of one step, in MXU passes: the compiler unrolls them and takes seconds for more."""
_TRIED = 6
"""Configs of a search space."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One core: VMEM in bytes, bfloat16 FLOP/s, bytes per second, MXU size, cores per grid."""

    vmem: int
    flops: float
    bandwidth: float
    edge: int
    cores: int = 1


_SMALLEST = _Kind(16 * _MIB, 138e12, 614e9, 128, 2)
_V5E = _Kind(128 * _MIB, 197e12, 820e9, 128)
_V5P = _Kind(64 * _MIB, 229e12, 1380e9, 128, 2)
_V6E = _Kind(128 * _MIB, 920e12, 1640e9, 256)
_V7X = _Kind(64 * _MIB, 1150e12, 3690e9, 256)
_KINDS: Mapping[str, _Kind] = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _V7X,
}
"""By JAX's device kind; v4 and unknown kinds use the smallest."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes of one kernel, clipped to the arrays."""

    block_m: int
    block_k: int
    block_n: int


@renamed_knobs(rows="block_m", inner="block_k", columns="block_n")
@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes of the forward kernel.

    Attributes:
        block_m: rows; a multiple of 16, fewer when lhs has fewer.
        block_k: contracted dimension; a multiple of 128, or all of it.
        block_n: columns; a multiple of 128, or all of it.
    """

    block_m: int
    block_k: int
    block_n: int

    def __post_init__(self) -> None:
        _check(self)

    def tile(self, rows: int, inner: int, columns: int) -> Tile:
        return _cut(Tile(self.block_m, self.block_k, self.block_n), rows, inner, columns)


@renamed_knobs(
    lhs_rows="lhs_block_m",
    lhs_inner="lhs_block_k",
    lhs_columns="lhs_block_n",
    rhs_rows="rhs_block_m",
    rhs_inner="rhs_block_k",
    rhs_columns="rhs_block_n",
)
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Block sizes of the gradients of lhs and of rhs, each as in `Config`."""

    lhs_block_m: int
    lhs_block_k: int
    lhs_block_n: int
    rhs_block_m: int
    rhs_block_k: int
    rhs_block_n: int

    def __post_init__(self) -> None:
        _check(self)

    def lhs_tile(self, rows: int, inner: int, columns: int) -> Tile:
        """Block sizes of the gradient of lhs, which contracts the call's columns."""
        return _cut(Tile(self.lhs_block_m, self.lhs_block_n, self.lhs_block_k), rows, columns, inner)

    def rhs_tile(self, rows: int, inner: int, columns: int) -> Tile:
        return _cut(Tile(self.rhs_block_m, self.rhs_block_k, self.rhs_block_n), rows, inner, columns)


def _check(config: Config | BackwardConfig) -> None:
    for name, value in dataclasses.asdict(config).items():
        unit = 16 if name.endswith("block_m") else _LANES
        if value < 1 or value % unit:
            raise ValueError(f"{name}: got {value}, expected a positive multiple of {unit}")


def _cut(tile: Tile, rows: int, inner: int, columns: int) -> Tile:
    return Tile(min(tile.block_m, rows), min(tile.block_k, inner), min(tile.block_n, columns))


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _block(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a block in VMEM, padded to register tiles."""
    return _padded(rows, _SUBLANES * 4 // itemsize) * _padded(columns, _LANES) * itemsize


def _matrix_block(rows: int, columns: int, itemsize: int) -> int:
    """As `_block`, for either orientation of the matrix."""
    return max(_block(rows, columns, itemsize), _block(columns, rows, itemsize))


def vmem_limit(needed: int) -> int:
    return max(needed, _DEFAULT_VMEM)


def _copies(rows: int, columns: int, itemsize: int, product: int) -> int:
    """Bytes of an operand's converted copies; float32 is split into three bfloat16 terms."""
    converted = _matrix_block(rows, columns, 4) if itemsize != product else 0
    return converted + (2 if product == 4 else 1) * _matrix_block(rows, columns, product)


def rows_bytes(tile: Tile, values: int, rhs: int, product: int, out: int, *, existing: bool) -> int:
    """Upper bound of the VMEM of the rows kernel; sizes are bytes of an element."""
    left, right, result = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n), (tile.block_m, tile.block_n)
    buffers = 2 * (_block(*left, values) + _matrix_block(*right, rhs) + (1 + existing) * _block(*result, out))
    per_column = 6 * (_block(1, tile.block_n, 4) + _block(1, tile.block_k, 4))
    copies = _copies(*left, values, product) + _copies(*right, rhs, product)
    return buffers + per_column + copies + 3 * _block(*result, 4) + _SLACK


def matrices_bytes(tile: Tile, values: int, grad: int, rhs: int, product: int, out: int, *, scaled: bool) -> int:
    """Upper bound of the VMEM of the matrices kernel; it reads `rhs` if `scaled`, `out` is 0 if there is none."""
    left, right, result = (tile.block_m, tile.block_k), (tile.block_m, tile.block_n), (tile.block_k, tile.block_n)
    buffers = 2 * (_block(*left, values) + _block(*right, grad))
    buffers += 2 * sum(_matrix_block(*result, size) for size in (out, rhs if scaled else 0) if size)
    per_column = 10 * _block(1, tile.block_n, 4)
    copies = _copies(*left, values, product) + _copies(*right, grad, product)
    return buffers + per_column + copies + (4 if scaled else 3) * _matrix_block(*result, 4) + _SLACK


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The problem of one kernel: sizes, and bytes of an element of each operand."""

    batch: int
    rows: int
    inner: int
    columns: int
    matrices: int
    values: int
    other: int
    product: int
    out: int
    passes: int
    existing: bool = False
    scaled: bool = False

    def vmem(self, tile: Tile, *, of_matrices: bool) -> int:
        tile = _cut(tile, self.rows, self.inner, self.columns)
        if of_matrices:
            return matrices_bytes(tile, self.values, self.other, 4, self.product, self.out, scaled=self.scaled)
        return rows_bytes(tile, self.values, self.other, self.product, self.out, existing=self.existing)


def _parts(size: int) -> list[int]:
    """Candidate block sizes: all of a dimension, even splits of it, and powers of two."""
    found = {_padded(-(-size // parts), _LANES) for parts in range(1, 9)}
    return sorted(found | {width for width in _WIDTHS if width < size})


def _tiles(problem: _Problem) -> Iterator[Tile]:
    """Candidate tiles."""
    whole = _padded(problem.rows, 16)
    heights = [height for height in _HEIGHTS if height < whole] + ([whole] if whole <= MAX_BLOCK_M else [])
    for height, inner, columns in itertools.product(heights, _parts(problem.inner), _parts(problem.columns)):
        products = height * inner * columns * problem.passes
        items = max_matrix_items(problem.batch, problem.rows, problem.matrices, height)
        if products <= _MAX_MULTIPLICATIONS and items <= MAX_ITEMS:
            yield Tile(height, inner, columns)


def _rows_seconds(problem: _Problem, tile: Tile, kind: _Kind) -> float:
    """Estimated seconds of the rows kernel, if no group ends at a tile boundary."""
    tiles, wide, deep = (
        -(-problem.rows // tile.block_m),
        -(-problem.columns // tile.block_n),
        -(-problem.inner // tile.block_k),
    )
    groups = min(problem.matrices, problem.rows)
    items = tiles + groups - 1
    product = 2 * max(tile.block_m, kind.edge) * tile.block_k * tile.block_n * problem.passes / kind.flops
    left, right = tile.block_m * tile.block_k * problem.values, tile.block_k * tile.block_n * problem.other
    result = tile.block_m * tile.block_n * problem.out * (1 + problem.existing)
    if deep == 1:  # a matrix stays for all tiles of its group, a tile of rows for all of its groups
        changed = max(product, (left + right) / kind.bandwidth)
        each = groups * changed + (items - groups) * max(product, (left + result) / kind.bandwidth)
    else:
        each = items * deep * max(product, (left + right + result / deep) / kind.bandwidth)
    first = (left + right) / kind.bandwidth
    return first + problem.batch * -(-wide // kind.cores) * (each + items * deep * _STEP_SECONDS)


def _matrices_seconds(problem: _Problem, tile: Tile, kind: _Kind) -> float:
    """Estimated seconds of the matrices kernel."""
    items = -(-problem.rows // tile.block_m) + problem.matrices
    blocks = -(-problem.columns // tile.block_n) * -(-problem.inner // tile.block_k)
    product = 2 * max(tile.block_m, kind.edge) * tile.block_k * tile.block_n * problem.passes / kind.flops
    read = tile.block_m * (tile.block_k * problem.values + tile.block_n * problem.other) / kind.bandwidth
    written = problem.matrices * tile.block_k * tile.block_n * problem.out / kind.bandwidth
    each = items * (max(product, read) + _STEP_SECONDS) + written
    return read + problem.batch * -(-blocks // kind.cores) * each


@functools.lru_cache(maxsize=512)
def _best(problem: _Problem, kind: _Kind, of_matrices: bool) -> tuple[Tile, ...]:
    """The fastest few tiles that fit, by the model; the smallest always fits."""
    seconds = _matrices_seconds if of_matrices else _rows_seconds
    budget = kind.vmem - kind.vmem // 8
    fitting = [tile for tile in _tiles(problem) if problem.vmem(tile, of_matrices=of_matrices) <= budget]

    def rank(tile: Tile) -> tuple[float, int]:
        return seconds(problem, tile, kind), problem.vmem(tile, of_matrices=of_matrices)

    return tuple(sorted(fitting, key=rank)[:_TRIED])


def _kind(target: Target) -> _Kind:
    return _KINDS.get(target.device_kind, _SMALLEST)


_BYTES = {"float32": 4, "bfloat16": 2}


def _problem(call: GroupedMatmulCall) -> _Problem:
    batch, rows, inner = call.lhs.shape
    exact = call.product_dtype == "float32" and call.precision != "default"
    return _Problem(
        batch=batch,
        rows=max(rows, 1),
        inner=max(inner, 1),
        columns=max(call.columns, 1),
        matrices=max(call.rhs.shape[1], 1),
        values=_BYTES[call.lhs.dtype],
        other=_BYTES.get(call.rhs.dtype, 1),
        product=_BYTES[call.product_dtype],
        out=_BYTES[call.preferred_element_type],
        passes=6 if exact else 1,
        existing=call.existing_out is not None,
    )


def _forward_tiles(call: GroupedMatmulCall, target: Target) -> tuple[Tile, ...]:
    return _best(_problem(call), _kind(target), of_matrices=False)


def _lhs_tiles(call: GroupedMatmulCall, target: Target) -> tuple[Tile, ...]:
    """Of the gradient of lhs, which contracts the call's columns."""
    own = _problem(call)
    transposed = dataclasses.replace(
        own, inner=own.columns, columns=own.inner, values=own.out, out=own.values, existing=False, scaled=False
    )
    return _best(transposed, _kind(target), of_matrices=False)


def _rhs_tiles(call: GroupedMatmulCall, target: Target) -> tuple[Tile, ...]:
    own = _problem(call)
    problem = dataclasses.replace(own, other=own.out, out=4, existing=False, scaled=call.rhs_scale is not None)
    return _best(problem, _kind(target), of_matrices=True)


def forward_space(call: GroupedMatmulCall, target: Target) -> list[Config]:
    return [Config(tile.block_m, tile.block_k, tile.block_n) for tile in _forward_tiles(call, target)]


def backward_space(call: GroupedMatmulCall, target: Target) -> list[BackwardConfig]:
    """Pairs of equal rank: the gradients of lhs and of rhs do not influence each other."""
    pairs = itertools.zip_longest(_lhs_tiles(call, target), _rhs_tiles(call, target))
    best = (_lhs_tiles(call, target)[0], _rhs_tiles(call, target)[0])
    filled = ((lhs or best[0], rhs or best[1]) for lhs, rhs in pairs)
    return [BackwardConfig(lhs.block_m, lhs.block_n, lhs.block_k, rhs.block_m, rhs.block_k, rhs.block_n) for lhs, rhs in filled]


def forward_heuristic(call: GroupedMatmulCall, target: Target) -> Config:
    return forward_space(call, target)[0]


def backward_heuristic(call: GroupedMatmulCall, target: Target) -> BackwardConfig:
    return backward_space(call, target)[0]


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
