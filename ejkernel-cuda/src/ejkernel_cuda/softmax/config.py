"""Performance knobs of `softmax`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._rows.config import ForwardConfig, clusters_for, packs_of, row_config, row_configs, threads_for

Config = ForwardConfig
"""Of both phases: neither sums over rows."""
_MOST_DIRECT = 1024
"""Packs of a row that goes straight to registers."""


def _direct(call: SoftmaxCall, packs_per_thread: int) -> Config | None:
    """Without shared memory as far as rows were timed so: on an H200, 1.12 to 1.23 times as fast as with it at 4096 columns, 1.06
    to 1.12 times at 128. None for rows that do not start on 16 bytes, or wider ones."""
    packs = packs_of(call.x)
    return Config(threads_for(packs, packs_per_thread), 1, 0) if packs < call.x.shape[-1] and packs <= _MOST_DIRECT else None


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """Of clusters the larger ones: 1.14 to 1.17 times as fast; backward they lost 2 to 5 %."""
    chosen = _direct(call, 4) or row_config(call.x, target, 1, 2)
    return dataclasses.replace(chosen, cluster=clusters_for(call.x, target)[-1]) if chosen.cluster > 1 else chosen


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return list(dict.fromkeys([forward_heuristic(call, target), *row_configs(call.x, target, 1, 2)]))


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    return _direct(call, 2) or row_config(call.x, target, 2, 2)


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return list(dict.fromkeys([backward_heuristic(call, target), *row_configs(call.x, target, 2, 2)]))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
