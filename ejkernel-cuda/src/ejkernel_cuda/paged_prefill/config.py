"""Performance knobs of `paged_attention` for many new tokens. Blocks and KV tiles are those of `flash_attention`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._capability import largest_pack


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Attributes:
    pack_gqa: GQA packing: the rows of a query block are `packed_heads` query heads of one key head for fewer tokens, so that a
        request of one token fills fewer blocks.
    """

    pack_gqa: bool


def packed_heads(call: PagedAttentionCall) -> int:
    """How many query heads share the rows of a block with `pack_gqa`."""
    return largest_pack(call.query.shape[2] // call.heads)


def heuristic(call: PagedAttentionCall, target: Target) -> PrefillConfig:
    """Packed: it reads as many keys, and requests of few tokens among many need a fraction of the blocks."""
    return PrefillConfig(packed_heads(call) > 1)


def search_space(call: PagedAttentionCall, target: Target) -> list[PrefillConfig]:
    return [PrefillConfig(pack) for pack in dict.fromkeys((packed_heads(call) > 1, False))]


FORWARD = ConfigSpace(PrefillConfig, heuristic, search_space)
