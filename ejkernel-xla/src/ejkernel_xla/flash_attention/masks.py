"""Tiles of the score matrix to visit, and the masks of their entries.

Static masks (causal, window, chunk, prefix over indices) skip fully masked tiles at trace time; masks that depend on arrays
(masks, segments, positions) are applied inside the tiles. Block-sparse attention computes its tile lists on the device instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.operations.flash_attention.pairs import tile_visibility
from ejkernel.operations.flash_attention.score_functions.bounds import static_tiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles to visit, query block by query block.

    A last block that would pass the end starts earlier instead, so that nothing is padded; `first_query` and `first_key` mark
    the entries that it does not share with the previous block.

    Attributes:
        block_q, block_k: size of every tile.
        tiles: int32 `[n, 5]`, or `[n, 6]` on the device: the fields of `Tile`.
        single_tile: whether one tile is the whole matrix.
        structured: whether some visited tile has entries that the static mask removes.
        query_tail, key_tail: the last block overlaps the one before it.
        masked: whether some entry of the score matrix may be masked.
        count: dynamic number of tiles to visit; None = all.
        predicate: a mask function of positions that broadcast together.
    """

    block_q: int
    block_k: int
    tiles: Any
    single_tile: bool
    structured: bool
    query_tail: bool
    key_tail: bool
    masked: bool
    count: Any = None
    predicate: Callable[[Any, Any], Any] | None = None

    def visit(self, step: Callable[[Any, Tile], Any], carry: Any) -> Any:
        """`carry = step(carry, tile)` for every tile, in order."""
        if self.count is not None:
            return jax.lax.fori_loop(0, self.count, lambda i, carry: step(carry, Tile.of(self.tiles[i])), carry)
        if not len(self.tiles):
            return carry
        return jax.lax.scan(lambda carry, row: (step(carry, Tile.of(row)), None), carry, self.tiles)[0]


class Tile(NamedTuple):
    """Where one tile is, as Python or traced integers: start of its queries and keys, the first query and key that belong to it,
    1 where a new query block begins, and 1 if no mask hides any of it (None if that is not known tile by tile)."""

    query_start: Any
    key_start: Any
    first_query: Any
    first_key: Any
    begins: Any
    full: Any = None

    @classmethod
    def of(cls, row: Any) -> Tile:
        """From a row of `Plan.tiles`."""
        return cls(*(row[i] for i in range(row.shape[0])))


def is_masked(call: FlashAttentionCall) -> bool:
    """Whether any entry of the score matrix may be masked."""
    said = (call.bias, call.mask, call.query_segments, call.key_segments, call.score_mod, call.mask_mod)
    return is_structured(call) or any(one is not None for one in said)


def is_structured(call: FlashAttentionCall) -> bool:
    """Whether visibility depends on positions."""
    return call.causal or call.window is not None or call.chunk_size is not None


def plan(call: FlashAttentionCall, block_q: int, block_k: int) -> Plan:
    """The tiles that this call needs; `block_q` and `block_k` are cut to the lengths."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    if 0 in (*call.query.shape[:3], keys):
        return Plan(block_q, block_k, np.zeros((0, 5), np.int32), False, False, False, False, is_masked(call))
    block_q, block_k = min(block_q, queries), min(block_k, keys)
    first_query, query_start = _blocks(queries, block_q)
    first_key, key_start = _blocks(keys, block_k)
    if call.query_positions is not None or call.key_positions is not None:
        some = np.ones((len(query_start), len(key_start)), bool)
        every = np.full_like(some, not is_structured(call))
    else:
        low, high = query_start[:, None] + call.query_offset, query_start[:, None] + call.query_offset + block_q - 1
        some, every = tile_visibility(call, low, high, key_start[None], key_start[None] + block_k - 1, np)
    if call.mask_mod is not None and call.query_index is None and call.key_index is None:
        index = tuple(
            (start, start + block - 1) for start, block in ((query_start[:, None], block_q), (key_start[None], block_k))
        )
        if (found := static_tiles(call.mask_mod, *index)) is not None:
            some = some & np.broadcast_to(found[0], some.shape)
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
        is_masked(call),
    )


def _blocks(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(0, length, block)
    return first, np.minimum(first, length - block)


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
