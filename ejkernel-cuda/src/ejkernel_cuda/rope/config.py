"""Performance knobs of `rope`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import ConfigSpace, Target

_SPANS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    span: heads of a token that share one reading of cos and sin; four at a time are in flight, two in
        float32.
    """

    span: int


def heuristic(call: RopeCall, target: Target) -> Config:
    return Config(8)


def search_space(call: RopeCall, target: Target) -> list[Config]:
    return [Config(span) for span in _SPANS]


FORWARD = ConfigSpace(Config, heuristic, search_space)
BACKWARD = FORWARD
