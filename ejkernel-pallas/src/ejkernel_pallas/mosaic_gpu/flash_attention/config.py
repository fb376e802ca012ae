"""Tiles of `flash_attention` on Hopper, picked by what they take of shared memory and registers."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterable

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.targets.nvidia import FEWER_MULTIPROCESSORS
from ejkernel_pallas.mosaic_gpu._call import SHARED_MEMORY, SHARED_MEMORY_SLACK, tiled_bytes
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles, bias_tiles, form_of
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import MULTIPROCESSORS, REGISTERS, ROWS

SIZES = (64, 96, 128, 192, 256)
"""Of heads, as they lie in memory."""
_SMALLER = frozenset(FEWER_MULTIPROCESSORS)
"""In names of devices of this capability with fewer multiprocessors; a program that stays would wait for one that is through."""
_OVERHEAD = 24
"""Registers of a consumer for addresses, maxima and sums, beside one for 16 rows of a tile."""
_PARTS = (1, 2, 3, 4, 6, 8)
"""Into which the work of a block of keys may be cut."""
_STEP = 1.6e-6
"""Seconds that a tile of 64 queries takes with 128 keys and heads of 128, measured on an H200; the next two count such tiles."""
_START, _SUMS = 2, 4
"""Of a program: until its first product, and to write sums in float32."""
_LAUNCH, _READ = 4e-6, 3.5e12
"""Seconds until one more kernel has started, and bytes that it reads in a second."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_k: keys of a tile, a multiple of 64.
    stages: tiles of keys and of values in shared memory at one time.
    warpgroups: consumers of a block, each with 64 queries.
    overlap: the scores of a tile are formed while the weights of the one before are multiplied with values.
    ping_pong: consumers take turns at the tensor cores.
    query_in_registers: products read queries from registers, which leaves more of the shared memory's bandwidth to keys.
    persistent: as many programs as multiprocessors, each with several blocks, rather than one program per block.
    packed: a consumer's rows are the query heads of a key head for few tokens, which see fewer keys than many tokens of one head;
        only where `can_pack`.
    """

    block_k: int
    stages: int
    warpgroups: int
    overlap: bool
    ping_pong: bool
    query_in_registers: bool
    persistent: bool
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    key_block_q, key_stages, key_warpgroups: of the kernel that owns keys: queries of a tile, tiles in shared memory, consumers.
    key_apart: the gradients of keys and of values are formed by one kernel each.
    key_parts: programs among which the queries of a block of keys are divided. Several leave sums in float32, which are added up
        in one order afterwards: for calls that have fewer blocks of keys than keep a device busy.
    query_block_k, query_stages, query_warpgroups: of the kernel that owns queries.
    """

    key_block_q: int
    key_stages: int
    key_warpgroups: int
    key_apart: bool
    key_parts: int
    query_block_k: int
    query_stages: int
    query_warpgroups: int


def sizes_of(call: FlashAttentionCall) -> tuple[int, int]:
    """Head sizes of keys and values as they lie in memory: padded to what a product can read."""
    size, value_size = (next((s for s in SIZES if s >= n), n) for n in (call.query.shape[3], call.value.shape[3]))
    if size != value_size:  # pieces of one are kept in the place of the other
        size, value_size = (128 if s == 96 else s for s in (size, value_size))
    return size, value_size


def can_pack(call: FlashAttentionCall) -> bool:
    """Whether the query heads of a key head can be rows of one consumer: whole groups of 8 rows, as the copy engine stores them.
    What is known by query head or by query token alone is not read in that order."""
    group = call.query.shape[2] // call.key.shape[2]
    known = (call.bias, call.sinks, call.query_segments, call.query_positions)
    return group % 8 == 0 and ROWS % group == 0 and all(spec is None for spec in known)


def forward_bias(call: FlashAttentionCall, config: ForwardConfig) -> BiasTiles | None:
    return bias_tiles(call, by_key=False, warpgroups=config.warpgroups, other=config.block_k, stages=config.stages)


def backward_bias(call: FlashAttentionCall, config: BackwardConfig, *, by_key: bool) -> BiasTiles | None:
    """Of the kernel that owns keys, or of that which owns queries."""
    if by_key:
        warpgroups, other, stages = config.key_warpgroups, config.key_block_q, config.key_stages
    else:
        warpgroups, other, stages = config.query_warpgroups, config.query_block_k, config.query_stages
    return bias_tiles(call, by_key=by_key, warpgroups=warpgroups, other=other, stages=stages)


@dataclasses.dataclass(frozen=True)
class BiasGradientConfig:
    """Attributes:
    tiles: of the bias, which say what a program owns.
    resident: owned queries of all batches and heads that share a tile by pair stay in shared memory.
    """

    tiles: BiasTiles
    resident: bool


def bias_gradient_config(call: FlashAttentionCall) -> BiasGradientConfig | None:
    """The first that fits: queries stay where this leaves enough blocks of them. None without a bias."""
    form = form_of(call)
    if call.bias is None or form is None:
        return None
    sizes = [(2, 2, False), (2, 1, False), (1, 2, False), (1, 1, False)]
    blocks = call.bias.shape[0] * call.bias.shape[1] * -(-call.query.shape[1] // (2 * ROWS))
    if form == "pairs" and blocks >= MULTIPROCESSORS:
        sizes.insert(0, (2, 2, True))
    trials = [
        BiasGradientConfig(tiles, resident)
        for warpgroups, stages, resident in sizes
        if (tiles := bias_tiles(call, by_key=form == "keys", warpgroups=warpgroups, other=ROWS, stages=stages))
    ]
    fits = (trial for trial in trials if bias_gradient_bytes(call, trial) + SHARED_MEMORY_SLACK <= SHARED_MEMORY)
    return next(fits, trials[-1])


def sharing(call: FlashAttentionCall) -> tuple[int, int]:
    """Batches and heads for which a tile of a bias by pair is the same."""
    if call.bias is None or form_of(call) != "pairs":
        return 1, 1
    (batch, _, heads, _), (own_batch, own_heads, _, _) = call.query.shape, call.bias.shape
    return batch // own_batch, heads // own_heads


def bias_gradient_bytes(call: FlashAttentionCall, config: BiasGradientConfig) -> int:
    """Shared memory of the kernel of the bias's gradient."""
    tiles, widths = config.tiles, sizes_of(call)
    batches, members = sharing(call)
    places = tiles.stages if tiles.by_pair and not config.resident else batches * members
    own = sum(tiled_bytes((places, tiles.warpgroups, ROWS, width)) for width in widths)
    walked = sum(tiled_bytes((tiles.stages, tiles.other, width)) for width in widths)
    rows = tiled_bytes((tiles.stages, 2, tiles.other), 4) if tiles.by_key else 0
    return own + walked + rows + tiles.bytes


def bias_bytes(tiles: BiasTiles | None) -> int:
    return 0 if tiles is None else tiles.bytes


def query_slots(call: FlashAttentionCall, config: ForwardConfig) -> int:
    """Blocks of queries in shared memory: where there is room, programs that stay copy the next while they work on one."""
    fits = forward_bytes(call, config, slots=2) + SHARED_MEMORY_SLACK <= SHARED_MEMORY
    return 2 if config.persistent and fits else 1


def forward_bytes(call: FlashAttentionCall, config: ForwardConfig, *, slots: int = 1) -> int:
    """Shared memory of the forward kernel with so many blocks of queries."""
    size, value_size = sizes_of(call)
    used = tiled_bytes((slots * config.warpgroups, ROWS, size)) + tiled_bytes((config.warpgroups, ROWS), 4)
    if config.persistent or value_size > size:
        used += tiled_bytes((config.warpgroups, ROWS, value_size))
    used += bias_bytes(forward_bias(call, config))
    return used + sum(tiled_bytes((config.stages, config.block_k, width)) for width in (size, value_size))


def forward_registers(call: FlashAttentionCall, config: ForwardConfig) -> int:
    """Registers that a consumer's thread is expected to need: accumulator, scores, weights, and a tile of the bias."""
    size, value_size = sizes_of(call)
    tiles = forward_bias(call, config)
    held = 0 if tiles is None else tiles.registers
    return value_size // 2 + config.block_k * 13 // 16 + held + _OVERHEAD + config.query_in_registers * size // 4


def _forward_fits(call: FlashAttentionCall, config: ForwardConfig) -> bool:
    in_memory = forward_bytes(call, config) + SHARED_MEMORY_SLACK <= SHARED_MEMORY
    return in_memory and forward_registers(call, config) <= REGISTERS[config.warpgroups][0]


def _backward_bytes(call: FlashAttentionCall, other: int, stages: int, warpgroups: int, bias: BiasTiles | None) -> int:
    widths = sizes_of(call)
    own = sum(tiled_bytes((warpgroups, ROWS, width)) for width in widths)
    walked = sum(tiled_bytes((stages, other, width)) for width in widths)
    return own + walked + tiled_bytes((stages, 2, other), 4) + bias_bytes(bias)


def backward_bytes(call: FlashAttentionCall, config: BackwardConfig) -> tuple[int, int]:
    """Shared memory of the kernel that owns keys and of that which owns queries."""
    return (
        _backward_bytes(
            call, config.key_block_q, config.key_stages, config.key_warpgroups, backward_bias(call, config, by_key=True)
        ),
        _backward_bytes(
            call, config.query_block_k, config.query_stages, config.query_warpgroups, backward_bias(call, config, by_key=False)
        ),
    )


def backward_registers(call: FlashAttentionCall, config: BackwardConfig) -> tuple[int, int]:
    """Registers that a consumer's thread is expected to need: accumulators, scores and their gradients, weights."""
    size, value_size = sizes_of(call)
    owned = max(size, value_size) if config.key_apart else size + value_size
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
    """Two, or one where rows would not fill the second."""
    return 1 if rows <= ROWS else 2


def _narrow(call: FlashAttentionCall) -> bool:
    """Whether wide tiles would be mostly hidden."""
    spans = [span for span in (call.window_width, call.chunk_size) if span is not None]
    return min(spans, default=1 << 30) <= 256


def _uneven(call: FlashAttentionCall) -> bool:
    """Whether indices say that some blocks of queries meet fewer keys than others."""
    placed = call.query_positions is not None or call.key_positions is not None
    return not placed and (call.causal or call.window is not None or call.chunk_size is not None)


def _few(call: FlashAttentionCall, config: BackwardConfig) -> bool:
    """Whether there are fewer blocks of keys than four for each multiprocessor; of more, the last ones leave little idle."""
    batch, keys, heads, _ = call.key.shape
    return batch * heads * -(-keys // (config.key_warpgroups * ROWS)) <= 4 * MULTIPROCESSORS


def _key_parts(call: FlashAttentionCall, config: BackwardConfig) -> int:
    """The number of parts that is expected to be the fastest, by handing out programs in their order."""
    if not _few(call, config):
        return 1
    (batch, keys, heads, _), group = call.key.shape, call.query.shape[2] // call.key.shape[2]
    widths, own = sum(sizes_of(call)), config.key_warpgroups * ROWS
    step = _STEP * widths / 256 * config.key_block_q / 64 * own / 128
    walks = [group * _walked(call, first, own, config.key_block_q) for first in range(0, keys, own)]

    def seconds(parts: int) -> float:
        apart = _START if parts == 1 else _START + _SUMS
        free = [0.0] * MULTIPROCESSORS
        for walk in walks:
            for _ in range(batch * heads * parts):
                heapq.heapreplace(free, free[0] + apart + -(-walk // parts))
        added = 0.0 if parts == 1 else _LAUNCH + 4 * parts * batch * keys * heads * widths / _READ
        return max(free) * step + added

    return min(_PARTS, key=seconds)


def _walked(call: FlashAttentionCall, first: int, own: int, block: int) -> int:
    """Tiles of queries that meet a block of keys, as far as indices tell."""
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


def keys_met(call: FlashAttentionCall, first: int, own: int, block: int) -> int:
    """Tiles of keys that meet a block of queries, where indices alone say so."""
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
    """The first of these that fits. On an H200 programs that stay helped where walks are short, and for wide heads where they have
    several lengths (0.94 to 0.98 of the time), not where all have one. Turns (`ping_pong`) did not help where walks are short, nor
    for wide heads whose products overlap with exponentials in programs that come and go. Under a window of 128, packed heads with
    tiles of 64 keys took 0.89 of the time of tiles of 128 by one head, and with four consumers, as they wait rather than compute,
    0.75."""
    queries, narrow = call.query.shape[1], _narrow(call)
    consumers = [_consumers(call, queries)]
    packed = narrow and can_pack(call)
    widths = (64, 128) if packed or call.key.shape[1] <= 64 else (128, 64)
    wide = max(sizes_of(call)) >= 128  # then products, not exponentials, take the time
    if packed and queries > 2 * ROWS:
        consumers.insert(0, 4)
    elif max(sizes_of(call)) == 64 and queries > 2 * ROWS and not narrow and call.bias is None:
        consumers = [3]
    stays = (False,)
    if not _SMALLER.intersection(re.split(r"[ -]", target.device_kind)):
        stays = (True,) if narrow or call.query_segments is not None else (True, False) if wide and _uneven(call) else stays
    trials = list(itertools.product(consumers, widths, (True, False), (4, 2, 1) if packed else (2, 1), stays))
    if call.bias is not None:  # which takes a place of its own: rather narrow tiles than one place of each kind
        trials.sort(key=lambda trial: trial[3] == 1)
    for warpgroups, block_k, overlap, stages, persistent in trials:
        config = ForwardConfig(
            block_k=block_k,
            stages=stages,
            warpgroups=warpgroups,
            overlap=overlap,
            ping_pong=warpgroups > 1 and not narrow and (persistent or not (wide and overlap)),
            query_in_registers=False,
            persistent=persistent,
            packed=packed,
        )
        if _forward_fits(call, config):
            return config
    return ForwardConfig(64, 1, 1, False, False, False, False)


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    found = [forward_heuristic(call, target)]
    for block_k, stages, warpgroups in ((128, 2, 2), (64, 4, 2), (128, 2, 3), (64, 4, 3)):
        for persistent, held, ping_pong in itertools.product((False, True), (False, True), (False, True)):
            found.append(ForwardConfig(block_k, stages, warpgroups, True, ping_pong, held, persistent))
        found.append(ForwardConfig(block_k, stages, warpgroups, False, True, False, False))
    if _narrow(call) and can_pack(call):
        for block_k, stages, warpgroups in ((64, 4, 2), (64, 8, 2), (64, 4, 3), (64, 4, 4), (64, 6, 4), (128, 2, 2)):
            found.append(ForwardConfig(block_k, stages, warpgroups, True, False, False, True, packed=True))
    found = [found[0], *(config for config in found if _forward_fits(call, config))]
    return list(dict.fromkeys(found))


def backward_heuristic(call: FlashAttentionCall, target: Target) -> BackwardConfig:
    """Each kernel's first that fits."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    config = BackwardConfig(64, 1, 1, True, 1, 64, 1, 1)
    owned = range(_consumers(call, keys), 0, -1)
    for apart, warpgroups, stages in itertools.product((False, True), owned, (2, 1)):
        trial = dataclasses.replace(config, key_apart=apart, key_warpgroups=warpgroups, key_stages=stages)
        if _key_fits(call, trial):
            config = trial
            break
    config = dataclasses.replace(config, key_parts=_key_parts(call, config))
    widths = (64,) if _narrow(call) or keys <= 64 else (128, 64)
    for warpgroups, stages, width in itertools.product(range(_consumers(call, queries), 0, -1), (2, 1), widths):
        trial = dataclasses.replace(config, query_block_k=width, query_warpgroups=warpgroups, query_stages=stages)
        if _query_fits(call, trial):
            return trial
    return config


def backward_space(call: FlashAttentionCall, target: Target) -> list[BackwardConfig]:
    """Each kernel varied alone: the two do not influence each other."""
    best = backward_heuristic(call, target)
    parts = [dataclasses.replace(best, key_parts=parts) for parts in _PARTS] if _few(call, best) else []
    return list(dict.fromkeys([best, *parts, *_query_variants(call, best), *_key_variants(call, best)]))


def _key_variants(call: FlashAttentionCall, best: BackwardConfig) -> Iterable[BackwardConfig]:
    for apart, block_q, warpgroups, stages in itertools.product((False, True), (64, 128), (2, 3), (2, 4)):
        config = dataclasses.replace(best, key_block_q=block_q, key_stages=stages, key_warpgroups=warpgroups, key_apart=apart)
        if _key_fits(call, config):
            yield config


def _query_variants(call: FlashAttentionCall, best: BackwardConfig) -> Iterable[BackwardConfig]:
    for block_k, warpgroups, stages in itertools.product((64, 128), (2, 3), (2, 4)):
        config = dataclasses.replace(best, query_block_k=block_k, query_stages=stages, query_warpgroups=warpgroups)
        if _query_fits(call, config):
            yield config


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
