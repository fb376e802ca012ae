"""How `selective_scan` is cut: segments of tokens, blocks of channels and tokens that are unrolled."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.selective_scan.interface import SelectiveScanCall
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
        num_warps: warps per program. Backward, each program leaves sums of the gradients of B and C over its channels.
    """

    segment_size: int
    chunk_size: int
    block_i: int
    num_warps: int

    def __post_init__(self) -> None:
        check_cut(self.segment_size, self.chunk_size, self.block_i)


def _config(call: SelectiveScanCall, target: Target, chunk: int, per_thread: int, warps: int, resident: int) -> Config:
    """With so many numbers of states per thread, and so many resident warps per multiprocessor."""
    batch, length, channels = call.x.shape
    block = min(max(per_thread * _WARP // next_power_of_2(call.A.shape[2]), 1), next_power_of_2(channels), 2 * _WARP)
    warps = min(warps, next_power_of_2(channels) // block)
    block *= warps
    chunk = min(chunk, next_power_of_2(length))
    programs = resident * (multiprocessors(target) or 100) // warps
    return Config(segment_size(batch * -(-channels // block), length, chunk, programs), chunk, block, warps)


def forward_heuristic(call: SelectiveScanCall, target: Target) -> Config:
    """The fastest on an H100: shorter chunks wait more, twice the channels with fewer tokens too."""
    return _config(call, target, 16, 8, 1, 16)


def backward_heuristic(call: SelectiveScanCall, target: Target) -> Config:
    """The fastest on an H100: twice the channels of a warp are nearly twice as slow, as states leave registers. For 10.0 Triton 3.6
    keeps fewer tokens in registers.

    Not timed: several warps for states of more than 16 numbers, which keep blocks of 16 channels, and partial sums as few.
    """
    chunk = 4 if target.capability is not None and target.capability >= (10, 0) else 8
    warps = min(max(next_power_of_2(call.A.shape[2]) // 16, 1), 8)
    return _config(call, target, chunk, 8, warps, 16)


def forward_space(call: SelectiveScanCall, target: Target) -> list[Config]:
    tries = itertools.product((8, 16, 32), (4, 8, 16), (1,), (8, 16, 32))
    return list(dict.fromkeys([forward_heuristic(call, target), *(_config(call, target, *x) for x in tries)]))


def backward_space(call: SelectiveScanCall, target: Target) -> list[Config]:
    tries = itertools.product((4, 8), (4, 8), (1, 2, 4), (8, 16))
    return list(dict.fromkeys([backward_heuristic(call, target), *(_config(call, target, *x) for x in tries)]))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
