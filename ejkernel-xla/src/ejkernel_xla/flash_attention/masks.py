"""Which tiles of the score matrix are worth computing, and which entries of a tile are visible.

What is known statically (causal, window, chunk, prefix over plain indices) removes whole tiles before the program is built;
what only arrays know (masks, segments, positions) is applied inside the tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ejkernel.operations.flash_attention.interface import FlashAttentionCall


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles to visit, query block by query block.

    A last block that would pass the end starts earlier instead, so that nothing is padded; the entries that it shares with the
    block before it are told apart by `first_query` and `first_key`.

    Attributes:
        block_q, block_k: size of every tile.
        tiles: int32 `[n, 5]`: start of the queries, start of the keys, first query and first key that belong to the tile, and 1
            where a new query block begins.
        whole: one tile is the whole matrix.
        structured: some visited tile holds entries that the static structure hides.
        query_tail, key_tail: the last block overlaps the one before it.
    """

    block_q: int
    block_k: int
    tiles: np.ndarray
    whole: bool
    structured: bool
    query_tail: bool
    key_tail: bool


def is_masked(call: FlashAttentionCall) -> bool:
    """Whether any entry of the score matrix can be hidden."""
    arrays = (call.bias, call.mask, call.query_segments, call.key_segments)
    return is_structured(call) or any(spec is not None for spec in arrays)


def is_structured(call: FlashAttentionCall) -> bool:
    """Whether visibility depends on positions."""
    return call.causal or call.window is not None or call.chunk_size is not None


def plan(call: FlashAttentionCall, block_q: int, block_k: int) -> Plan:
    """The tiles that this call needs; `block_q` and `block_k` are cut to the lengths."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    if min(call.query.shape[0], call.query.shape[2], queries, keys) == 0:
        return Plan(block_q, block_k, np.zeros((0, 5), np.int32), False, False, False, False)
    block_q, block_k = min(block_q, queries), min(block_k, keys)
    first_query, query_start = _blocks(queries, block_q)
    first_key, key_start = _blocks(keys, block_k)
    if call.query_positions is not None or call.key_positions is not None:
        some = np.ones((len(query_start), len(key_start)), bool)
        every = np.full_like(some, not is_structured(call))
    else:
        low, high = query_start[:, None] + call.query_offset, query_start[:, None] + call.query_offset + block_q - 1
        some, every = _visibility(call, low, high, key_start[None], key_start[None] + block_k - 1)
    row, column = np.nonzero(some)
    begins = np.diff(row, prepend=-1) > 0
    tiles = np.stack([query_start[row], key_start[column], first_query[row], first_key[column], begins], axis=1)
    return Plan(
        block_q,
        block_k,
        tiles.astype(np.int32),
        some.shape == (1, 1) and bool(some.all()),
        not every[some].all(),
        queries % block_q != 0,
        keys % block_k != 0,
    )


def _blocks(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(0, length, block)
    return first, np.minimum(first, length - block)


def _visibility(call: FlashAttentionCall, q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> tuple[np.ndarray, np.ndarray]:
    """Whether a tile of query and key positions (both ends included) has some visible entry, and only visible entries.

    Each constraint is judged alone, so `some` may be true for a tile that only their combination empties.
    """
    shape = np.broadcast_shapes(q_low.shape, k_low.shape)
    some, every = np.ones(shape, bool), np.ones(shape, bool)
    if call.causal:
        prefix = call.prefix or 0
        some &= (k_low <= q_high) | (k_low < prefix)
        every &= k_high <= np.maximum(q_low, prefix - 1)
    left, right = call.window or (None, None)
    if left is not None:
        some &= q_low - k_high <= left
        every &= q_high - k_low <= left
    if right is not None:
        some &= k_low - q_high <= right
        every &= k_high - q_low <= right
    if call.chunk_size is not None:
        first_chunks = q_low // call.chunk_size, k_low // call.chunk_size
        last_chunks = q_high // call.chunk_size, k_high // call.chunk_size
        some &= (last_chunks[0] >= first_chunks[1]) & (first_chunks[0] <= last_chunks[1])
        every &= (first_chunks[0] == last_chunks[0]) & (first_chunks[1] == last_chunks[1])
        every &= first_chunks[0] == first_chunks[1]
    return some, every


def by_position(call: FlashAttentionCall, query: Any, key: Any) -> Any:
    """Visibility by position; the arguments broadcast together. None if positions do not matter."""
    visible = None
    if call.causal:
        visible = key <= query
        if call.prefix is not None:
            visible = visible | (key < call.prefix)
    left, right = call.window or (None, None)
    if left is not None:
        visible = both(visible, query - key <= left)
    if right is not None:
        visible = both(visible, key - query <= right)
    if call.chunk_size is not None:
        visible = both(visible, query // call.chunk_size == key // call.chunk_size)
    return visible


def both(a: Any, b: Any) -> Any:
    """The conjunction of two masks, either of which may be None for all-visible."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
