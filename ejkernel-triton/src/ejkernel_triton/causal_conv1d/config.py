"""Configs of `causal_conv1d`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    tokens: of one program, or of one step; a power of two.
    block: channels of one program; a power of two.
    num_warps: warps per program.
    chunk_size: in the gradient, tokens of one program that adds up the filters' gradients; a multiple of `tokens`.
    """

    tokens: int
    block: int
    num_warps: int
    chunk_size: int = 128

    def __post_init__(self) -> None:
        if self.chunk_size % self.tokens:
            raise ValueError(f"chunk_size: got {self.chunk_size}, expected a multiple of tokens = {self.tokens}")


def forward_heuristic(call: CausalConv1dCall, target: Target) -> Config:
    return _sized(call, 32, 64, 16)


def backward_heuristic(call: CausalConv1dCall, target: Target) -> Config:
    """Small programs: a sum over warps goes through shared memory, and every chunk takes one for each tap."""
    return _sized(call, 32, 64, 16)


def forward_space(call: CausalConv1dCall, target: Target) -> list[Config]:
    found = [
        _sized(call, *sizes)
        for sizes in itertools.product((16, 32, 64), (64, 128, 256), (8, 16))
        if sizes[0] * sizes[1] <= 4096
    ]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_space(call: CausalConv1dCall, target: Target) -> list[Config]:
    sizes = itertools.product((16, 32, 64), (64, 128), (8, 16))
    found = [
        dataclasses.replace(_sized(call, *each), chunk_size=chunk)
        for each in sizes
        for chunk in (64, 128, 256)
        if each[0] * each[1] <= 4096
    ]
    return list(dict.fromkeys([backward_heuristic(call, target), *found]))


def _sized(call: CausalConv1dCall, tokens: int, block: int, per_thread: int) -> Config:
    """Not larger than the call, with `per_thread` elements per thread."""
    _, length, channels = call.x.shape
    tokens, block = min(tokens, next_power_of_2(length)), min(block, next_power_of_2(channels))
    return Config(tokens, block, warps_for(tokens * block, per_thread))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
