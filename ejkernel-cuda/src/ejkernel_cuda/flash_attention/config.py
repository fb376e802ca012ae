"""Performance knobs of `flash_attention`.

The kernel pads heads to 64, 128 or 256 elements and reads KV tiles of 128, 128 or 80 keys. A CTA has three consumer warpgroups of
64 queries each for 64 elements, and two above.
"""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_cuda._capability import largest_pack, multiprocessors, padded_head_size

_NARROW = 256
_FEW = 64
"""Tokens that fill at most a third or half of a query block."""
_MIN_SAVED_TILES = 16
"""KV tiles by which split-KV must shorten the last wave: writing and combining partial results costs 8 to 14 tiles on an H200
(benchmarks/results/shared_blocks_cuda_h200.json)."""
_MIN_TILES_PER_CTA = 4
"""KV tiles of a split-KV CTA; `kMinTilesPerCta` of the library."""


@renamed_knobs(take_turns="ping_pong", packed="pack_gqa", sharers="split_kv_ctas")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    ping_pong: ping-pong scheduling: the consumer warpgroups issue their MMAs in turn, so that the MMAs of one overlap the softmax
        of another.
    persistent: launch one CTA per multiprocessor; each CTA loops over query blocks and loads the next block's tiles while it works
        on this one. False: one CTA per query block.
    pack_gqa: GQA packing: the rows of a query block are `packed_heads` query heads of one key head for fewer tokens. Fewer tokens
        see fewer keys.
    split_kv_ctas: upper bound on the CTAs that split the KV tiles of the query blocks left after the last full wave (stream-K), or
        of all query blocks if they fill no wave. 0: no split. Needs `persistent`.
    """

    ping_pong: bool
    persistent: bool
    pack_gqa: bool = False
    split_kv_ctas: int = 0

    def __post_init__(self) -> None:
        if self.split_kv_ctas < 0 or (self.split_kv_ctas and not self.persistent):
            raise ValueError(f"{self}: split_kv_ctas must not be negative, and must be 0 unless persistent=True")


def band(call: FlashAttentionCall) -> tuple[int, int]:
    """`(below, above)`: query i sees keys i - below ... i + above.

    Limits are clamped to the farthest pair, which changes no mask and keeps them within 32 bits.
    """
    left, right = call.window or (None, None)
    if call.causal:
        right = 0 if right is None else min(right, 0)
    farthest = call.query.shape[1] + call.key.shape[1] + abs(call.query_offset)
    below, above = (farthest if side is None else min(side, farthest) for side in (left, right))
    return below - call.query_offset, above + call.query_offset


def block_shape(call: FlashAttentionCall) -> tuple[int, int]:
    """Queries of a block, and the padded head size."""
    size = padded_head_size(call.query.shape[3], call.value.shape[3])
    return 192 if size == 64 else 128, size


def packed_heads(call: FlashAttentionCall) -> int:
    """How many query heads share the rows of a block with `pack_gqa`."""
    return largest_pack(call.query.shape[2] // call.key.shape[2])


def _saved_tiles(call: FlashAttentionCall, target: Target, pack: int) -> int:
    """KV tiles by which split-KV shortens the longest CTA of the last wave.

    0 where the CTAs cannot split them, and for masked calls of more than one wave: there the hardware's own scheduling of whole
    blocks balances better.
    """
    (batch, queries, heads, _), keys, (below, above) = call.query.shape, call.key.shape[1], band(call)
    rows, size = block_shape(call)
    tokens, tile, ctas = rows // pack, 80 if size == 256 else 128, multiprocessors(target)
    total = batch * (heads // pack) * -(-queries // tokens)
    sees_all = below >= queries - 1 and above >= keys - 1
    if not total or (total >= ctas and not sees_all):
        return 0
    firsts = range(1) if sees_all else range(0, queries, tokens)  # without a mask all blocks are alike
    lows = [min(max(first - below, 0), keys) // tile for first in firsts]
    highs = [-(-min(max(first + tokens + above, 0), keys) // tile) for first in firsts]
    remainder, tiles = total % ctas, max(highs[-1], lows[-1]) - lows[0]
    split = min(ctas, remainder * tiles // _MIN_TILES_PER_CTA)
    if split <= remainder:
        return 0
    return max(high - low for low, high in zip(lows, highs, strict=True)) - -(-remainder * tiles // split)


def _split_kv_ctas(call: FlashAttentionCall, target: Target, pack_gqa: bool, least: int) -> int:
    pack = packed_heads(call) if pack_gqa else 1
    return multiprocessors(target) if _saved_tiles(call, target, pack) >= least else 0


def forward_heuristic(call: FlashAttentionCall, target: Target) -> ForwardConfig:
    """GQA packing for narrow windows and few tokens; a persistent kernel unless the mask makes blocks uneven.

    On an H200 the persistent kernel was 1 to 29 % faster for blocks of equal or little work, and 1 to 55 % slower under causal
    masks and wide windows, because its static schedule ends unevenly. Ping-pong gained at most 0.4 % and lost up to 3 %.
    """
    is_masked = call.causal or call.window is not None
    narrow = call.window_width is not None and call.window_width <= _NARROW
    pack_gqa = packed_heads(call) > 1 and (narrow or call.query.shape[1] <= _FEW)
    split = _split_kv_ctas(call, target, pack_gqa, _MIN_SAVED_TILES)
    return ForwardConfig(
        ping_pong=False, persistent=narrow or not is_masked or split > 0, pack_gqa=pack_gqa, split_kv_ctas=split
    )


def forward_space(call: FlashAttentionCall, target: Target) -> list[ForwardConfig]:
    chosen, flags = forward_heuristic(call, target), (True, False)
    found = [
        ForwardConfig(ping_pong, persistent, pack_gqa, split)
        for ping_pong, persistent, pack_gqa in itertools.product(flags, flags, dict.fromkeys((chosen.pack_gqa, False)))
        for split in dict.fromkeys((0, _split_kv_ctas(call, target, pack_gqa, 1) if persistent else 0))
    ]
    return list(dict.fromkeys([chosen, *found]))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
