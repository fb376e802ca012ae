"""Performance knobs of `qk_norm_rope`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import ConfigSpace, Target

_FORWARD_SPANS = (4, 8)
_SPANS = (4, 8, 16)
_THREADS = (64, 128, 256)
_PARTS = 480
"""Three blocks for each processor of a device, which has up to 160; the library launches no more than run at once."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    span: heads of a token that share one reading of cos, sin and scale; a thread asks for its part of all of them at once.
    threads: of a block.
    """

    span: int
    threads: int = 128


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    span: heads of a token that share one reading of cos and sin; three heads are always in flight, one in float32.
    parts: blocks that share the heads under one scale, at most; each writes a partial sum of its gradient. No more are launched
        than the device runs at once.
    """

    span: int
    parts: int = _PARTS


def forward_heuristic(call: QkNormRopeCall, target: Target) -> ForwardConfig:
    return ForwardConfig(4, 64)


def forward_space(call: QkNormRopeCall, target: Target) -> list[ForwardConfig]:
    return [ForwardConfig(span, threads) for threads in _THREADS for span in _FORWARD_SPANS]


def backward_heuristic(call: QkNormRopeCall, target: Target) -> BackwardConfig:
    return BackwardConfig(4)


def backward_space(call: QkNormRopeCall, target: Target) -> list[BackwardConfig]:
    return [BackwardConfig(span, parts) for parts in (_PARTS, _PARTS * 2 // 3) for span in _SPANS]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
