"""Performance knobs of `paged_attention` for many new tokens. Blocks and KV tiles are those of `flash_attention`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target

_ROWS = 64
"""Of a consumer warpgroup; packed heads share them."""


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Attributes:
    pack_gqa: GQA packing: the rows of a query block are `packed_heads` query heads of one key head for fewer tokens, so that a
        request of one token fills fewer blocks.
    """

    pack_gqa: bool


def packed_heads(call: PagedAttentionCall) -> int:
    """The largest power of two up to 64 that divides the query heads of a key head."""
    group = call.query.shape[2] // call.heads
    return min(group & -group, _ROWS)


def heuristic(call: PagedAttentionCall, target: Target) -> PrefillConfig:
    """Packed: it reads as many keys, and requests of few tokens among many need a fraction of the blocks."""
    return PrefillConfig(packed_heads(call) > 1)


def search_space(call: PagedAttentionCall, target: Target) -> list[PrefillConfig]:
    return [PrefillConfig(pack) for pack in dict.fromkeys((packed_heads(call) > 1, False))]


FORWARD = ConfigSpace(PrefillConfig, heuristic, search_space)
