"""Tiles of `flash_attention`: their sizes, warps and pipeline depths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._numerics import dot_precision

_SMALLEST = 16
"""Tensor cores multiply no smaller tiles."""
_NARROW = 256
"""Within a window of so many keys a block meets a few tiles only, and a short pipeline starts faster."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_q, block_k: queries that a program owns, and keys of one tile; powers of two.
    num_warps: warps per program.
    num_stages: depth of the pipeline over tiles of keys.
    ahead: whether the product of the next tile runs beside the exponentials of this one.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    ahead: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    key_*: of the kernel that owns `key_block_k` keys and walks over tiles of `key_block_q` queries.
    query_*: of the kernel that owns `query_block_q` queries and walks over tiles of `query_block_k` keys.
    """

    key_block_q: int
    key_block_k: int
    key_num_warps: int
    key_num_stages: int
    query_block_q: int
    query_block_k: int
    query_num_warps: int
    query_num_stages: int


Tile = tuple[int, int, int, int]
"""Rows that a program owns, rows of one tile of the others, warps, stages."""

_SMALL = (
    *((64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    *((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
)
"""What is tried when nothing better fits; the last fits everywhere."""
_SINGLE = ((32, 32, 4, 1), (16, 16, 4, 1))
"""For float32 on tensor cores."""
_EXACT = ((16, 16, 8, 1), (16, 16, 4, 1))
"""For float32 without them, as it is where `precision` asks for nothing less: larger products take minutes to compile."""

_FORWARD = (
    *((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)),
)
_AHEAD = ((128, 32, 8, 3), (128, 64, 8, 2))
_KEY = (
    (64, 32, 4, 2),
    (64, 32, 4, 3),
    (64, 64, 4, 1),
    (64, 64, 4, 2),
    (64, 64, 8, 2),
    (64, 32, 8, 3),
    (128, 32, 8, 3),
    (128, 64, 8, 2),
)
_QUERY = (
    (64, 32, 4, 2),
    (64, 64, 4, 1),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 8, 2),
    (128, 64, 8, 1),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
)
"""Worth a measurement."""


def power_of_two(size: int) -> int:
    """The smallest block that holds so many elements."""
    return max(_SMALLEST, 1 << max(size - 1, 0).bit_length())


class _Model:
    """What a tile costs in shared memory and registers, and what is known of the call."""

    def __init__(self, call: FlashAttentionCall, target: Target) -> None:
        self.size, self.value_size = power_of_two(call.query.shape[3]), power_of_two(call.value.shape[3])
        self.single = call.query.dtype == "float32"
        self.exact = dot_precision(call.precision, call.query.dtype) == "ieee"
        self.limit = shared_memory_limit(target)
        self.queries, self.keys = call.query.shape[1], call.key.shape[1]
        self.score_bytes = sum(4 for spec in (call.bias, call.mask) if spec is not None and min(spec.shape[2:]) > 1)
        self.width = max(self.size, self.value_size)
        self.narrow = call.window_width is not None and call.window_width <= _NARROW
        self.capped = call.soft_cap is not None
        self.triangular = call.causal

    def forward_fits(self, tile: Tile) -> bool:
        own, other, _, stages = tile
        shared = own * self.size + stages * other * (self.size + self.value_size)
        return self._fits(tile, shared, own * self.value_size + own * other * 3 // 2)

    def query_fits(self, tile: Tile) -> bool:
        return self._fits(tile, self._both(tile), tile[0] * self.size + tile[0] * tile[1] * 2)

    def key_fits(self, tile: Tile) -> bool:
        return self._fits(tile, self._both(tile), tile[0] * (self.size + self.value_size) + tile[0] * tile[1] * 2)

    def _both(self, tile: Tile) -> int:
        """Elements of the owned rows and of the tiles in flight; a tile of scores changes its layout on the way."""
        own, other, _, stages = tile
        return (own + stages * other) * (self.size + self.value_size) + own * other

    def _fits(self, tile: Tile, shared: int, held: int) -> bool:
        own, other, warps, stages = tile
        total = shared * (4 if self.single else 2) + stages * own * other * self.score_bytes
        registers = 72 if self.single else 208 if own >= 64 else 112
        return total <= self.limit and held <= 32 * warps * registers

    def forward_choices(self) -> tuple[Tile, ...]:
        if self.single:
            return self.single_choices()
        if self.narrow:
            return ((64, 32, 4, 3),)
        if self.width > 128:
            return (128, 64, 8, 2), (64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 8, 2)
        if self.width == 128 and not self.triangular and not self.score_bytes:
            return ((128, 128, 8, 3), (64, 64, 4, 3))
        return (64, 64, 4, 3), (64, 64, 4, 2)

    def single_choices(self) -> tuple[Tile, ...]:
        return _EXACT if self.exact else _SINGLE

    def key_choices(self) -> tuple[Tile, ...]:
        if self.single:
            return self.single_choices()
        if self.width > 128:
            return (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 1)
        return ((64, 64, 4, 1),) if self.narrow else ((64, 64, 4, 2),)

    def query_choices(self) -> tuple[Tile, ...]:
        if self.single:
            return self.single_choices()
        if self.narrow:
            return ((64, 64, 4, 1),)
        if self.width > 128:
            return (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)
        return ((64, 64, 4, 3),) if self.width <= 64 else ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2))


def _first(tiles: Iterable[Tile], fits: Callable[[Tile], bool], own: int, other: int) -> Tile:
    """The first tile that fits, cut to the lengths of the arrays."""
    tiles = tuple(tiles)
    return _cut(next((tile for tile in tiles if fits(tile)), tiles[-1]), own, other)


def _cut(tile: Tile, own: int, other: int) -> Tile:
    block_own, block_other, warps, stages = tile
    block_own, block_other = min(block_own, power_of_two(own)), min(block_other, power_of_two(other))
    return block_own, block_other, warps if block_own == tile[0] else min(warps, 4), stages


def _fitting(model: _Model, tiles: Iterable[Tile], fits: Callable[[Tile], bool], own: int, other: int) -> list[Tile]:
    tiles = model.single_choices() if model.single else tiles
    return [_cut(tile, own, other) for tile in tiles if fits(tile)]


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    model = _Model(call, target)
    tile = _first((*model.forward_choices(), *_SMALL), model.forward_fits, model.queries, model.keys)
    return ForwardConfig(*tile, ahead=model.capped and model.width > 128 and tile in _AHEAD)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    model = _Model(call, target)
    tiles = _fitting(model, _FORWARD, model.forward_fits, model.queries, model.keys)
    ahead = [] if model.single else _fitting(model, _AHEAD, model.forward_fits, model.queries, model.keys)
    found = [ForwardConfig(*tile) for tile in tiles] + [ForwardConfig(*tile, ahead=True) for tile in ahead]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    model = _Model(call, target)
    own, other, warps, stages = _first((*model.key_choices(), *_SMALL), model.key_fits, model.keys, model.queries)
    by_query = _first((*model.query_choices(), *_SMALL), model.query_fits, model.queries, model.keys)
    return BackwardConfig(other, own, warps, stages, *by_query)


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Each kernel varied alone: the two do not influence each other."""
    model = _Model(call, target)
    best = backward_heuristic(call, target)
    found = [best]
    for own, other, warps, stages in _fitting(model, _KEY, model.key_fits, model.keys, model.queries):
        found.append(dataclasses.replace(best, key_block_q=other, key_block_k=own, key_num_warps=warps, key_num_stages=stages))
    for own, other, warps, stages in _fitting(model, _QUERY, model.query_fits, model.queries, model.keys):
        found.append(
            dataclasses.replace(best, query_block_q=own, query_block_k=other, query_num_warps=warps, query_num_stages=stages)
        )
    return list(dict.fromkeys(found))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
