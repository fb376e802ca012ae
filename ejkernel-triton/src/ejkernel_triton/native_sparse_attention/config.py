"""Configs of `native_sparse_attention`: tile sizes, warps and pipeline stages."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block
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
    key_rows: rows of one of its steps, which are the query heads of the queries that read these keys; a power of two.
    key_chunk: rows of a program; what more a tile of keys has goes to other programs.
    """

    query_block_k: int
    query_num_warps: int
    query_num_stages: int
    key_block_k: int
    key_rows: int
    key_chunk: int
    key_num_warps: int
    key_num_stages: int


_FORWARD = ((64, 1, 2), (32, 1, 3), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3), (32, 2, 3), (128, 4, 2))
_QUERY = ((64, 2, 2), (64, 4, 2), (64, 4, 3), (32, 2, 3))
"""Keys of a step, warps, stages; the first was fastest on an H100. Traffic from L2 limits these kernels."""
_KEY = ((64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3), (128, 64, 8, 2))
"""Keys of a program, rows of a step, warps, stages."""
_WIDE_KEY = ((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 4, 2), (32, 32, 4, 1))
"""For heads above 128: both gradients of a tile are held in registers."""
_CHUNKS = (8192, 2048, 32768)
_EXACT_STEP = ((16, 4, 2), (16, 4, 1))
_EXACT_KEY = ((16, 16, 4, 2), (16, 16, 4, 1))
"""For float32, which is multiplied without tensor cores: larger tiles take minutes to compile."""
_EXCHANGED = 24 * 1024
"""Bytes of shared memory for what warps exchange."""


class _Model:
    """Which tiles suit a call and a target."""

    def __init__(self, call: NativeSparseAttentionCall, target: Target) -> None:
        size, value_size = call.query.shape[3], call.value.shape[3]
        self.block_size = min(call.block_size, max(call.query.shape[1], 1))
        self.listed = call.block_indices.shape[3] * self.block_size
        self.exact, self.wide = call.query.dtype == "float32", max(size, value_size) > 128
        self.row = (dot_block(size) + dot_block(value_size)) * (4 if self.exact else 2)
        self.limit = shared_memory_limit(target)

    def _fits(self, rows: int) -> bool:
        return rows * self.row + _EXCHANGED <= self.limit

    def steps(self, wished: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int]]:
        """Keys, warps and stages of kernels that walk through a query's list; steps are no longer than the list."""
        found: list[tuple[int, int, int]] = []
        for keys, warps, stages in _EXACT_STEP if self.exact else wished:
            keys, warps = min(keys, dot_block(self.listed)), 4 if self.wide else warps
            if self._fits(keys * stages):
                found.append((keys, warps, stages))
        return list(dict.fromkeys(found)) or [(MIN_DOT_SIZE, 4, 1)]

    def tiles(self) -> list[tuple[int, int, int, int]]:
        """Keys, rows, warps and stages of the dK/dV kernel; of a tile longer than a block, each query would see a part."""
        found: list[tuple[int, int, int, int]] = []
        for keys, rows, warps, stages in _EXACT_KEY if self.exact else _WIDE_KEY if self.wide else _KEY:
            keys = min(keys, dot_block(self.block_size))
            if self._fits(keys + rows * stages):
                found.append((keys, rows, warps, stages))
        return list(dict.fromkeys(found)) or [(MIN_DOT_SIZE, MIN_DOT_SIZE, 4, 1)]


def forward_space(call: NativeSparseAttentionCall, target: Target) -> list[ForwardConfig]:
    return [ForwardConfig(*step) for step in _Model(call, target).steps(_FORWARD)]


def backward_space(call: NativeSparseAttentionCall, target: Target) -> list[BackwardConfig]:
    """The best guess, and what differs from it in one of the kernels."""
    model = _Model(call, target)
    steps, tiles, chunk = model.steps(_QUERY), model.tiles(), _CHUNKS[0]
    wished = [
        *((step, tiles[0], chunk) for step in steps),
        *((steps[0], tile, chunk) for tile in tiles),
        *((steps[0], tiles[0], other) for other in _CHUNKS),
    ]
    found = (BackwardConfig(*step, *tile[:2], size, *tile[2:]) for step, tile, size in wished)
    return list(dict.fromkeys(found))


def forward_heuristic(call: NativeSparseAttentionCall, target: Target) -> ForwardConfig:
    return forward_space(call, target)[0]


def backward_heuristic(call: NativeSparseAttentionCall, target: Target) -> BackwardConfig:
    return backward_space(call, target)[0]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
