"""Tiles, warps and programs of the launches, from the config and the recurrence that is run."""

from __future__ import annotations

from typing import Any

from ejkernel_triton._blocks import dot_block
from ejkernel_triton.linear_recurrence.config import Config
from ejkernel_triton.linear_recurrence.params import RecurrenceParams
from ejkernel_triton.linear_recurrence.problem import Problem
from ejkernel_triton.linear_recurrence.segments import Segments

_SUMMED_HEADS = 16
_ENOUGH_PROGRAMS = 512
"""So many are left where programs run several heads: a large device runs two or more on each of up to 148 multiprocessors."""
_CHUNK_STATE_ROWS = 64
"""State rows of one program where the states of all chunks are stored."""
_LEAST_CHUNKS = 8
"""Of a segment, whose states are computed once more."""


def value_block(params: RecurrenceParams, config: Config) -> int:
    """Value channels of one program."""
    return min(config.block_v, dot_block(params.channels))


def value_blocks(params: RecurrenceParams, config: Config) -> int:
    """Programs that share the value channels of one head."""
    return -(-params.channels // value_block(params, config))


def recurrence_warps(params: RecurrenceParams, config: Config) -> int:
    """Warps of a program that runs over tokens, at most as many as the rows of a tile allow."""
    return config.num_warps if value_block(params, config) >= 128 else min(config.num_warps, 4)


def transposes_tiles(params: RecurrenceParams, config: Config) -> bool:
    """Whether tiles are transposed, with value channels as rows: for eight warps, there are more of them than tokens of a chunk."""
    return params.decay in ("none", "scalar") and recurrence_warps(params, config) == 8


def score_levels(config: Config) -> int:
    """How often a chunk is halved where decays are per channel."""
    return config.chunk_size.bit_length() - 1


def summed_heads(heads: int) -> int:
    """Heads of one program that only sums log decays or their gradients."""
    return min(_SUMMED_HEADS, dot_block(heads))


def recurrence_constants(problem: Problem, params: RecurrenceParams, segments: Segments) -> dict[str, Any]:
    """Launch options of a kernel whose programs loop over the chunks of a segment."""
    return chunk_constants(problem, params) | {
        "SEGMENT": segments.size,
        "num_warps": recurrence_warps(params, problem.config),
    }


def chunk_constants(problem: Problem, params: RecurrenceParams) -> dict[str, Any]:
    """Launch options of a kernel whose programs take one chunk."""
    config = problem.config
    return {
        "R": params,
        "CHUNK": config.chunk_size,
        "BLOCK_K": dot_block(params.width),
        "BLOCK_V": value_block(params, config),
        "FULL_CHUNKS": problem.whole_chunks,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def heads_per_program(problem: Problem, params: RecurrenceParams, segments: Segments) -> int:
    """Neighbouring heads that share one array, whose gradients one program sums."""
    programs = problem.batch * segments.number * problem.heads * value_blocks(params, problem.config)
    return _run_by_one(problem.heads // params.own_heads, programs)


def chunk_gradient_programs(problem: Problem, chunks: Segments) -> tuple[int, int]:
    """Programs that compute the gradients of all chunks at once, and how many heads or value blocks each of them sums."""
    blocks = value_blocks(problem.params, problem.config)
    programs = problem.batch * chunks.number * problem.heads * blocks
    members = _run_by_one(problem.heads // problem.params.key_heads * blocks, programs)
    return programs // members, members


def _run_by_one(group: int, programs: int) -> int:
    """As many of a group as one program can run one after the other and leave the device enough of `programs`."""
    return max(
        count for count in range(1, group + 1) if group % count == 0 and (count == 1 or programs // count >= _ENOUGH_PROGRAMS)
    )


def chunk_state_rows(params: RecurrenceParams) -> int:
    """State rows of one program where the states of all chunks are stored."""
    return _CHUNK_STATE_ROWS if params.width % _CHUNK_STATE_ROWS == 0 else dot_block(params.width)


def chunk_state_programs(params: RecurrenceParams, config: Config) -> int:
    """Programs of one state where the states of all chunks are stored."""
    return value_blocks(params, config) * -(-params.width // chunk_state_rows(params))


def chunks_per_segment(problem: Problem) -> int:
    """Chunks of a segment where the states of all chunks are stored and heads are too few to fill a large device; 0, for whole
    sequences, where they are enough."""
    programs = problem.batch * problem.heads * chunk_state_programs(problem.params, problem.config)
    chunks = -(-problem.length // problem.config.chunk_size)
    segment = -(-chunks // -(-_ENOUGH_PROGRAMS // programs))
    return max(segment, _LEAST_CHUNKS) if programs < _ENOUGH_PROGRAMS // 2 and chunks > _LEAST_CHUNKS else 0
