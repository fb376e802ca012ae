"""Which blocks of keys each device looks at, and how much of the mask is left in each of them.

After `shift` rotations device i holds the block of device i - shift, modulo the size of the ring. In natural order its keys are
`shift` blocks *behind* the queries (i >= shift) or `size - shift` blocks *ahead* of them (i < shift): two distances that are
known when the program is built, whatever i is. Causal and window masks depend on distances alone, so they stay static.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
LAYOUTS = (CONTIGUOUS, ZIGZAG)
RING, ALL_TO_ALL = "ring", "all_to_all"
STRATEGIES = (RING, ALL_TO_ALL)


class Structure(NamedTuple):
    """The fields of `FlashAttentionCall` that make visibility depend on positions."""

    causal: bool = False
    query_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    prefix: int | None = None

    @classmethod
    def of(cls, call: FlashAttentionCall) -> Structure:
        return cls(*(getattr(call, name) for name in cls._fields))

    @property
    def positional(self) -> bool:
        return self.causal or self.window is not None or self.chunk_size is not None


class Block(NamedTuple):
    """What is left to do in one block: the queries from `first_query` on, the first `keys` keys, and the mask between them.
    `by_position` asks for arrays of positions in the place of indices."""

    structure: Structure
    keys: int
    first_query: int = 0
    by_position: bool = False


class Stage(NamedTuple):
    """Consecutive shifts at which the same is done: `behind` where the block comes from before the queries' own (or is it),
    `ahead` where it comes from after it; None where nothing is visible."""

    first: int
    shifts: int
    behind: Block | None
    ahead: Block | None


def plan(call: FlashAttentionCall, size: int, layout: str) -> tuple[Stage, ...]:
    """The stages of a ring of `size` devices for the call of one shard. Shifts at which no device sees anything are left out."""
    stages: list[Stage] = []
    for shift in range(size):
        behind, ahead = _blocks(call, size, shift, layout)
        if behind is None and ahead is None:
            continue
        last = stages[-1] if stages else None
        if last is not None and last.first + last.shifts == shift and (last.behind, last.ahead) == (behind, ahead):
            stages[-1] = last._replace(shifts=last.shifts + 1)
        else:
            stages.append(Stage(shift, 1, behind, ahead))
    return tuple(stages)


def _blocks(call: FlashAttentionCall, size: int, shift: int, layout: str) -> tuple[Block | None, Block | None]:
    queries, keys = call.query.shape[1], call.key.shape[1]
    structure = Structure.of(call)
    if not structure.positional:
        return Block(Structure(), keys), Block(Structure(), keys)
    by_position = Block(structure._replace(query_offset=0), keys, by_position=True)
    given = call.query_positions is not None or call.key_positions is not None
    if given or queries != keys or call.prefix is not None:
        return by_position, by_position
    if layout == ZIGZAG:
        if structure != Structure(causal=True):
            return by_position, by_position
        return _zigzag_causal(shift, queries)
    behind = _at_distance(structure, call.query_offset + shift * queries, queries)
    ahead = _at_distance(structure, call.query_offset + (shift - size) * queries, queries) if shift else None
    return behind, ahead


def _zigzag_causal(shift: int, length: int) -> tuple[Block | None, Block | None]:
    """Device i holds pieces i and 2 size - 1 - i, in this order: every device has half a block to do at every shift but 0."""
    if shift == 0:
        return Block(Structure(causal=True), length), None
    return Block(Structure(), length // 2), Block(Structure(), length, first_query=length // 2)


def _at_distance(structure: Structure, distance: int, length: int) -> Block | None:
    """The block whose first key is `distance` positions before the first query; both are `length` long."""
    least, most = limits(structure)
    nearest, farthest = distance - (length - 1), distance + length - 1
    if farthest < least or nearest > most:
        return None
    chunk = structure.chunk_size
    if chunk is not None:
        if length % chunk or structure.query_offset:
            return Block(structure._replace(query_offset=0), length, by_position=True)
        return None if distance else Block(structure, length)
    if least <= nearest and farthest <= most:
        return Block(Structure(), length)
    return Block(structure._replace(query_offset=distance), length)


def limits(structure: Structure) -> tuple[float, float]:
    """Least and greatest `query position - key position` of a visible pair, without regard to a prefix."""
    left, right = structure.window or (None, None)
    chunk = math.inf if structure.chunk_size is None else structure.chunk_size - 1
    least = max(0 if structure.causal else -math.inf, -math.inf if right is None else -right, -chunk)
    return least, min(math.inf if left is None else left, chunk)


def positions_of(layout: str, device: Any, size: int, length: int) -> Any:
    """Positions int32 `[length]` in the whole sequence of the tokens that a device (traced) holds."""
    if layout == CONTIGUOUS:
        return device * length + jnp.arange(length, dtype=jnp.int32)
    piece = length // 2
    within = jnp.arange(piece, dtype=jnp.int32)
    return jnp.concatenate([device * piece + within, (2 * size - 1 - device) * piece + within])


def may_see(structure: Structure, inputs: Any) -> Any:
    """Whether positions and segments, which only the running program knows, leave any pair visible; None if all may be.

    Judged by ranges, so a block may be looked at in vain but is never left out wrongly.
    """
    if 0 in (inputs.query.shape[1], inputs.key.shape[1]):
        return None
    conditions: list[Any] = []
    if inputs.query_positions is not None:
        query, key = (_range(array, True) for array in (inputs.query_positions, inputs.key_positions))
        conditions += _by_ranges(structure, query, key)
    if inputs.query_segments is not None:
        query, key = (_range(array, array >= 0) for array in (inputs.query_segments, inputs.key_segments))
        conditions += [query[0] <= key[1], key[0] <= query[1]]
    return None if not conditions else jnp.stack(conditions).all()


def _by_ranges(structure: Structure, query: tuple[Any, Any], key: tuple[Any, Any]) -> Sequence[Any]:
    left, right = structure.window or (None, None)
    found = []
    if structure.causal:
        found.append((key[0] <= query[1]) | (key[0] < (structure.prefix or 0) if structure.prefix else False))
    if left is not None:
        found.append(query[0] - key[1] <= left)
    if right is not None:
        found.append(key[0] - query[1] <= right)
    if structure.chunk_size is not None:
        query, key = (tuple(end // structure.chunk_size for end in ends) for ends in (query, key))
        found += [query[0] <= key[1], key[0] <= query[1]]
    return found


def _range(array: Any, counted: Any) -> tuple[Any, Any]:
    """Least and greatest counted value; an empty range, and so nothing visible, if none is counted."""
    info = jnp.iinfo(array.dtype)
    least = jnp.min(jnp.where(counted, array, info.max))
    return least, jnp.max(jnp.where(counted, array, info.min))
