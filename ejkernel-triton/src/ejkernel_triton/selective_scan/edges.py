"""Where sequences end inside of rows, as arrays that may be traced: a chunk without edges runs as one of a whole row does."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.selective_scan.interface import SelectiveScanCall, SelectiveScanInputs
from ejkernel_triton.selective_scan.params import Params

RESET = 1
"""Bits of a token's mark: the state before it is 0, or that of its sequence;"""
FIRST = 2
"""it is the first of a packed sequence;"""
LAST = 4
"""the last of one;"""
OUTSIDE = 8
"""of none. The bits above are the sequence's number among those of all rows."""
BITS = 4
EDGES = 1
"""Bits of a chunk's mark: a token of it has one of the bits above;"""
REACHED = 2
"""no token of its segment before it is a reset."""


class Edges(NamedTuple):
    """marks `[b, chunks, 1 + chunk_size]`: of each chunk, and of its tokens.

    reach `[b, segments, 2]`: the last segment before each that has a reset, -1 if none does, and the first after it, the number of
    segments if none does.

    empty: bool `[1 or b, s]`, which packed sequences have no tokens; None without packed sequences.
    """

    marks: Any
    reach: Any
    empty: Any


def edges_of(call: SelectiveScanCall, inputs: SelectiveScanInputs, params: Params) -> Edges:
    """The edges of a call that has some; its length is not 0, nor is its number of packed sequences."""
    batch, length, _ = call.x.shape
    bits, empty = _resets(inputs.resets), None
    if inputs.cu_seqlens is not None:
        packed, empty = _packed(inputs.cu_seqlens, batch, length)
        bits = packed if inputs.resets is None else packed | bits
    segments = -(-length // params.segment_size)
    bits = jnp.pad(jnp.broadcast_to(bits, (batch, length)), ((0, 0), (0, segments * params.segment_size - length)))
    chunks = bits.reshape(batch, segments, -1, params.chunk_size)
    number = jnp.arange(chunks.shape[2], dtype=jnp.int32)[None, None]
    has_reset = jnp.any(chunks & RESET != 0, axis=3)
    first_reset = jnp.min(jnp.where(has_reset, number, chunks.shape[2]), axis=2, keepdims=True)
    has_edge = jnp.any(chunks & (RESET | FIRST | LAST | OUTSIDE) != 0, axis=3)
    chunk = jnp.where(has_edge, EDGES, 0) | jnp.where(number <= first_reset, REACHED, 0)
    marks = jnp.concatenate([chunk.astype(jnp.int32)[..., None], chunks], axis=3)
    marks = marks.reshape(batch, -1, 1 + params.chunk_size)[:, : -(-length // params.chunk_size)]
    return Edges(marks, _reach(first_reset[..., 0] < chunks.shape[2]), empty)


def _resets(resets: Any) -> Any:
    return None if resets is None else jnp.where(resets, jnp.int32(RESET), jnp.int32(0))


def _packed(bounds: Any, batch: int, length: int) -> tuple[Any, Any]:
    """Marks of tokens `[b, t]` and which sequences are empty."""
    count = bounds.shape[1] - 1
    tokens = jnp.arange(length, dtype=jnp.int32)
    bounds = jax.lax.cummax(jnp.clip(bounds, 0, length), axis=1)
    find = jax.vmap(lambda row: jnp.searchsorted(row, tokens, side="right", method="scan_unrolled"))
    owner = find(bounds).astype(jnp.int32) - 1
    differ = owner[:, 1:] != owner[:, :-1]
    edge = jnp.ones_like(owner[:, :1], bool)
    begins, ends = jnp.concatenate([edge, differ], axis=1), jnp.concatenate([differ, edge], axis=1)
    inside = (owner >= 0) & (owner < count)
    number = jnp.arange(batch, dtype=jnp.int32)[:, None] * count + jnp.where(inside, owner, 0)
    bits = jnp.where(begins, RESET, 0) | jnp.where(begins & inside, FIRST, 0) | jnp.where(ends & inside, LAST, 0)
    bits = (bits | jnp.where(inside, 0, OUTSIDE)).astype(jnp.int32)
    return number << BITS | bits, bounds[:, 1:] == bounds[:, :-1]


def _reach(has_reset: Any) -> Any:
    """`Edges.reach` of segments `[b, segments]`."""
    count = has_reset.shape[1]
    number = jnp.arange(count, dtype=jnp.int32)
    here, number = number[None, :, None], number[None, None, :]
    before, after = (has_reset[:, None, :] & found for found in (number < here, number > here))
    return jnp.stack([jnp.max(jnp.where(before, number, -1), axis=2), jnp.min(jnp.where(after, number, count), axis=2)], axis=2)
