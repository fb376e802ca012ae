"""Configs of `native_sparse_attention`: tile sizes, warps and pipeline stages."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._capability import shared_memory_limit


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    block_k: keys of a step; a power of two.
    num_warps: warps per program.
    num_stages: pipeline stages of the loop over steps.
    """

    block_k: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    query_*: of the dQ kernel, as in forward.
    key_block_k: keys whose gradients a program of the dK/dV kernel owns; a power of two.
    key_rows: query heads of one of its steps; a power of two.
    key_chunk: query heads after which another program takes over.
    """

    query_block_k: int
    query_num_warps: int
    query_num_stages: int
    key_block_k: int
    key_rows: int
    key_chunk: int
    key_num_warps: int
    key_num_stages: int


_WIDE = 128
"""Head size from which on tiles have to be smaller."""


def _largest_step(call: NativeSparseAttentionCall) -> int:
    """Keys of a step: no more than a query's list holds, and float32 has small tiles, as it is multiplied without tensor cores."""
    if call.query.dtype == "float32":
        return 16
    return min(dot_block(call.block_indices.shape[3] * min(call.block_size, call.query.shape[1])), 128)


def _half(call: NativeSparseAttentionCall) -> bool:
    return call.query.dtype != "float32"


def _widths(call: NativeSparseAttentionCall) -> int:
    """Bytes of a key and its value."""
    return (dot_block(call.query.shape[3]) + dot_block(call.value.shape[3])) * (2 if _half(call) else 4)


def _fits(call: NativeSparseAttentionCall, target: Target, rows: int, stages: int, held: int) -> bool:
    """Whether `rows` of both operands in each stage, and `held` rows besides, fit into shared memory, with what products exchange."""
    return (rows * max(stages, 1) + held) * _widths(call) + 32 * 1024 <= shared_memory_limit(target)


_FORWARD = ((64, 2, 3), (64, 4, 3), (64, 4, 2), (64, 1, 2), (64, 2, 2), (32, 2, 3), (32, 1, 3), (32, 4, 3), (128, 4, 2))
_QUERY = ((64, 4, 2), (64, 2, 2), (64, 4, 3), (32, 2, 3), (32, 4, 3))
_KEY = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 32, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2))


def _wide(call: NativeSparseAttentionCall) -> bool:
    return max(call.query.shape[3], call.value.shape[3]) > _WIDE


def _forward_configs(call: NativeSparseAttentionCall, target: Target) -> list[ForwardConfig]:
    most, found = _largest_step(call), []
    for keys, warps, stages in _FORWARD:
        config = ForwardConfig(min(keys, most), 4 if _wide(call) or not _half(call) else warps, stages)
        if _fits(call, target, config.block_k, stages, 0):
            found.append(config)
    return list(dict.fromkeys(found)) or [ForwardConfig(min(16, most), 4, 1)]


def _key_tile(call: NativeSparseAttentionCall, keys: int) -> int:
    """A tile that is longer than a block is visited by queries that see a part of it."""
    return min(keys, dot_block(min(call.block_size, call.query.shape[1])))


def _backward_configs(call: NativeSparseAttentionCall, target: Target) -> list[BackwardConfig]:
    groups = call.query.shape[2] // call.key.shape[2]
    entries = call.block_indices.shape[1] * call.block_indices.shape[3]
    most, wide, half = _largest_step(call), _wide(call), _half(call)
    queries: list[tuple[int, int, int]] = []
    for keys, warps, stages in _QUERY:
        one = (min(keys, most), 4 if wide or not half else warps, stages)
        if _fits(call, target, one[0], stages, 0):
            queries.append(one)
    tiles: list[tuple[int, int, int, int]] = []
    for keys, rows, warps, stages in _KEY:
        limit = 16 if not half else 32 if wide else 128
        one = (_key_tile(call, min(keys, 64 if half else 16)), min(rows, limit), 8 if wide else warps, stages)
        if keys > 64 and half and not wide:
            one = (_key_tile(call, keys), *one[1:])
        if _fits(call, target, one[1], stages, one[0]):
            tiles.append(one)
    queries = list(dict.fromkeys(queries)) or [(min(16, most), 4, 1)]
    tiles = list(dict.fromkeys(tiles)) or [(16, 16, 4, 1)]
    chunk = 8192
    del groups, entries
    found = [(queries[0], one, chunk) for one in tiles] + [(one, tiles[0], chunk) for one in queries]
    found += [(queries[0], tiles[0], 2048), (queries[0], tiles[0], 32768)]
    made = [BackwardConfig(*query, *one[:2], size, *one[2:]) for query, one, size in found]
    return list(dict.fromkeys(made))


def forward_space(call: NativeSparseAttentionCall, target: Target) -> list[ForwardConfig]:
    return _forward_configs(call, target)


def forward_heuristic(call: NativeSparseAttentionCall, target: Target) -> ForwardConfig:
    return _forward_configs(call, target)[0]


def backward_space(call: NativeSparseAttentionCall, target: Target) -> list[BackwardConfig]:
    return _backward_configs(call, target)


def backward_heuristic(call: NativeSparseAttentionCall, target: Target) -> BackwardConfig:
    return _backward_configs(call, target)[0]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
