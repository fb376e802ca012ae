"""Configs of `native_sparse_selection`."""

from __future__ import annotations

import dataclasses

import numpy as np

from ejkernel.operations.native_sparse_selection.interface import NativeSparseSelectionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._capability import shared_memory_limit

_SPARE = 4096
"""Bytes of shared memory of barriers and of reductions."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block_q: queries of a program that scores, at least 16.
    block_n: blocks that it scores, at least 16.
    num_warps: of that program.
    num_stages: tiles of queries, one for each head of the group, that are on their way to it.
    per_thread: scores of a thread of a program that selects.
    """

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int
    per_thread: int = 16


_HALF = (
    Config(64, 128, 4, 2),
    Config(64, 128, 4, 2, per_thread=8),
    Config(64, 128, 4, 3),
    Config(64, 64, 4, 2),
    Config(64, 64, 4, 3),
    Config(128, 128, 8, 2),
    Config(128, 128, 8, 3),
    Config(128, 64, 8, 2),
    Config(32, 64, 4, 2),
)
_FLOAT32 = (Config(32, 32, 8, 2), Config(32, 32, 4, 2), Config(16, 32, 4, 1), Config(16, 16, 4, 1))
"""Without tensor cores larger products do not stay in registers."""


def heuristic(call: NativeSparseSelectionCall, target: Target) -> Config:
    """Wide tiles of blocks, since each reads the queries again, of which two programs fit into a multiprocessor: exponentials take
    as long as products, and those of one program overlap those of the other."""
    return search_space(call, target)[0]


def search_space(call: NativeSparseSelectionCall, target: Target) -> list[Config]:
    candidates = _FLOAT32 if call.query.dtype == "float32" else _HALF
    most = shared_memory_limit(target)
    fitting = [one for one in candidates if _shared(call, one) <= most]
    return list(dict.fromkeys(_cut(call, one) for one in fitting))


def _cut(call: NativeSparseSelectionCall, config: Config) -> Config:
    """Tiles no larger than the lengths."""
    block_q = min(config.block_q, dot_block(call.query.shape[1]))
    block_n = min(config.block_n, dot_block(call.means.shape[1]))
    warps = config.num_warps if block_q * block_n >= config.block_q * config.block_n else min(config.num_warps, 4)
    return dataclasses.replace(config, block_q=block_q, block_n=block_n, num_warps=warps)


def _shared(call: NativeSparseSelectionCall, config: Config) -> int:
    """Bytes of the means, and of the tiles of queries on their way."""
    row = dot_block(call.query.shape[3]) * np.dtype(call.query.dtype).itemsize
    return row * (config.block_n + config.num_stages * config.block_q) + _SPARE


FORWARD = ConfigSpace(Config, heuristic, search_space)
