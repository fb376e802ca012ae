"""Configs of `flash_attention` on Hopper, limited by shared memory and registers."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterable

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import FEWER_MULTIPROCESSORS
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.mosaic_gpu._device import SHARED_MEMORY, SHARED_MEMORY_SLACK, smem_bytes
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles, bias_kind, bias_tiles
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import MULTIPROCESSORS, REGISTERS, ROWS

SIZES = (64, 96, 128, 192, 256)
"""Padded head sizes."""
_FEWER_MULTIPROCESSORS = frozenset(FEWER_MULTIPROCESSORS)
"""Words in names of devices with fewer multiprocessors, on which part of a persistent grid would wait."""
_OVERHEAD = 24
"""Registers of a consumer thread for addresses, maxima and sums, plus one per 16 rows of a tile."""
_KEY_SPLITS = (1, 2, 3, 4, 6, 8)
"""Candidate splits of a key block's loop over queries."""
_STEP = 1.6e-6
"""Seconds of a tile of 64 queries and 128 keys with heads of 128 on an H200; the unit of the next two."""
_START, _SUMS = 2, 4
"""Cost of a program's start, and of storing float32 partial results."""
_LAUNCH, _READ = 4e-6, 3.5e12
"""Seconds of one more kernel launch, and its read bandwidth in bytes per second."""


@renamed_knobs(stages="num_stages", packed="pack_gqa")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_k: keys of a tile, a multiple of 64.
    num_stages: pipeline stages: key and value tiles in shared memory.
    warpgroups: consumer warpgroups of a block, each with 64 queries.
    overlap: whether the QK MMA of a tile overlaps the PV MMA and softmax of the previous one.
    ping_pong: ping-pong scheduling of the consumers' MMAs.
    query_in_registers: whether queries are register operands, which saves shared memory bandwidth.
    persistent: whether the kernel is persistent, with one program per multiprocessor, instead of one program per block.
    pack_gqa: whether a consumer's rows are the query heads of a key head for few tokens, which visit fewer keys than many
        tokens of one head; only if `can_pack_gqa`.
    """

    block_k: int
    num_stages: int
    warpgroups: int
    overlap: bool
    ping_pong: bool
    query_in_registers: bool
    persistent: bool
    pack_gqa: bool = False


@renamed_knobs(key_apart="separate_dk_dv", key_parts="key_splits", key_stages="key_num_stages", query_stages="query_num_stages")
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    key_block_q, key_num_stages, key_warpgroups: of the dK/dV kernel: queries of a tile, pipeline stages, consumers.
    separate_dk_dv: whether dK and dV are computed by one launch each.
    key_splits: splits of a key block's loop over queries, for calls with too few key blocks to fill a device. Several leave
        float32 partial results, which are combined in a fixed order.
    query_block_k, query_num_stages, query_warpgroups: of the dQ kernel.
    """

    key_block_q: int
    key_num_stages: int
    key_warpgroups: int
    separate_dk_dv: bool
    key_splits: int
    query_block_k: int
    query_num_stages: int
    query_warpgroups: int


def sizes_of(call: FlashAttentionCall) -> tuple[int, int]:
    """Padded head sizes of keys and values, as the MMAs need them."""
    size, value_size = (next((s for s in SIZES if s >= n), n) for n in (call.query.shape[3], call.value.shape[3]))
    if size != value_size:  # the output reuses the buffer of the queries
        size, value_size = (128 if s == 96 else s for s in (size, value_size))
    return size, value_size


def can_pack_gqa(call: FlashAttentionCall) -> bool:
    """Whether the query heads of a key head can be rows of one consumer: TMA stores whole groups of 8 rows. Arrays indexed by
    query head or query token are not supported in that order."""
    group = call.query.shape[2] // call.key.shape[2]
    known = (call.bias, call.softmax_aux, call.query_segments, call.query_positions)
    return group % 8 == 0 and ROWS % group == 0 and all(spec is None for spec in known)


def forward_bias(call: FlashAttentionCall, config: ForwardConfig) -> BiasTiles | None:
    return bias_tiles(call, by_key=False, warpgroups=config.warpgroups, other=config.block_k, num_stages=config.num_stages)


def backward_bias(call: FlashAttentionCall, config: BackwardConfig, *, by_key: bool) -> BiasTiles | None:
    """Bias tiles of the dK/dV kernel or of the dQ kernel."""
    if by_key:
        warpgroups, other, num_stages = config.key_warpgroups, config.key_block_q, config.key_num_stages
    else:
        warpgroups, other, num_stages = config.query_warpgroups, config.query_block_k, config.query_num_stages
    return bias_tiles(call, by_key=by_key, warpgroups=warpgroups, other=other, num_stages=num_stages)


@dataclasses.dataclass(frozen=True)
class BiasGradientConfig:
    """Attributes:
    tiles: of the bias; a program owns such tiles.
    resident: whether the owned queries of all batches and heads that share a pairwise tile stay in shared memory.
    """

    tiles: BiasTiles
    resident: bool


def bias_gradient_config(call: FlashAttentionCall) -> BiasGradientConfig | None:
    """The first config that fits; queries are resident if there are enough blocks. None without a bias."""
    kind = bias_kind(call)
    if call.bias is None or kind is None:
        return None
    sizes = [(2, 2, False), (2, 1, False), (1, 2, False), (1, 1, False)]
    blocks = call.bias.shape[0] * call.bias.shape[1] * -(-call.query.shape[1] // (2 * ROWS))
    if kind == "pairs" and blocks >= MULTIPROCESSORS:
        sizes.insert(0, (2, 2, True))
    trials = [
        BiasGradientConfig(tiles, resident)
        for warpgroups, num_stages, resident in sizes
        if (tiles := bias_tiles(call, by_key=kind == "keys", warpgroups=warpgroups, other=ROWS, num_stages=num_stages))
    ]
    fits = (trial for trial in trials if bias_gradient_bytes(call, trial) + SHARED_MEMORY_SLACK <= SHARED_MEMORY)
    return next(fits, trials[-1])


def sharing(call: FlashAttentionCall) -> tuple[int, int]:
    """Batches and heads that share a tile of a pairwise bias."""
    if call.bias is None or bias_kind(call) != "pairs":
        return 1, 1
    (batch, _, heads, _), (own_batch, own_heads, _, _) = call.query.shape, call.bias.shape
    return batch // own_batch, heads // own_heads


def bias_gradient_bytes(call: FlashAttentionCall, config: BiasGradientConfig) -> int:
    """Shared memory of the bias gradient kernel."""
    tiles, widths = config.tiles, sizes_of(call)
    batches, members = sharing(call)
    slots = tiles.num_stages if tiles.by_pair and not config.resident else batches * members
    own = sum(smem_bytes((slots, tiles.warpgroups, ROWS, width)) for width in widths)
    walked = sum(smem_bytes((tiles.num_stages, tiles.other, width)) for width in widths)
    rows = smem_bytes((tiles.num_stages, 2, tiles.other), 4) if tiles.by_key else 0
    return own + walked + rows + tiles.bytes


def bias_bytes(tiles: BiasTiles | None) -> int:
    return 0 if tiles is None else tiles.bytes


def query_slots(call: FlashAttentionCall, config: ForwardConfig) -> int:
    """Query blocks in shared memory: a persistent kernel prefetches the next one if it fits."""
    fits = forward_bytes(call, config, slots=2) + SHARED_MEMORY_SLACK <= SHARED_MEMORY
    return 2 if config.persistent and fits else 1


def forward_bytes(call: FlashAttentionCall, config: ForwardConfig, *, slots: int = 1) -> int:
    """Shared memory of the forward kernel with `slots` query blocks."""
    size, value_size = sizes_of(call)
    used = smem_bytes((slots * config.warpgroups, ROWS, size)) + smem_bytes((config.warpgroups, ROWS), 4)
    if config.persistent or value_size > size:
        used += smem_bytes((config.warpgroups, ROWS, value_size))
    used += bias_bytes(forward_bias(call, config))
    return used + sum(smem_bytes((config.num_stages, config.block_k, width)) for width in (size, value_size))


def forward_registers(call: FlashAttentionCall, config: ForwardConfig) -> int:
    """Estimated registers of a consumer thread: accumulator, scores, weights and a bias tile."""
    size, value_size = sizes_of(call)
    tiles = forward_bias(call, config)
    held = 0 if tiles is None else tiles.registers
    return value_size // 2 + config.block_k * 13 // 16 + held + _OVERHEAD + config.query_in_registers * size // 4


def _forward_fits(call: FlashAttentionCall, config: ForwardConfig) -> bool:
    in_memory = forward_bytes(call, config) + SHARED_MEMORY_SLACK <= SHARED_MEMORY
    return in_memory and forward_registers(call, config) <= REGISTERS[config.warpgroups][0]


def _backward_bytes(call: FlashAttentionCall, other: int, num_stages: int, warpgroups: int, bias: BiasTiles | None) -> int:
    widths = sizes_of(call)
    own = sum(smem_bytes((warpgroups, ROWS, width)) for width in widths)
    walked = sum(smem_bytes((num_stages, other, width)) for width in widths)
    return own + walked + smem_bytes((num_stages, 2, other), 4) + bias_bytes(bias)


def backward_bytes(call: FlashAttentionCall, config: BackwardConfig) -> tuple[int, int]:
    """Shared memory of the dK/dV kernel and of the dQ kernel."""
    return (
        _backward_bytes(
            call, config.key_block_q, config.key_num_stages, config.key_warpgroups, backward_bias(call, config, by_key=True)
        ),
        _backward_bytes(
            call,
            config.query_block_k,
            config.query_num_stages,
            config.query_warpgroups,
            backward_bias(call, config, by_key=False),
        ),
    )


def backward_registers(call: FlashAttentionCall, config: BackwardConfig) -> tuple[int, int]:
    """Estimated registers of a consumer thread: accumulators, scores and their gradients, weights."""
    size, value_size = sizes_of(call)
    owned = max(size, value_size) if config.separate_dk_dv else size + value_size
    by_key = owned // 2 + config.key_block_q * 21 // 16 + _OVERHEAD
    return by_key, size // 2 + config.query_block_k * 18 // 16 + _OVERHEAD


def _key_fits(call: FlashAttentionCall, config: BackwardConfig) -> bool:
    return backward_bytes(call, config)[0] + SHARED_MEMORY_SLACK <= SHARED_MEMORY and (
        backward_registers(call, config)[0] <= REGISTERS[config.key_warpgroups][0]
    )


def _query_fits(call: FlashAttentionCall, config: BackwardConfig) -> bool:
    return backward_bytes(call, config)[1] + SHARED_MEMORY_SLACK <= SHARED_MEMORY and (
        backward_registers(call, config)[1] <= REGISTERS[config.query_warpgroups][0]
    )


def _consumers(call: FlashAttentionCall, rows: int) -> int:
    """Two consumers, or one if the rows do not fill the second."""
    return 1 if rows <= ROWS else 2


def _narrow(call: FlashAttentionCall) -> bool:
    """Whether wide tiles would be mostly masked."""
    spans = [span for span in (call.window_width, call.chunk_size) if span is not None]
    return min(spans, default=1 << 30) <= 256


def _uneven(call: FlashAttentionCall) -> bool:
    """Whether, by indices, some query blocks visit fewer keys than others."""
    placed = call.query_positions is not None or call.key_positions is not None
    return not placed and (call.causal or call.window is not None or call.chunk_size is not None)


def _few(call: FlashAttentionCall, config: BackwardConfig) -> bool:
    """Whether there are at most four key blocks per multiprocessor; with more, the tail leaves little idle."""
    batch, keys, heads, _ = call.key.shape
    return batch * heads * -(-keys // (config.key_warpgroups * ROWS)) <= 4 * MULTIPROCESSORS


def _key_splits(call: FlashAttentionCall, config: BackwardConfig) -> int:
    """The fastest number of splits, by simulating the order in which programs are scheduled."""
    if not _few(call, config):
        return 1
    (batch, keys, heads, _), group = call.key.shape, call.query.shape[2] // call.key.shape[2]
    widths, own = sum(sizes_of(call)), config.key_warpgroups * ROWS
    step = _STEP * widths / 256 * config.key_block_q / 64 * own / 128
    walks = [group * _query_tiles_met(call, first, own, config.key_block_q) for first in range(0, keys, own)]

    def seconds(splits: int) -> float:
        apart = _START if splits == 1 else _START + _SUMS
        free = [0.0] * MULTIPROCESSORS
        for tile_range in walks:
            for _ in range(batch * heads * splits):
                heapq.heapreplace(free, free[0] + apart + -(-tile_range // splits))
        added = 0.0 if splits == 1 else _LAUNCH + 4 * splits * batch * keys * heads * widths / _READ
        return max(free) * step + added

    return min(_KEY_SPLITS, key=seconds)


def _query_tiles_met(call: FlashAttentionCall, first: int, own: int, block: int) -> int:
    """Query tiles that a key block visits, as far as indices determine it."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    left, right = call.window or (None, None)
    start, end = first - call.query_offset, min(first + own, keys) - call.query_offset
    low, high = 0, queries
    if call.query_positions is None and call.key_positions is None:
        if call.causal and first >= (call.prefix or 0):
            low = start
        low = low if right is None else max(low, start - right)
        high = high if left is None else min(high, end + left)
        high = high if call.chunk_size is None else min(high, end + call.chunk_size)
    return max(0, -(-high // block) - max(0, low) // block)


def key_tiles_met(call: FlashAttentionCall, first: int, own: int, block: int) -> int:
    """Key tiles that a query block visits, if indices alone determine it."""
    left, right = call.window or (None, None)
    start, end = first + call.query_offset, first + own + call.query_offset
    low, high = 0, call.key.shape[1]
    if call.causal:
        high = min(high, max(end, call.prefix or 0))
    high = high if right is None else min(high, end + right)
    low = low if left is None else max(low, start - left)
    if call.chunk_size is not None:
        low = max(low, start // call.chunk_size * call.chunk_size)
        high = min(high, -(-end // call.chunk_size) * call.chunk_size)
    return max(0, -(-high // block) - max(0, low) // block)


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """The first of the candidates that fits. Measured on an H200: persistence helps short loops, and wide heads with loops of
    different lengths; ping-pong does not help short loops, nor wide heads that overlap without persistence; under narrow
    windows, packed heads with four consumers are the fastest."""
    queries, narrow = call.query.shape[1], _narrow(call)
    consumers = [_consumers(call, queries)]
    pack_gqa = narrow and can_pack_gqa(call)
    widths = (64, 128) if pack_gqa or call.key.shape[1] <= 64 else (128, 64)
    wide = max(sizes_of(call)) >= 128  # then MMAs, not exponentials, dominate
    if pack_gqa and queries > 2 * ROWS:
        consumers.insert(0, 4)
    elif max(sizes_of(call)) == 64 and queries > 2 * ROWS and not narrow and call.bias is None:
        consumers = [3]
    persistent_choices = (False,)
    if not _FEWER_MULTIPROCESSORS.intersection(re.split(r"[ -]", target.device_kind)):
        persistent_choices = (
            (True,)
            if narrow or call.query_segments is not None
            else (True, False)
            if wide and _uneven(call)
            else persistent_choices
        )
    trials = list(itertools.product(consumers, widths, (True, False), (4, 2, 1) if pack_gqa else (2, 1), persistent_choices))
    if call.bias is not None:  # a bias needs shared memory too: prefer narrow tiles to a single stage
        trials.sort(key=lambda trial: trial[3] == 1)
    for warpgroups, block_k, overlap, num_stages, persistent in trials:
        config = ForwardConfig(
            block_k=block_k,
            num_stages=num_stages,
            warpgroups=warpgroups,
            overlap=overlap,
            ping_pong=warpgroups > 1 and not narrow and (persistent or not (wide and overlap)),
            query_in_registers=False,
            persistent=persistent,
            pack_gqa=pack_gqa,
        )
        if _forward_fits(call, config):
            return config
    return ForwardConfig(64, 1, 1, False, False, False, False)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    found = [forward_heuristic(call, target)]
    for block_k, num_stages, warpgroups in ((128, 2, 2), (64, 4, 2), (128, 2, 3), (64, 4, 3)):
        for persistent, held, ping_pong in itertools.product((False, True), (False, True), (False, True)):
            found.append(ForwardConfig(block_k, num_stages, warpgroups, True, ping_pong, held, persistent))
        found.append(ForwardConfig(block_k, num_stages, warpgroups, False, True, False, False))
    if _narrow(call) and can_pack_gqa(call):
        for block_k, num_stages, warpgroups in ((64, 4, 2), (64, 8, 2), (64, 4, 3), (64, 4, 4), (64, 6, 4), (128, 2, 2)):
            found.append(ForwardConfig(block_k, num_stages, warpgroups, True, False, False, True, pack_gqa=True))
    found = [found[0], *(config for config in found if _forward_fits(call, config))]
    return list(dict.fromkeys(found))


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    """The first config of each kernel that fits."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    config = BackwardConfig(64, 1, 1, True, 1, 64, 1, 1)
    owned = range(_consumers(call, keys), 0, -1)
    for apart, warpgroups, num_stages in itertools.product((False, True), owned, (2, 1)):
        trial = dataclasses.replace(config, separate_dk_dv=apart, key_warpgroups=warpgroups, key_num_stages=num_stages)
        if _key_fits(call, trial):
            config = trial
            break
    config = dataclasses.replace(config, key_splits=_key_splits(call, config))
    widths = (64,) if _narrow(call) or keys <= 64 else (128, 64)
    for warpgroups, num_stages, width in itertools.product(range(_consumers(call, queries), 0, -1), (2, 1), widths):
        trial = dataclasses.replace(config, query_block_k=width, query_warpgroups=warpgroups, query_num_stages=num_stages)
        if _query_fits(call, trial):
            return trial
    return config


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Varies one kernel at a time: the two do not influence each other."""
    best = backward_heuristic(call, target)
    splits = [dataclasses.replace(best, key_splits=splits) for splits in _KEY_SPLITS] if _few(call, best) else []
    return list(dict.fromkeys([best, *splits, *_query_variants(call, best), *_key_variants(call, best)]))


def _key_variants(call: FlashAttentionCall, best: BackwardConfig) -> Iterable[BackwardConfig]:
    for apart, block_q, warpgroups, num_stages in itertools.product((False, True), (64, 128), (2, 3), (2, 4)):
        config = dataclasses.replace(
            best, key_block_q=block_q, key_num_stages=num_stages, key_warpgroups=warpgroups, separate_dk_dv=apart
        )
        if _key_fits(call, config):
            yield config


def _query_variants(call: FlashAttentionCall, best: BackwardConfig) -> Iterable[BackwardConfig]:
    for block_k, warpgroups, num_stages in itertools.product((64, 128), (2, 3), (2, 4)):
        config = dataclasses.replace(best, query_block_k=block_k, query_num_stages=num_stages, query_warpgroups=warpgroups)
        if _query_fits(call, config):
            yield config


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
