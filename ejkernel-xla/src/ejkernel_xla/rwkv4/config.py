"""Config of RWKV-4's time mixing on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.rwkv4.interface import Rwkv4Call
from ejkernel.plugin import ConfigSpace, Target


@dataclasses.dataclass(frozen=True)
class Rwkv4Config:
    """How sequences are split.

    Attributes:
        chunk_size: tokens between two states that backward keeps.
        unroll: tokens per step of the loop over tokens.
    """

    chunk_size: int = 64
    unroll: int = 1

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.unroll < 1:
            raise ValueError(f"chunk_size, unroll: got {self.chunk_size}, {self.unroll}, expected values >= 1")


def heuristic(call: Rwkv4Call, target: Target) -> Rwkv4Config:
    """Chunks about as long as there are chunks; on accelerators several tokens per step, since a step is dear."""
    chunk = 16
    while chunk * chunk < call.k.shape[1]:
        chunk *= 2
    return Rwkv4Config(chunk, 1 if target.backend == "cpu" else 8)


def search_space(call: Rwkv4Call, target: Target) -> tuple[Rwkv4Config, ...]:
    """Longer and shorter chunks; more and fewer tokens per step."""
    chosen = heuristic(call, target)
    sizes = (max(chosen.chunk_size // 2, 1), 2 * chosen.chunk_size)
    others = [dataclasses.replace(chosen, chunk_size=size) for size in sizes]
    return tuple(dict.fromkeys([chosen, *others, *(dataclasses.replace(chosen, unroll=count) for count in (1, 4, 16))]))


CONFIGS = ConfigSpace(Rwkv4Config, heuristic, search_space)
