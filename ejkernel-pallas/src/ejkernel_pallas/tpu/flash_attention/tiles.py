"""The list of tiles that a grid visits, with their order and masks, prefetched to SMEM.

An entry packs the owner's block index (whose result the tile updates), the other block's index and flags into 31 bits. If
indices determine the visible tiles there is one list, computed at trace time; if segments, positions or a mask do, the device
computes a list per batch member, with visible tiles first. Idle repetitions of the last tile follow, which copy nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel.operations.flash_attention.pairs import tile_visibility

FULL, PARTIAL, FIRST, LAST = 1, 2, 4, 8
"""Tile without masked entries; tile that may have some; the owner's first tile; its last. Neither FULL nor PARTIAL: fully
masked."""
MAX_OWNERS, MAX_OTHERS = 1 << 14, 1 << 13
_OWNER, _OTHER = 17, 4
_LARGEST = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Attributes:
    packed: int32 `[lists * length]`.
    length: tiles of one list.
    per_batch: whether every batch member has its own list.
    visited: tiles of one list that are computed; an upper bound if arrays determine them.
    owners: copies of owner blocks per list.
    others: copies of other blocks per list.
    kinds: which of FULL and PARTIAL may occur; kernels are specialised for these.
    """

    packed: Any
    length: int
    per_batch: bool
    visited: int
    owners: int
    others: int
    kinds: int = FULL | PARTIAL

    def branches(self, packed: Any, add: Callable[[bool], None]) -> None:
        """In a kernel: process the tile, with a mask if it is PARTIAL."""
        for kind, masked in ((FULL, False), (PARTIAL, True)):
            if self.kinds & kind:
                pl.when((packed & kind) != 0)(functools.partial(add, masked))

    def at(self, packed: Any, batch: Any, step: Any) -> Any:
        """Load the packed tile of a step."""
        return packed[batch * self.length + step if self.per_batch else step]


def owner_of(tile: Any) -> Any:
    return tile >> _OWNER


def other_of(tile: Any) -> Any:
    return (tile >> _OTHER) & (MAX_OTHERS - 1)


def blocks(length: int, block: int) -> int:
    return -(-length // block)


def tiles_of(
    call: FlashAttentionCall, inputs: FlashAttentionInputs | None, block_q: int, block_k: int, *, by_key: bool = False
) -> Tiles:
    """The list for owners that are blocks of queries or, with `by_key`, blocks of keys. Every owner has at least one tile."""
    xp = jnp if _from_arrays(call) else np
    candidates, every = _index_table(call, block_q, block_k)
    some = candidates
    if xp is jnp:
        assert inputs is not None
        some, every = _array_table(call, inputs, block_q, block_k)
    if by_key:
        candidates, some, every = np.swapaxes(candidates, 1, 2), xp.swapaxes(some, 1, 2), xp.swapaxes(every, 1, 2)
    owner, other = (index.astype(np.int32) for index in np.nonzero(_with_every_owner(candidates[0])))
    some, every = some[:, owner, other], every[:, owner, other]
    if xp is jnp:
        return _compacted(owner, other, some, every)
    first, last = _ends(owner, np)
    packed = _packed(owner, other, _flags(some, every, first, last, np))
    kinds = (FULL if (some & every).any() else 0) | (PARTIAL if (some & ~every).any() else 0)
    return Tiles(packed, len(owner), False, int(some.sum()), _runs(owner), _runs(other), kinds)


def _runs(index: Any) -> int:
    """Number of copies of a block with this index sequence: one per change."""
    return 1 + int(np.count_nonzero(index[1:] != index[:-1]))


def _from_arrays(call: FlashAttentionCall) -> bool:
    """Whether arrays determine the visible tiles."""
    given = (call.query_positions, call.key_positions, call.query_segments, _shared_mask(call))
    return any(spec is not None for spec in given)


def list_length(call: FlashAttentionCall, block_q: int, block_k: int, *, by_key: bool = False) -> int:
    """Entries of all lists of a call, without their arrays."""
    if not call.query.size or not call.key.size:
        return 0
    table = _index_table(call, block_q, block_k)[0][0]
    lists = call.query.shape[0] if _from_arrays(call) else 1
    return lists * int(_with_every_owner(table.T if by_key else table).sum())


def _shared_mask(call: FlashAttentionCall) -> Any:
    """The dense mask if all heads share it: it can exclude whole tiles."""
    mask = call.mask
    return mask if mask is not None and mask.shape[1] == 1 and min(mask.shape[2:]) > 1 else None


def _with_every_owner(table: Any) -> Any:
    """A fully masked owner keeps one tile, which writes its result."""
    table = table.copy()
    table[~table.any(1), 0] = True
    return table


def _ends(owner: Any, xp: Any) -> tuple[Any, Any]:
    """First and last tiles of owners in lists `[..., length]`."""
    changes = owner[..., 1:] != owner[..., :-1]
    edge = xp.ones((*owner.shape[:-1], 1), bool)
    return xp.concatenate([edge, changes], axis=-1), xp.concatenate([changes, edge], axis=-1)


def _flags(some: Any, every: Any, first: Any, last: Any, xp: Any) -> Any:
    return xp.where(some, xp.where(every, FULL, PARTIAL), 0) + xp.where(first, FIRST, 0) + xp.where(last, LAST, 0)


def _packed(owner: Any, other: Any, flags: Any) -> Any:
    return (flags + (owner << _OWNER) + (other << _OTHER)).astype(np.int32).reshape(-1)


def _compacted(owner: Any, other: Any, some: Any, every: Any) -> Tiles:
    """Lists `[b, length]` with the visible tiles in front; an owner without any keeps its first candidate."""
    length = len(owner)
    alone = _ends(owner, np)[0][None] & (_counts(some, owner)[:, owner] == 0)
    keep = some | alone
    order = jnp.argsort(~keep, axis=1, stable=True)
    dropout_factor = jnp.sum(keep, axis=1, keepdims=True, dtype=jnp.int32)
    place = np.arange(length, dtype=np.int32)[None]
    order = jnp.where(place < dropout_factor, order, jnp.take_along_axis(order, dropout_factor - 1, axis=1))
    owners, others = jnp.asarray(owner)[order], jnp.asarray(other)[order]
    visible, whole = (jnp.take_along_axis(table, order, axis=1) for table in (some, every))
    first, last = _ends(owners, jnp)
    flags = _flags(visible, whole, first, last | (place == dropout_factor - 1), jnp)
    return Tiles(
        _packed(owners, others, jnp.where(place < dropout_factor, flags, 0)), length, True, length, _runs(owner), length
    )


def _counts(some: Any, owner: Any) -> Any:
    """Visible tiles of every owner, `[lists, owners]`."""
    return jnp.zeros((some.shape[0], int(owner.max()) + 1), jnp.int32).at[:, owner].add(some.astype(jnp.int32))


def _elementwise(call: FlashAttentionCall) -> bool:
    """Whether every tile needs a mask."""
    return call.bias is not None or call.mask is not None


def _complete(call: FlashAttentionCall, block_q: int, block_k: int) -> Any:
    """Tiles without out-of-bounds entries, `[1, nq, nk]`."""
    ends = []
    for length, block in ((call.query.shape[1], block_q), (call.key.shape[1], block_k)):
        ends.append(np.arange(blocks(length, block)) < length // block)
    return ends[0][None, :, None] & ends[1][None, None] & (not _elementwise(call))


def _index_ends(length: int, block: int, offset: int) -> tuple[Any, Any]:
    start = np.arange(0, length, block, dtype=np.int64)[None]
    return start + offset, np.minimum(start + block, length) - 1 + offset


def _index_table(call: FlashAttentionCall, block_q: int, block_k: int) -> tuple[Any, Any]:
    """By indices: whether a tile may have visible entries, and whether all are; `[1, nq, nk]`."""
    complete = _complete(call, block_q, block_k)
    if call.query_positions is not None or call.key_positions is not None:
        return np.ones(complete.shape, bool), np.zeros(complete.shape, bool)
    q_low, q_high = _index_ends(call.query.shape[1], block_q, call.query_offset)
    k_low, k_high = _index_ends(call.key.shape[1], block_k, 0)
    ends = (q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None])
    some, every = tile_visibility(call, *ends, np)
    return some, every & complete


def _array_table(call: FlashAttentionCall, inputs: FlashAttentionInputs, block_q: int, block_k: int) -> tuple[Any, Any]:
    """By segments, positions and the mask, likewise; `[b, nq, nk]`."""
    batch, queries = call.query.shape[:2]
    keys = call.key.shape[1]
    q_low, q_high = _position_ends(inputs.query_positions, queries, block_q, call.query_offset)
    k_low, k_high = _position_ends(inputs.key_positions, keys, block_k, 0)
    some, every = tile_visibility(call, q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None], jnp)
    every = every & _complete(call, block_q, block_k)
    if inputs.query_segments is not None:
        own, other = _segment_ends(inputs.query_segments, block_q), _segment_ends(inputs.key_segments, block_k)
        own, other = tuple(end[:, :, None] for end in own), tuple(end[:, None] for end in other)
        some = some & (own[0] <= other[1]) & (other[0] <= own[1])
        every = every & (own[2] == own[1]) & (other[2] == other[1]) & (own[1] == other[1]) & (own[2] >= 0)
    if _shared_mask(call) is not None:
        pads = ((0, 0), (0, -queries % block_q), (0, -keys % block_k))
        parts = jnp.pad(inputs.mask[:, 0], pads).reshape(
            inputs.mask.shape[0], blocks(queries, block_q), block_q, blocks(keys, block_k), block_k
        )
        some = some & jnp.any(parts, axis=(2, 4))
    shape = (batch, blocks(queries, block_q), blocks(keys, block_k))
    return jnp.broadcast_to(some, shape), jnp.broadcast_to(every, shape)


def _parts(array: Any, block: int, mode: str, **options: Any) -> Any:
    """`[b, n]` as `[b, blocks, block]`."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % block)), mode=mode, **options)
    return padded.reshape(array.shape[0], -1, block)


def _position_ends(positions: Any, length: int, block: int, offset: int) -> tuple[Any, Any]:
    """Smallest and largest position of each block, `[b?, blocks]`."""
    if positions is None:
        low, high = _index_ends(length, block, offset)
        return jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)
    parts = _parts(positions, block, "edge")
    return parts.min(-1), parts.max(-1)


def _segment_ends(segments: Any, block: int) -> tuple[Any, Any, Any]:
    """Smallest segment without padding, largest, and smallest with padding, of each block."""
    parts = _parts(segments, block, "constant", constant_values=-1)
    return jnp.where(parts < 0, _LARGEST, parts).min(-1), parts.max(-1), parts.min(-1)
