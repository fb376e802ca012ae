"""Configs of `kl_divergence`."""

from __future__ import annotations

import itertools

from ejkernel.operations.kl_divergence.interface import KlDivergenceCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for
from ejkernel_triton.cross_entropy.config import Config, rows_of_chunk

__all__ = ["BACKWARD", "FORWARD", "Config"]


def forward_heuristic(call: KlDivergenceCall, target: Target) -> Config:
    return _sized(call, 4096, 16)


def backward_heuristic(call: KlDivergenceCall, target: Target) -> Config:
    return _sized(call, 2048, 16)


def forward_space(call: KlDivergenceCall, target: Target) -> list[Config]:
    found = [_sized(call, *sizes) for sizes in itertools.product((2048, 4096, 8192, 16384), (8, 16))]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_space(call: KlDivergenceCall, target: Target) -> list[Config]:
    found = [_sized(call, *sizes) for sizes in itertools.product((1024, 2048, 4096), (8, 16))]
    return list(dict.fromkeys([backward_heuristic(call, target), *found]))


def _sized(call: KlDivergenceCall, block: int, per_thread: int) -> Config:
    """A chunk has the logits of both sides."""
    block = min(block, next_power_of_2(call.vocabulary))
    return Config(block, warps_for(block, per_thread), rows_of_chunk(call.vocabulary, 8))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
