"""Tiles of `flash_attention`: their sizes, warps and pipeline depths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._capability import shared_memory_limit

_SMALLEST = 16
"""Tensor cores multiply no smaller tiles."""


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


def power_of_two(size: int) -> int:
    """The smallest block that holds so many elements."""
    return max(_SMALLEST, 1 << max(size - 1, 0).bit_length())


class _Model:
    """What a tile costs, in bytes of shared memory and 32-bit registers of a thread."""

    def __init__(self, call: FlashAttentionCall, target: Target) -> None:
        self.size, self.value_size = power_of_two(call.query.shape[3]), power_of_two(call.value.shape[3])
        self.itemsize = 4 if call.query.dtype == "float32" else 2
        self.limit = shared_memory_limit(target)
        self.queries, self.keys = call.query.shape[1], call.key.shape[1]
        self.score_bytes = sum(4 for spec in (call.bias, call.mask) if spec is not None and min(spec.shape[2:]) > 1)

    def forward_fits(self, tile: Tile) -> bool:
        own, other, warps, stages = tile
        shared = own * self.size + stages * other * (self.size + self.value_size)
        held = own * self.value_size + own * other * 3 // 2
        return self._fits(tile, shared, held)

    def query_fits(self, tile: Tile) -> bool:
        own, other, _, stages = tile
        shared = (own + stages * other) * (self.size + self.value_size) + own * other
        held = own * self.size + own * other * 5 // 2
        return self._fits(tile, shared, held)

    def key_fits(self, tile: Tile) -> bool:
        own, other, _, stages = tile
        shared = (own + stages * other) * (self.size + self.value_size) + own * other
        held = own * (self.size + self.value_size) + own * other * 5 // 2
        return self._fits(tile, shared, held)

    def _fits(self, tile: Tile, shared: int, held: int) -> bool:
        own, other, warps, stages = tile
        total = shared * self.itemsize + stages * own * other * self.score_bytes
        return total <= self.limit and held <= 32 * warps * 208


def _cut(tile: Tile, own: int, other: int) -> Tile:
    """No longer than the arrays are."""
    block_own, block_other, warps, stages = tile
    block_own, block_other = min(block_own, power_of_two(own)), min(block_other, power_of_two(other))
    return block_own, block_other, warps if block_own * block_other > 1024 else min(warps, 4), stages


_WIDE = ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2))
_NARROW = ((32, 32, 4, 2), (32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1))
_FORWARD = (*_WIDE, *_NARROW)
_KEY = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), *_NARROW)
_QUERY = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), *_NARROW)
_SINGLE = ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 8, 1), (16, 16, 4, 1))
"""For float32, in order of preference; the last fits everywhere."""


def _first(tiles: Iterable[Tile], fits: Callable[[Tile], bool], own: int, other: int) -> Tile:
    tiles = [_cut(tile, own, other) for tile in tiles]
    return next((tile for tile in tiles if fits(tile)), tiles[-1])


def _around(fits: Callable[[Tile], bool], own: int, other: int, stages: Iterable[int]) -> list[Tile]:
    """The tiles worth a measurement: one warpgroup for 64 rows, two where those do not hold them or for 128."""
    found = []
    for rows, columns, depth in itertools.product((64, 128), (32, 64, 128), stages):
        warps = next((warps for warps in (rows // 16, 8) if fits((rows, columns, warps, depth))), None)
        if warps is not None:
            found.append(_cut((rows, columns, warps, depth), own, other))
    return sorted(set(found))


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    model = _Model(call, target)
    tiles = _SINGLE if model.itemsize == 4 else _FORWARD
    return ForwardConfig(*_first(tiles, model.forward_fits, model.queries, model.keys))


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    model = _Model(call, target)
    tiles = _around(model.forward_fits, model.queries, model.keys, (2, 3, 4))
    return list(dict.fromkeys([forward_heuristic(call, target), *(ForwardConfig(*tile) for tile in tiles)]))


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    model = _Model(call, target)
    single = model.itemsize == 4
    own_keys, queries, key_warps, key_stages = _first(_SINGLE if single else _KEY, model.key_fits, model.keys, model.queries)
    by_query = _first(_SINGLE if single else _QUERY, model.query_fits, model.queries, model.keys)
    return BackwardConfig(queries, own_keys, key_warps, key_stages, *by_query)


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Each kernel varied alone: the two do not influence each other."""
    model = _Model(call, target)
    best = backward_heuristic(call, target)
    found = [best]
    for own, other, warps, stages in _around(model.key_fits, model.keys, model.queries, (1, 2, 3)):
        found.append(dataclasses.replace(best, key_block_q=other, key_block_k=own, key_num_warps=warps, key_num_stages=stages))
    for own, other, warps, stages in _around(model.query_fits, model.queries, model.keys, (1, 2, 3)):
        found.append(
            dataclasses.replace(best, query_block_q=own, query_block_k=other, query_num_warps=warps, query_num_stages=stages)
        )
    return list(dict.fromkeys(found))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
