"""Configs of `mean_pooling`."""

from __future__ import annotations

import dataclasses
import itertools
import math

from ejkernel.operations.mean_pooling.interface import MeanPoolingCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._rows.config import SHARED_MEMORY, itemsize, warps_for


@renamed_knobs(chunk="chunk_size")
@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    chunk_size: most tokens of one program, all of one sequence.
    tokens: tokens of one step; a power of two.
    block: channels of one program; a power of two.
    num_warps: warps per program.
    num_stages: pipeline stages; above 1 tiles are staged in shared memory.
    """

    chunk_size: int
    tokens: int
    block: int
    num_warps: int
    num_stages: int = 1


def channels(call: MeanPoolingCall) -> int:
    """Channels of a token, of all heads."""
    return math.prod(call.x.shape[2:])


def forward_heuristic(call: MeanPoolingCall, target: Target) -> Config:
    """Four elements per thread and no pipelining: many warps hide the load latency, as a sum needs few registers."""
    block = min(next_power_of_2(channels(call)), 1024)
    tokens = max(1, min(64, 2048 // block))
    return Config(256, tokens, block, warps_for(tokens * block, 4))


def backward_heuristic(call: MeanPoolingCall, target: Target) -> Config:
    block = min(next_power_of_2(channels(call)), 2048)
    tokens = max(1, min(64, 4096 // block))
    return Config(64, tokens, block, warps_for(tokens * block, 16))


def forward_space(call: MeanPoolingCall, target: Target) -> list[Config]:
    found = _space(call, (128, 256, 512), (1024, 2048), (2048, 4096), (4, 16), (1, 3))
    return _with(forward_heuristic(call, target), found)


def backward_space(call: MeanPoolingCall, target: Target) -> list[Config]:
    """Backward only writes; there is nothing to pipeline."""
    found = _space(call, (16, 64), (256, 1024, 2048, 4096), (4096, 8192), (8, 16, 32), (1,))
    return _with(backward_heuristic(call, target), found)


def _space(
    call: MeanPoolingCall,
    chunks: tuple[int, ...],
    blocks: tuple[int, ...],
    steps: tuple[int, ...],
    per_thread: tuple[int, ...],
    stages: tuple[int, ...],
) -> list[Config]:
    """Configs with steps of `steps` elements, `per_thread` of them per thread."""
    widest = next_power_of_2(channels(call))
    found = [
        Config(chunk, tokens, block, warps_for(tokens * block, elements), stage)
        for chunk, block, step, elements, stage in itertools.product(
            chunks, sorted({min(widest, block) for block in blocks}), steps, per_thread, stages
        )
        if (tokens := max(1, min(64, step // block))) <= chunk
        if stage == 1 or stage * tokens * block * itemsize(call.x) <= SHARED_MEMORY
    ]
    return list(dict.fromkeys(found))


def _with(chosen: Config, found: list[Config]) -> list[Config]:
    return found if chosen in found else [chosen, *found]


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
