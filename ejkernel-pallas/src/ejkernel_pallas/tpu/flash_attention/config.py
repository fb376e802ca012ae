"""Configs of `flash_attention` on TPU, limited by VMEM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.tpu._vmem import LANES, block_bytes, buffered_bytes, memory_of
from ejkernel_pallas.tpu.flash_attention.tiles import list_length

SMALLEST = LANES
"""Queries and keys each lie along lanes in some operand."""
_SIZES = (2048, 1024, 512, 256, 128)
_BLOCK_K_COMPUTE = 256
"""Keys per score computation: 256 takes the fewest instructions per score of 128 ... 1024."""
_SCORES = 5
"""float32 score tiles that the compiler keeps in VMEM at a time."""
_BACKWARD_SCORES = 7
_NARROW = 1024
"""Window size up to which large tiles are mostly masked."""

MAX_TILES = 1 << 17
"""Largest number of entries of tile lists: half of a core's SMEM."""

Tile = tuple[int, int]
"""Queries and keys."""


@renamed_knobs(part_k="block_k_compute")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_q, block_k: queries of an accumulator, and keys of one grid step; multiples of 128.
    block_k_compute: keys of a step whose scores are computed at once; the MMA of one block overlaps the softmax of another.
    """

    block_q: int
    block_k: int
    block_k_compute: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    key_block_q, key_block_k: of the dK/dV kernel, which owns keys and loops over queries.
    query_block_q, query_block_k: of the dQ kernel, which owns queries and loops over keys.
    """

    key_block_q: int
    key_block_k: int
    query_block_q: int
    query_block_k: int


def _rounded(length: int) -> int:
    return max(SMALLEST, -(-length // LANES) * LANES)


class _Model:
    """VMEM usage of tiles."""

    def __init__(self, call: FlashAttentionCall, target: Target) -> None:
        self.call = call
        self.limit = memory_of(target).vmem
        self.dtype = call.query.dtype
        self.size, self.value_size = call.query.shape[3], call.value.shape[3]
        self.queries, self.keys = _rounded(call.query.shape[1]), _rounded(call.key.shape[1])

    def _extras(self, block_q: int, block_k: int) -> int:
        """Token info, bias and mask of a tile, and their transposed 32-bit copies."""
        info = 2 * 2 * block_bytes((8, max(block_q, block_k)), "int32")
        with_tokens_as_lanes = block_bytes((block_k, LANES), "int32")
        total = info + 3 * with_tokens_as_lanes
        for spec in (self.call.bias, self.call.mask):
            if spec is not None:
                total += 2 * block_bytes((block_q, block_k), spec.dtype) + 2 * 4 * block_q * block_k
        if self.call.dropout_rate:
            total += 3 * 4 * block_q * block_k
        return total

    def forward(self, block_q: int, block_k: int, block_k_compute: int) -> int:
        d = self.dtype
        blocks = buffered_bytes((self.size, block_q), d) + buffered_bytes((block_k, self.size), d)
        blocks += buffered_bytes((self.value_size, block_k), d) + buffered_bytes((self.value_size, block_q), d)
        rows = 4 * block_bytes((1, block_q), "float32")
        accumulator = 2 * block_bytes((self.value_size, block_q), "float32")
        scores = _SCORES * 4 * block_q * block_k_compute + (
            2 * 4 * block_q * block_k_compute if block_k_compute < block_k else 0
        )
        return blocks + rows + accumulator + scores + self._split(block_k_compute, block_q) + self._extras(block_q, block_k)

    def by_key(self, block_q: int, block_k: int) -> int:
        return self._backward(block_q, block_k, block_k, self.size + self.value_size)

    def by_query(self, block_q: int, block_k: int) -> int:
        bias = 0 if self.call.bias is None else 3 * 4 * block_q * block_k
        return self._backward(block_q, block_k, block_q, self.size) + bias

    def _backward(self, block_q: int, block_k: int, own: int, width: int) -> int:
        d = self.dtype
        sizes = (self.size, self.value_size)
        blocks = sum(buffered_bytes((block, size), d) for size in sizes for block in (block_q, block_k))
        results = 2 * sum(block_bytes((own, size), "float32") for size in (sizes if width > self.size else sizes[:1]))
        rows = 8 * block_bytes((1, block_q), "float32")
        scores = _BACKWARD_SCORES * 4 * block_q * block_k
        return blocks + 2 * results + rows + scores + self._split(block_k, block_q) + self._extras(block_q, block_k)

    def _split(self, block_q: int, block_k: int) -> int:
        """Split copies of float32 operands."""
        return 0 if self.dtype != "float32" else 4 * (block_q * block_k + (block_q + block_k) * (self.size + self.value_size))

    def cut(self, tile: Tile) -> Tile:
        return min(tile[0], _rounded_down(self.queries)), min(tile[1], _rounded_down(self.keys))

    @property
    def span(self) -> int | None:
        """Keys that the mask leaves to a query."""
        spans = [span for span in (self.call.window_width, self.call.chunk_size) if span is not None]
        return min(spans, default=None)


def _rounded_down(length: int) -> int:
    """The largest tile whose padding is at most an eighth of the length, or the smallest."""
    for size in _SIZES:
        if size <= length and -length % size * 8 <= length:
            return size
    return SMALLEST


def _preferred(model: _Model, largest: Tile) -> list[Tile]:
    """Tiles of at most that size, largest first, and no wider than the visible band."""
    span = model.span
    widest = SMALLEST * 16 if span is None else 1 << max(min(span, _NARROW) - 1, SMALLEST - 1).bit_length()
    tiles = [(q, k) for q in _SIZES for k in _SIZES if q <= min(largest[0], max(widest, 256)) and k <= min(largest[1], widest)]
    return sorted(tiles, key=lambda tile: (-math.prod(tile), -tile[0]))


def _largest(call: FlashAttentionCall, wide: Tile, single: Tile) -> Tile:
    """The largest tile worth its compile time: float32 MMAs take six passes, with six times the code."""
    return single if call.query.dtype == "float32" else wide


def _first(model: _Model, tiles: Iterable[Tile], fits: Callable[[Tile], bool]) -> Tile:
    return next((tile for tile in map(model.cut, tiles) if fits(tile)), (SMALLEST, SMALLEST))


def _block_k_compute(block_k: int) -> int:
    return min(block_k, _BLOCK_K_COMPUTE)


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    model = _Model(call, target)
    tiles = _preferred(model, _largest(call, (512, 1024), (256, 512)))
    block_q, block_k = _first(model, tiles, lambda tile: model.forward(*tile, _block_k_compute(tile[1])) <= model.limit)
    return ForwardConfig(block_q, block_k, _block_k_compute(block_k))


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    model = _Model(call, target)
    found = [forward_heuristic(call, target)]
    for tile in ((256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (1024, 2048), (2048, 1024)):
        block_q, block_k = model.cut(tile)
        for part in (256, 512, 1024):
            if block_k % part == 0 and model.forward(block_q, block_k, part) <= model.limit:
                found.append(ForwardConfig(block_q, block_k, part))
    return [config for config in dict.fromkeys(found) if longest_list(call, config, None) <= MAX_TILES]


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    model = _Model(call, target)
    tiles = _preferred(model, _largest(call, (512, 512), (256, 256)))
    by_key = _first(model, tiles, lambda tile: model.by_key(*tile) <= model.limit)
    by_query = _first(model, tiles, lambda tile: model.by_query(*tile) <= model.limit)
    return BackwardConfig(*by_key, *by_query)


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Varies one kernel at a time: the two do not influence each other."""
    model = _Model(call, target)
    best = backward_heuristic(call, target)
    found = [best]
    for tile in ((256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024)):
        block_q, block_k = model.cut(tile)
        if model.by_key(block_q, block_k) <= model.limit:
            found.append(dataclasses.replace(best, key_block_q=block_q, key_block_k=block_k))
        if model.by_query(block_q, block_k) <= model.limit:
            found.append(dataclasses.replace(best, query_block_q=block_q, query_block_k=block_k))
    return [config for config in dict.fromkeys(found) if longest_list(call, None, config) <= MAX_TILES]


def longest_list(call: FlashAttentionCall, forward: ForwardConfig | None, backward: BackwardConfig | None) -> int:
    """Entries of the longest tile list of these configs."""
    lengths: list[int] = []
    if forward is not None:
        lengths.append(list_length(call, forward.block_q, forward.block_k))
    if backward is not None:
        lengths.append(list_length(call, backward.query_block_q, backward.query_block_k))
        lengths.append(list_length(call, backward.key_block_q, backward.key_block_k, by_key=True))
    return max(lengths)


def forward_bytes(call: FlashAttentionCall, target: Target, config: ForwardConfig) -> int:
    """Upper bound of the forward kernel's VMEM."""
    return _Model(call, target).forward(config.block_q, config.block_k, config.block_k_compute)


def backward_bytes(call: FlashAttentionCall, target: Target, config: BackwardConfig) -> tuple[int, int]:
    """Upper bounds of the VMEM of the dK/dV kernel, and of the dQ and dBias kernels."""
    model = _Model(call, target)
    return model.by_key(config.key_block_q, config.key_block_k), model.by_query(config.query_block_q, config.query_block_k)


def fits_smallest(call: FlashAttentionCall, target: Target) -> Any:
    """Bytes that the smallest tile needs, and the limit, if it does not fit; else None."""
    model = _Model(call, target)
    smallest = (SMALLEST, SMALLEST)
    needed = max(model.forward(*smallest, SMALLEST), model.by_key(*smallest), model.by_query(*smallest))
    return (needed, model.limit) if needed > model.limit else None


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
