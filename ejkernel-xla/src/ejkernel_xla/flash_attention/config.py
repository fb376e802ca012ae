"""Block sizes of attention on XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_CACHED_SCORES = 2**20
"""Scores of all heads that stay in a CPU's last-level cache from one pass over a tile to the next."""

_NARROW_WINDOW = 384
"""Within a window of so many keys, a large part of large tiles is masked."""

_SMALL_SCORES = 2**22
"""Up to this many scores a single tile in the forward phase costs little time and saves the compilation of a loop."""


_VECTOR = 16
"""float32 numbers of the widest vector of a CPU: a tile that is a multiple of it leaves no partly filled one."""


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """Tile sizes, clipped to the sequence lengths.

    Attributes:
        block_q, block_k: in the forward phase.
        block_q_backward, block_k_backward: in the backward phase.
    """

    block_q: int = 256
    block_k: int = 256
    block_q_backward: int = 256
    block_k_backward: int = 256

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "block_q_backward", "block_k_backward"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a value >= 1")


def heuristic(call: FlashAttentionCall, target: Target) -> FlashAttentionConfig:
    """One tile of all heads should stay in cache; short problems should compile fast; on a CPU no tile computes much twice."""
    batch, queries, heads, _ = call.query.shape
    keys = call.key.shape[1]
    if target.backend != "cpu":
        return FlashAttentionConfig(512, 512, 512, 512)
    block = 512
    while block > 128 and batch * heads * block * block > _CACHED_SCORES:
        block //= 2
    if max(queries, keys) <= 512 and batch * heads * queries * keys <= _SMALL_SCORES:
        return FlashAttentionConfig(512, 512, _even(queries, 128), 512)
    narrow = call.window_width is not None and call.window_width <= _NARROW_WINDOW
    backward = min(block, 128) if narrow else block
    return FlashAttentionConfig(*(_even(length, size) for size in (block, backward) for length in (queries, keys)))


def _even(length: int, block: int) -> int:
    """The smallest tile that covers a length in as many tiles as `block` does; `block` itself where that is hardly smaller.

    A last tile that would pass the end starts earlier and computes again what the one before it has computed: 640 in tiles of
    512 would be the work of 1024.
    """
    if length <= block:
        return block
    tiles = -(-length // block)
    even = -(-length // (tiles * _VECTOR)) * _VECTOR
    return even if even <= block - block // 16 else block


def search_space(call: FlashAttentionCall, target: Target) -> Sequence[FlashAttentionConfig]:
    """Square and oblong tiles around the heuristic, larger ones for accelerators; both phases vary together."""
    sizes = (128, 256, 512) if target.backend == "cpu" else (256, 512, 1024)
    pairs = [(q, k) for q in sizes for k in sizes if 1 / 4 <= q / k <= 4]
    found = [heuristic(call, target), *(FlashAttentionConfig(q, k, q, k) for q, k in pairs)]
    return list(dict.fromkeys(found))


CONFIGS = ConfigSpace(FlashAttentionConfig, heuristic, search_space)
