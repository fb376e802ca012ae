"""Config of the delta rule on XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_xla._scan import states_in_cache

_STEP_BYTES = {"cpu": 1 << 22}
_OTHER_STEP_BYTES = 1 << 30
"""Approximate memory of the matmuls of one step: a CPU cache, or a part of an accelerator's memory."""


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig:
    """How tokens are grouped.

    Attributes:
        chunk_size: tokens between two states, rounded up to a power of two and cut to the length.
        chunks_per_step: chunks whose products are formed together. The backward phase keeps one state per step and recomputes
            the others. Not used token by token: there a step is a chunk.
        token_by_token: run chunks in the order of the recurrence, as calls with `use_chunked=False` always are.
    """

    chunk_size: int = 64
    chunks_per_step: int = 8
    token_by_token: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_size", "chunks_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a value >= 1")


def forward_heuristic(call: DeltaRuleCall, target: Target) -> DeltaRuleConfig:
    """As backward; but a CPU whose cache holds the states goes token by token, about twice as fast."""
    if target.backend == "cpu" and states_in_cache(call.query, call.value, call.heads):
        return DeltaRuleConfig(64, 1, token_by_token=True)
    return backward_heuristic(call, target)


def backward_heuristic(call: DeltaRuleCall, target: Target) -> DeltaRuleConfig:
    """Chunks of 64, on a CPU of 32; together as many as fit into a cache, or into a part of an accelerator's memory."""
    batch, _, _, width = call.query.shape
    chunk = 32 if target.backend == "cpu" else 64
    per_token = 3 * chunk + 6 * width + 3 * call.value.shape[3]
    if call.decays_by_channel:
        per_token += 24 * width
    chunk_bytes = 4 * batch * call.heads * chunk * max(per_token, 1)
    budget = _STEP_BYTES.get(target.backend, _OTHER_STEP_BYTES)
    return DeltaRuleConfig(chunk, max(budget // max(chunk_bytes, 1), 1))


def forward_space(call: DeltaRuleCall, target: Target) -> Sequence[DeltaRuleConfig]:
    by_token = DeltaRuleConfig(64, 1, token_by_token=True)
    return list(dict.fromkeys([forward_heuristic(call, target), *backward_space(call, target), by_token]))


def backward_space(call: DeltaRuleCall, target: Target) -> Sequence[DeltaRuleConfig]:
    """The heuristic; chunks around 64, one or more at a time, no two that the length makes the same."""
    length, first = call.query.shape[1], backward_heuristic(call, target)
    chosen, found = first.chunks_per_step, [first]
    for size in (16, 32, 64, 128):
        if size == 16 or size < 2 * length:
            chunks = max(-(-length // size), 1)
            found += [DeltaRuleConfig(size, steps) for steps in sorted({1, min(chosen, chunks), min(4 * chosen, chunks)})]
    return list(dict.fromkeys(found))


FORWARD = ConfigSpace(DeltaRuleConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(DeltaRuleConfig, backward_heuristic, backward_space)
