"""Performance knobs of `rope`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import ConfigSpace, Target

SPANS = (1, 2, 4)
THREADS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    span: heads of a token that share one load of cos and sin; a thread prefetches its pairs of all of them.
    threads: threads of a block.
    """

    span: int
    threads: int = 128


def heuristic(call: RopeCall, target: Target) -> Config:
    return Config(1)


def search_space(call: RopeCall, target: Target) -> list[Config]:
    return [Config(span, threads) for threads in THREADS for span in SPANS]


FORWARD = ConfigSpace(Config, heuristic, search_space)
BACKWARD = FORWARD
