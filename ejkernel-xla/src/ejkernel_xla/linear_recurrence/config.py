"""Chunk sizes of the linear recurrence on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_xla._scan import states_in_cache

_PAIR_ELEMENTS = 2**24
"""The most weights of pairs of tokens per channel that one chunk may hold at once (64 MiB in float32)."""


@dataclasses.dataclass(frozen=True)
class LinearRecurrenceConfig:
    """How sequences are cut.

    Attributes:
        chunk_size: tokens between two states.
        block_size: tokens among which decays per channel are formed pair by pair; divides chunk_size. Without such decays it is
            not used.
        token_by_token: run each chunk in the order of the recurrence instead of by matmuls; block_size is not used.
    """

    chunk_size: int = 64
    block_size: int = 16
    token_by_token: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.block_size < 1 or self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size, block_size: got {self.chunk_size}, {self.block_size}, expected values >= 1, the second a divisor"
                " of the first"
            )


def forward_heuristic(call: LinearRecurrenceCall, target: Target) -> LinearRecurrenceConfig:
    """As backward; with decays per channel a CPU whose cache holds the states goes token by token, up to three times as fast."""
    by_channel = call.gk is not None or call.gv is not None
    if target.backend == "cpu" and by_channel and states_in_cache(call.query, call.value, call.heads[1]):
        return LinearRecurrenceConfig(64, 16, token_by_token=True)
    return backward_heuristic(call, target)


def backward_heuristic(call: LinearRecurrenceCall, target: Target) -> LinearRecurrenceConfig:
    """Chunks of 64, on a CPU of 32. With decays per channel a CPU does best with two blocks of 8; elsewhere chunks shrink until the
    weights of pairs fit."""
    batch, _, _, width = call.query.shape
    channels, heads = call.value.shape[3], call.heads[1]
    per_channel = (width if call.gk is not None else 0) + (channels if call.gv is not None else 0)
    if target.backend == "cpu":
        return LinearRecurrenceConfig(16, 8) if per_channel else LinearRecurrenceConfig(32, 16)
    if not per_channel:
        return LinearRecurrenceConfig(64, 16)
    chunk, block = 64, 16
    while chunk > block and batch * heads * per_channel * chunk * block > _PAIR_ELEMENTS:
        chunk //= 2
    return LinearRecurrenceConfig(chunk, block)


def forward_space(call: LinearRecurrenceCall, target: Target) -> tuple[LinearRecurrenceConfig, ...]:
    by_token = LinearRecurrenceConfig(64, 16, token_by_token=True)
    return tuple(dict.fromkeys([forward_heuristic(call, target), *backward_space(call, target), by_token]))


def backward_space(call: LinearRecurrenceCall, target: Target) -> tuple[LinearRecurrenceConfig, ...]:
    """Halves and doubles of the heuristic's chunk; blocks of 8 and 16 where there are decays per channel."""
    chosen = backward_heuristic(call, target)
    blocks = {chosen.block_size} if call.gk is None and call.gv is None else {8, 16}
    chunks = {max(chosen.chunk_size // 2, 16), chosen.chunk_size, 2 * chosen.chunk_size}
    found = [LinearRecurrenceConfig(chunk, block) for chunk in sorted(chunks) for block in sorted(blocks) if chunk % block == 0]
    return tuple(dict.fromkeys([chosen, *found]))


FORWARD = ConfigSpace(LinearRecurrenceConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(LinearRecurrenceConfig, backward_heuristic, backward_space)
