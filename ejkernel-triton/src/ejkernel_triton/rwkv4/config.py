"""How `rwkv4` is cut: segments of tokens, blocks of channels and tokens that are unrolled."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.rwkv4.interface import Rwkv4Call
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._capability import multiprocessors
from ejkernel_triton._segments import check_cut, segment_size

_WARP = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """Both phases.

    Attributes:
        segment_size: tokens of one program, a multiple of chunk_size; 0 = a whole sequence.
        chunk_size: tokens whose loads and steps are unrolled, a power of two; backward keeps a state per chunk.
        block_i: channels of one program, a power of two.
        num_warps: warps per program.
    """

    segment_size: int
    chunk_size: int
    block_i: int
    num_warps: int

    def __post_init__(self) -> None:
        check_cut(self.segment_size, self.chunk_size, self.block_i)


def _config(call: Rwkv4Call, target: Target, chunk: int, warps: int, resident: int) -> Config:
    """With so many resident warps per multiprocessor, one channel per thread."""
    batch, length, channels = call.k.shape
    block = min(warps * _WARP, next_power_of_2(channels))
    chunk = min(chunk, next_power_of_2(length))
    programs = resident * (multiprocessors(target) or 100) // warps
    return Config(segment_size(batch * -(-channels // block), length, chunk, programs), chunk, block, warps)


def heuristic(call: Rwkv4Call, target: Target) -> Config:
    """Within 7 % of the fastest on an H100 in both phases."""
    return _config(call, target, 8, 1, 16)


def search_space(call: Rwkv4Call, target: Target) -> list[Config]:
    tries = itertools.product((4, 8, 16), (1, 2, 4), (4, 8, 16, 32))
    return list(dict.fromkeys([heuristic(call, target), *(_config(call, target, *x) for x in tries)]))


FORWARD = BACKWARD = ConfigSpace(Config, heuristic, search_space)
