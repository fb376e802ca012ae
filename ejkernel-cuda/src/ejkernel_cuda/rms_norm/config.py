"""Performance knobs of `rms_norm`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import ConfigSpace, Target

_THREADS = tuple(1 << power for power in range(10))
_PACKS_PER_THREAD = 2
"""Two 16-byte loads in flight per array and thread, with the next row's read ahead; four in forward on wide rows."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    threads: threads per row, a power of two up to 512; the library raises it when a row does not fit into their registers.
    """

    threads: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    threads: as in forward.
    parts: blocks that share the rows under one parameter; each writes one partial sum of the parameter's gradient.
    """

    threads: int
    parts: int


def _packs(call: RmsNormCall) -> int:
    """Accesses that cover one row: 16 bytes each when rows start on 16 bytes, else one element each."""
    width, itemsize = call.x.shape[-1], 4 if call.x.dtype == "float32" else 2
    return -(-width * itemsize // 16) if width * itemsize % 16 == 0 else width


def _threads(call: RmsNormCall, packs_per_thread: int = _PACKS_PER_THREAD) -> int:
    wanted = -(-_packs(call) // packs_per_thread)
    return next((threads for threads in _THREADS if threads >= wanted), _THREADS[-1])


def forward_heuristic(call: RmsNormCall, target: Target) -> ForwardConfig:
    wide = _packs(call) >= 256
    return ForwardConfig(_threads(call, 2 * _PACKS_PER_THREAD if wide else _PACKS_PER_THREAD))


def forward_space(call: RmsNormCall, target: Target) -> list[ForwardConfig]:
    packs = _packs(call)
    fitting = [threads for threads in _THREADS if packs <= 4 * threads < 8 * packs]
    return [ForwardConfig(threads) for threads in fitting or _THREADS[-1:]]


def backward_heuristic(call: RmsNormCall, target: Target) -> BackwardConfig:
    threads = _threads(call)
    return BackwardConfig(threads, 132 if threads == 512 else 264)


def backward_space(call: RmsNormCall, target: Target) -> list[BackwardConfig]:
    packs = _packs(call)
    fitting = [threads for threads in _THREADS if packs <= 2 * threads < 4 * packs]
    return [
        BackwardConfig(threads, parts)
        for threads, parts in itertools.product(fitting or _THREADS[-1:], (66, 132, 264, 396, 528, 1056))
    ]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
