"""Performance knobs of `qk_norm_rope`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs

_FORWARD_SPANS = (4, 8)
_SPANS = (4, 8, 16)
_THREADS = (64, 128, 256)
_PARTIALS = 480
"""Three blocks per multiprocessor of up to 160; the library launches no more than are resident."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    span: heads of a token that share one load of cos, sin and scale; a thread prefetches its pairs of all of them.
    threads: threads of a block.
    """

    span: int
    threads: int = 128


@renamed_knobs(parts="partials")
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    span: heads of a token that share one load of cos and sin; three heads are always in flight, one in float32.
    partials: upper bound on the partial sums of a scale's gradient. One block writes each; no more are launched than are resident.
    """

    span: int
    partials: int = _PARTIALS


def forward_heuristic(call: QkNormRopeCall, target: Target) -> ForwardConfig:
    return ForwardConfig(4, 64)


def forward_space(call: QkNormRopeCall, target: Target) -> list[ForwardConfig]:
    return [ForwardConfig(span, threads) for threads in _THREADS for span in _FORWARD_SPANS]


def backward_heuristic(call: QkNormRopeCall, target: Target) -> BackwardConfig:
    return BackwardConfig(4)


def backward_space(call: QkNormRopeCall, target: Target) -> list[BackwardConfig]:
    return [BackwardConfig(span, partials) for partials in (_PARTIALS, _PARTIALS * 2 // 3) for span in _SPANS]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
