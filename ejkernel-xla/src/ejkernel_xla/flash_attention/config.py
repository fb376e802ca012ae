"""Block sizes of attention on XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import ConfigSpace, Target


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """Queries and keys of one tile; both are cut to the lengths of the call.

    Attributes:
        block_q, block_k: in the forward phase.
        block_q_backward, block_k_backward: in the backward phase.
    """

    block_q: int = 512
    block_k: int = 512
    block_q_backward: int = 512
    block_k_backward: int = 512


def heuristic(call: FlashAttentionCall, target: Target) -> FlashAttentionConfig:
    return FlashAttentionConfig()


def search_space(call: FlashAttentionCall, target: Target) -> Sequence[FlashAttentionConfig]:
    return [heuristic(call, target)]


CONFIGS = ConfigSpace(FlashAttentionConfig, heuristic, search_space)
