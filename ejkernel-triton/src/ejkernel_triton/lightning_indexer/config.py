"""Configs of `lightning_indexer`."""

from __future__ import annotations

import dataclasses

import numpy as np

from ejkernel.operations.lightning_indexer.interface import LightningIndexerCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._capability import multiprocessors, shared_memory_limit

_HEADS = 64
"""Most heads of one product."""


_SPARE = 4096
"""Bytes of shared memory of barriers, weights and sums."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block_k: tokens of a program that scores, at least 16.
    block_q: queries of that program, one after the other.
    num_warps: of that program.
    num_stages: tiles of heads that are on their way to it.
    per_thread: scores of a thread of a program that selects.
    """

    block_k: int
    block_q: int
    num_warps: int
    num_stages: int
    per_thread: int = 32


def heads_at_once(call: LightningIndexerCall) -> int:
    """Heads of one product, which are its columns."""
    return min(_HEADS, dot_block(call.query.shape[2]))


def channels_at_once(call: LightningIndexerCall) -> int:
    """Channels of one product, of which numbers of one byte need 32."""
    return max(dot_block(call.query.shape[3]), 32 if np.dtype(call.query.dtype).itemsize == 1 else 0)


_SPACE = (
    Config(256, 32, 8, 2),
    Config(256, 32, 8, 2, per_thread=16),
    Config(256, 32, 8, 3),
    Config(256, 8, 8, 2),
    Config(128, 32, 8, 2),
    Config(128, 32, 8, 3),
    Config(128, 32, 4, 2),
    Config(128, 32, 4, 3),
    Config(128, 32, 4, 3, per_thread=16),
    Config(64, 32, 4, 3),
)
_FLOAT8 = (Config(128, 32, 4, 3), *(one for one in _SPACE if one != Config(128, 32, 4, 3)))
"""Wider tiles are slower than the first."""

_FLOAT32 = (Config(64, 16, 16, 2), Config(32, 16, 8, 2), Config(16, 16, 4, 2))
"""Eight products of each thread: without tensor cores more do not stay in registers."""


def heuristic(call: LightningIndexerCall, target: Target) -> Config:
    """Wide tiles of tokens, since each reads the queries again, of which two programs fit into a multiprocessor."""
    return search_space(call, target)[0]


def search_space(call: LightningIndexerCall, target: Target) -> list[Config]:
    candidates = {1: _FLOAT8, 2: _SPACE, 4: _FLOAT32}[np.dtype(call.query.dtype).itemsize]
    widest = max(next_power_of_2(call.key.shape[1]), min(one.block_k for one in candidates))
    most = shared_memory_limit(target)
    fitting = [one for one in candidates if one.block_k <= widest and _shared(call, one) <= most]
    return list(dict.fromkeys(dataclasses.replace(one, block_q=_queries(call, target, one)) for one in fitting))


def _queries(call: LightningIndexerCall, target: Target, config: Config) -> int:
    """As many as leave two programs for every multiprocessor."""
    batch, queries = call.query.shape[:2]
    tiles = max(batch, 1) * -(-max(call.key.shape[1], 1) // config.block_k)
    wanted = tiles * queries // (2 * (multiprocessors(target) or 132))
    return max(1, min(config.block_q, next_power_of_2(wanted + 1) // 2, next_power_of_2(queries)))


def _shared(call: LightningIndexerCall, config: Config) -> int:
    """Bytes of the tile of tokens, and of the heads' tiles on their way."""
    row = channels_at_once(call) * np.dtype(call.query.dtype).itemsize
    return row * (config.block_k + config.num_stages * heads_at_once(call)) + _SPARE


FORWARD = ConfigSpace(Config, heuristic, search_space)
