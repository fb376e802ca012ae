"""Config of the selective scan on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel.plugin import ConfigSpace, Target

_CHUNK_ELEMENTS = 2**24
"""The most states that a chunk scanned at once may hold (64 MiB in float32)."""


@dataclasses.dataclass(frozen=True)
class SelectiveScanConfig:
    """How sequences are split.

    Attributes:
        chunk_size: tokens between two states that backward keeps.
        associative: whether a chunk is an associative scan, with a logarithmic number of steps over all of its states.
        unroll: tokens per step of the loop over tokens; not used with `associative`.
    """

    chunk_size: int = 64
    associative: bool = False
    unroll: int = 1

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.unroll < 1:
            raise ValueError(f"chunk_size, unroll: got {self.chunk_size}, {self.unroll}, expected values >= 1")


def heuristic(call: SelectiveScanCall, target: Target) -> SelectiveScanConfig:
    """On a CPU token after token, in chunks about as long as there are chunks; elsewhere at once, as long as memory allows."""
    batch, length, channels = call.x.shape
    if target.backend == "cpu":
        chunk = 16
        while chunk * chunk < length:
            chunk *= 2
        return SelectiveScanConfig(chunk)
    chunk = 256
    while chunk > 16 and chunk * batch * channels * call.A.shape[2] > _CHUNK_ELEMENTS:
        chunk //= 2
    return SelectiveScanConfig(chunk, associative=True)


def search_space(call: SelectiveScanCall, target: Target) -> tuple[SelectiveScanConfig, ...]:
    """Both forms; longer and shorter chunks."""
    chosen = heuristic(call, target)
    chunks = (max(chosen.chunk_size // 2, 1), 2 * chosen.chunk_size)
    others = [dataclasses.replace(chosen, chunk_size=chunk) for chunk in chunks]
    forms = [SelectiveScanConfig(chosen.chunk_size, not chosen.associative), SelectiveScanConfig(chosen.chunk_size, unroll=4)]
    return tuple(dict.fromkeys([chosen, *others, *forms]))


CONFIGS = ConfigSpace(SelectiveScanConfig, heuristic, search_space)
