"""Configs of `cross_entropy`."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.cross_entropy.interface import CrossEntropyCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import warps_for


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block: logits of one step of a forward program, which has one row, or of a backward program; a power of two.
    num_warps: warps per program.
    rows: rows of one chunk, where a head makes their logits.
    """

    block: int
    num_warps: int
    rows: int = 2048


def forward_heuristic(call: CrossEntropyCall, target: Target) -> Config:
    return _sized(call, 2048, 16)


def backward_heuristic(call: CrossEntropyCall, target: Target) -> Config:
    return _sized(call, 4096, 16)


def forward_space(call: CrossEntropyCall, target: Target) -> list[Config]:
    found = [_sized(call, *sizes) for sizes in itertools.product((2048, 4096, 8192, 16384), (8, 16, 32))]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_space(call: CrossEntropyCall, target: Target) -> list[Config]:
    found = [_sized(call, *sizes) for sizes in itertools.product((1024, 2048, 4096, 8192), (8, 16, 32))]
    return list(dict.fromkeys([backward_heuristic(call, target), *found]))


def _sized(call: CrossEntropyCall, block: int, per_thread: int) -> Config:
    """Not wider than a row, with `per_thread` logits per thread."""
    block = min(block, next_power_of_2(call.vocabulary))
    return Config(block, warps_for(block, per_thread), rows_of_chunk(call.vocabulary, 4))


def rows_of_chunk(vocabulary: int, size: int, most: int = 2**29) -> int:
    """Rows, a power of two, whose logits of `size` bytes take no more than about `most` bytes, 512 MiB: products with the head
    are then large, and their results small beside the head's gradient."""
    return max(128, 1 << (max(1, most // (size * max(1, vocabulary))).bit_length() - 1))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
