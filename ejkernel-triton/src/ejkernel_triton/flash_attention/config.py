"""Configs of `flash_attention`: tile sizes, warps and pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._capability import multiprocessors, shared_memory_limit
from ejkernel_triton.flash_attention.mask_params import dot_mode

_LEAST_TILES = 8
"""Tiles of queries of a program of the dK/dV kernel, below which it is not split: sums of partial results cost a launch."""
_NARROW = 256
"""Window size up to which a block visits few tiles; a short pipeline starts faster."""


@renamed_knobs(ahead="overlap", masked="always_mask")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_q, block_k: queries of a program, and keys of one tile; powers of two.
    num_warps: warps per program.
    num_stages: pipeline stages of the loop over key tiles.
    overlap: whether the QK MMA of the next tile overlaps the softmax of the current one; ignored with a bias.
    always_mask: whether one masked loop visits all tiles, instead of an unmasked loop for full tiles and masked loops around
        it.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    overlap: bool = False
    always_mask: bool = False


@renamed_knobs(key_apart="separate_dk_dv")
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    key_*: of the dK/dV kernel, which owns `key_block_k` keys and loops over tiles of `key_block_q` queries.
    separate_dk_dv: whether dK and dV are computed by one launch each.
    query_*: of the dQ kernel, which owns `query_block_q` queries and loops over tiles of `query_block_k` keys.
    bias_*: of the dBias kernel, which owns a tile of the bias gradient.
    key_splits: programs of a block of keys, of which each writes float32 partial sums of dK and dV over some of the query heads
        and queries; they are summed in order. A power of two.
    """

    key_block_q: int
    key_block_k: int
    key_num_warps: int
    key_num_stages: int
    query_block_q: int
    query_block_k: int
    query_num_warps: int
    query_num_stages: int
    separate_dk_dv: bool = False
    bias_block_q: int = 16
    bias_block_k: int = 16
    bias_num_warps: int = 4
    key_splits: int = 1


Tile = tuple[int, int, int, int]
"""Rows that a program owns, rows of one tile that it loops over, warps, stages."""

_SMALL = (
    *((64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    *((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
)
"""Fallbacks; the last fits everywhere."""
_EXACT = ((16, 16, 8, 1), (16, 16, 4, 1))
"""For float32 without tensor cores: larger tiles take minutes to compile. Also for bf16x6 dK/dV before Hopper."""
_SINGLE = ((32, 32, 4, 1), (16, 16, 4, 1))
"""For TF32."""
_SMALL_SPLIT = (
    *((64, 32, 4, 2), (64, 16, 4, 2), (64, 16, 8, 2), (64, 16, 8, 1), (32, 32, 4, 1)),
    *((32, 16, 8, 1), (32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
)
"""For bf16x6 emulation of float32."""

# The first of each list was the fastest on an H200; the others are candidates for tuning.
_TF32_FORWARD = ((128, 32, 8, 2), (128, 64, 8, 2), (64, 32, 4, 2))
_SPLIT_FORWARD = ((128, 32, 8, 2), (64, 32, 4, 2))
_NARROW_SPLIT_FORWARD = ((64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2))
_SPLIT_KEY = ((64, 32, 4, 2), (128, 32, 8, 2), (64, 16, 4, 2))
_SMALL_ROWS = ((32, 32, 4, 2),)
"""Before Hopper, operands lie in registers, and more rows spill."""
_BEFORE = ((64, 32, 4, 3), (64, 32, 4, 2))
"""For heads up to 128 before Hopper: on an A100, 64 x 64 tiles take up to twice the instructions and spill."""
_SPLIT_QUERY = ((64, 32, 4, 2), (128, 64, 8, 2), (128, 16, 8, 1), (64, 16, 4, 3))
_FORWARD = (
    *((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3)),
)
_OVERLAP = ((128, 32, 8, 3), (128, 64, 8, 2))
_ALWAYS_MASK = ((64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 3))
_KEY = (
    *((64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 1), (64, 64, 4, 2)),
    *((64, 64, 8, 2), (64, 32, 8, 3), (128, 32, 8, 3), (128, 64, 8, 2)),
)
_SEPARATE = ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 1), (128, 64, 8, 3))
_QUERY = (
    *((64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3)),
    *((128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3)),
)


class _Model:
    """Shared memory and registers of a tile, and the properties of the call that they depend on."""

    def __init__(self, call: FlashAttentionCall, target: Target) -> None:
        self.size, self.value_size = dot_block(call.query.shape[3]), dot_block(call.value.shape[3])
        self.dot_mode = dot_mode(call)
        self.wide = call.query.dtype == "float32"
        self.split = self.dot_mode == "bf16x6"
        self.itemsize = 6 if self.split else 4 if self.wide else 2
        self.limit = shared_memory_limit(target)
        generation = (target.capability or (0, 0))[0]
        self.warpgroups = generation == 9
        self.before_warpgroups = 0 < generation < 9
        # On Blackwell, the tensor memory that Triton allocates for more bf16x6 rows does not fit.
        self.max_rows = 32 if self.split and generation > 9 else 2**31
        self.queries, self.keys = call.query.shape[1], call.key.shape[1]
        self.key_heads = call.key.shape[0] * call.key.shape[2]
        self.group = call.query.shape[2] // call.key.shape[2]
        self.seen = self.queries if call.window_width is None else min(self.queries, call.window_width)
        self.multiprocessors = multiprocessors(target) or HOPPER_MULTIPROCESSORS
        by_pair = (spec for spec in (call.bias, call.mask) if spec is not None and min(spec.shape[2:]) > 1)
        self.score_bytes = sum({"bool": 1, "float32": 4}.get(spec.dtype, 2) for spec in by_pair)
        self.width = max(self.size, self.value_size)
        self.narrow = call.window_width is not None and call.window_width <= _NARROW
        self.capped = call.logits_soft_cap is not None
        self.separate = self.width > (64 if self.split else 128) and (self.split or not self.wide)
        self.triangular = call.causal

    def forward_fits(self, tile: Tile) -> bool:
        own, other, _, stages = tile
        shared = own * self.size + stages * other * (self.size + self.value_size)
        return self._fits(tile, shared, self._summed(own * self.value_size) + own * other * 3 // 2)

    def query_fits(self, tile: Tile) -> bool:
        return self._fits(tile, self._both(tile), self._summed(tile[0] * self.size) + tile[0] * tile[1] * 2)

    def key_fits(self, tile: Tile) -> bool:
        """Whether a kernel that computes dK and dV together fits."""
        sums = self.size + self.value_size + (self.width if self.split else 0)
        return self._fits(tile, self._both(tile), tile[0] * sums + tile[0] * tile[1] * 2)

    def separate_fits(self, tile: Tile) -> bool:
        return self._fits(tile, self._both(tile), self._summed(tile[0] * self.width) + tile[0] * tile[1] * 2)

    def _summed(self, elements: int) -> int:
        """Accumulator elements; bf16x6 keeps the sum of one tile beside the accumulator."""
        return elements * 2 if self.split else elements

    def _both(self, tile: Tile) -> int:
        """Elements of the owned rows, the tiles in flight, and the layout conversion of a score tile."""
        own, other, _, stages = tile
        return (own + stages * other) * (self.size + self.value_size) + own * other

    def _fits(self, tile: Tile, shared: int, held: int) -> bool:
        own, other, warps, stages = tile
        total = shared * self.itemsize + max(stages - 1, 1) * own * other * self.score_bytes
        registers = 208 if own >= 64 else 72 if self.wide and not self.split else 112
        return total <= self.limit and held <= 32 * warps * registers and own <= self.max_rows

    def tiles(self, half: tuple[Tile, ...], split: tuple[Tile, ...], tf32: tuple[Tile, ...] = _SINGLE) -> tuple[Tile, ...]:
        """The candidates for the dot mode."""
        return {"bf16x6": split, "tf32": tf32, "tf32x3": _SINGLE, "ieee": _EXACT}[self.dot_mode] if self.wide else half

    def forward_choices(self) -> tuple[Tile, ...]:
        return (*self.tiles(self._forward(), self.split_forward(), _TF32_FORWARD), *self.small())

    def split_forward(self) -> tuple[Tile, ...]:
        if self.width <= 64 and self.max_rows > 32:
            return _NARROW_SPLIT_FORWARD
        if self.before_warpgroups and self.width > 128:
            return (32, 32, 8, 1), *_SMALL_ROWS
        return _SPLIT_FORWARD if self.warpgroups else ((128, 16, 8, 2), *_SMALL_ROWS)

    def split_backward(self, tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
        few = (not self.warpgroups and self.width > 64) or self.max_rows <= 32
        return (*_SMALL_ROWS, *tiles) if few else tiles

    def small(self) -> tuple[Tile, ...]:
        return self.tiles(_SMALL, _SMALL_SPLIT)

    def _forward(self) -> tuple[Tile, ...]:
        if self.before_warpgroups and self.width <= 128:
            return _BEFORE
        if self.narrow:
            return ((64, 32, 4, 3),)
        if self.width > 128:
            return (128, 64, 8, 2), (64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 8, 2)
        if self.width == 128 and not self.triangular and not self.score_bytes:
            return ((128, 128, 8, 3), (64, 64, 4, 3))
        # Two programs fit on a Hopper multiprocessor; with score-shaped inputs only if the pipeline is shorter.
        short_first = self.width == 128 and self.score_bytes
        return ((64, 64, 4, 2), (64, 64, 4, 3)) if short_first else ((64, 64, 4, 3), (64, 64, 4, 2))

    def key_choices(self) -> tuple[Tile, ...]:
        if self.split and self.before_warpgroups and self.width > 128:
            return _EXACT
        return (*self.tiles(self._key(), self.split_backward(_SPLIT_KEY)), *self.small())

    def _key(self) -> tuple[Tile, ...]:
        if self.separate:
            return (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 1)
        if self.before_warpgroups and self.width <= 128:
            return _BEFORE[1:]
        return ((64, 64, 4, 1),) if self.narrow else ((64, 64, 4, 2),)

    def query_choices(self) -> tuple[Tile, ...]:
        return (*self.tiles(self._query(), self.split_backward(_SPLIT_QUERY)), *self.small())

    def _query(self) -> tuple[Tile, ...]:
        if self.before_warpgroups and self.width <= 128:
            return _BEFORE[1:]
        if self.narrow:
            return ((64, 64, 4, 1),)
        if self.width > 128:
            return (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)
        return ((64, 64, 4, 3),) if self.width <= 64 else ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2))

    def key_splits(self, config: BackwardConfig) -> int:
        """As many as give every multiprocessor two programs, where blocks of keys leave half of them without one."""
        programs = self.key_heads * -(-self.keys // config.key_block_k)
        tiles = self.group * -(-self.seen // config.key_block_q)
        if not 0 < 2 * programs <= self.multiprocessors:
            return 1
        most = min(2 * self.multiprocessors // programs, tiles // _LEAST_TILES)
        return 1 << (max(most, 1).bit_length() - 1)

    def bias_choices(self) -> tuple[tuple[int, int, int], ...]:
        """Queries and keys of a tile, and warps: for each GPU generation the largest tiles that do not spill."""
        smallest = ((16, 16, 4),)
        if self.wide:
            return ((64, 32, 4), *smallest) if self.split and self.warpgroups and self.width <= 128 else smallest
        if self.width > 256:
            return smallest
        if self.before_warpgroups:
            return ((32, 32, 4),)
        return ((64, 64, 4), (64, 64, 8), (128, 64, 8)) if self.width <= 128 else ((64, 64, 8), (32, 32, 4))


def _first(tiles: Iterable[Tile], fits: Callable[[Tile], bool], own: int, other: int) -> Tile:
    """The first tile that fits, clipped to the sequence lengths."""
    tiles = tuple(tiles)
    return _cut(next((tile for tile in tiles if fits(tile)), tiles[-1]), own, other)


def _cut(tile: Tile, own: int, other: int) -> Tile:
    block_own, block_other, warps, stages = tile
    block_own, block_other = min(block_own, dot_block(own)), min(block_other, dot_block(other))
    return block_own, block_other, warps if block_own == tile[0] else min(warps, 4), stages


def _fitting(tiles: Iterable[Tile], fits: Callable[[Tile], bool], own: int, other: int) -> list[Tile]:
    return [_cut(tile, own, other) for tile in tiles if fits(tile)]


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    model = _Model(call, target)
    tile = _first(model.forward_choices(), model.forward_fits, model.queries, model.keys)
    always_mask = model.narrow and not model.wide and tile in _ALWAYS_MASK
    overlap = model.capped and model.width > 128 and call.bias is None and tile in _OVERLAP
    return ForwardConfig(*tile, overlap=overlap, always_mask=always_mask)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    model = _Model(call, target)
    lengths = model.queries, model.keys
    tiles = _fitting(model.tiles(_FORWARD, model.split_forward(), _TF32_FORWARD), model.forward_fits, *lengths)
    overlap = [] if model.wide or call.bias is not None else _fitting(_OVERLAP, model.forward_fits, *lengths)
    always_mask = _fitting(_ALWAYS_MASK, model.forward_fits, *lengths) if model.narrow and not model.wide else []
    found = [ForwardConfig(*tile) for tile in tiles] + [ForwardConfig(*tile, overlap=True) for tile in overlap]
    found += [ForwardConfig(*tile, always_mask=True) for tile in always_mask]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    model = _Model(call, target)
    fits = model.separate_fits if model.separate else model.key_fits
    own, other, warps, stages = _first(model.key_choices(), fits, model.keys, model.queries)
    by_query = _first(model.query_choices(), model.query_fits, model.queries, model.keys)
    found = BackwardConfig(other, own, warps, stages, *by_query, model.separate, *model.bias_choices()[0])
    return dataclasses.replace(found, key_splits=model.key_splits(found))


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Varies one kernel at a time: they do not influence each other."""
    model = _Model(call, target)
    best = backward_heuristic(call, target)
    by_key, by_query = (model.keys, model.queries), (model.queries, model.keys)
    together = _fitting(model.tiles(_KEY, _SPLIT_KEY), model.key_fits, *by_key)
    separate_tiles = _fitting(model.tiles(_SEPARATE, _SPLIT_KEY), model.separate_fits, *by_key) if model.separate else []
    found = [best]
    for separate, tiles in ((False, together), (True, separate_tiles)):
        for own, other, warps, stages in tiles:
            blocks = {"key_block_q": other, "key_block_k": own, "key_num_warps": warps, "key_num_stages": stages}
            tiled = dataclasses.replace(best, **blocks, separate_dk_dv=separate)
            found.append(dataclasses.replace(tiled, key_splits=model.key_splits(tiled)))
    if best.key_splits > 1:
        found += [dataclasses.replace(best, key_splits=splits) for splits in (best.key_splits // 2, best.key_splits * 2)]
    for own, other, warps, stages in _fitting(model.tiles(_QUERY, _SPLIT_QUERY), model.query_fits, *by_query):
        blocks = {"query_block_q": own, "query_block_k": other, "query_num_warps": warps, "query_num_stages": stages}
        found.append(dataclasses.replace(best, **blocks))
    if call.bias is not None:
        for own, other, warps in model.bias_choices():
            found.append(dataclasses.replace(best, bias_block_q=own, bias_block_k=other, bias_num_warps=warps))
    return list(dict.fromkeys(found))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
