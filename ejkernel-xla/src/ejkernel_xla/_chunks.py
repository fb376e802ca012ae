"""Splits whole rows or packed sequences into chunks of tokens, which a loop visits in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like


class _Packed(NamedTuple):
    """The chunks of packed sequences, `[1 or b, m]`, and the location of each token.

    sequence: its sequence, n for a chunk without tokens; first, last: whether it begins or ends that sequence; tokens
    `[1 or b, m, c]`: their indices, beyond the end where there is none; place `[1 or b, t]`: of every token among the rows of all
    chunks, beyond the end for tokens outside of every sequence.
    """

    sequence: Any
    first: Any
    last: Any
    tokens: Any
    place: Any


class ChunkLoop:
    """Chunks of `size` tokens. Their number depends on shapes only: one program serves every mix of lengths.

    Attributes:
        size: tokens of a chunk.
        count: how many chunks there are.
        packed: whether sequences are packed; else each row of the batch is one sequence.
    """

    def __init__(self, batch: int, length: int, size: int, *, bounds: Any = None, reverse: bool = False) -> None:
        """Lay out `length` tokens; `bounds` are cumulative lengths `[1 or b, n + 1]` or None; size >= 1."""
        self.batch, self.length, self.size, self.reverse = batch, length, size, reverse
        self.packed = bounds is not None
        busy = min(bounds.shape[1] - 1, length) if self.packed else 1
        self.count = (length - busy) // size + busy if self.packed else -(-length // size)
        if self.packed and busy:
            self._chunks = jax.vmap(self._pack)(bounds)
        elif self.packed:
            self.count = 0

    def _pack(self, bounds: Any) -> _Packed:
        starts, ends = bounds[:-1], bounds[1:]
        chunks_of = -(-(ends - starts) // self.size)
        up_to = jnp.cumsum(chunks_of)
        index = jnp.arange(self.count, dtype=jnp.int32)
        sequence = jnp.sum(index[:, None] >= up_to[None], axis=1, dtype=jnp.int32)
        known = jnp.minimum(sequence, starts.shape[0] - 1)
        rank = index - (up_to - chunks_of)[known]
        busy = sequence < starts.shape[0]
        position = rank[:, None] * self.size + jnp.arange(self.size, dtype=jnp.int32)[None]
        token = ends[known, None] - 1 - position if self.reverse else starts[known, None] + position
        valid = busy[:, None] & (position < (ends - starts)[known, None])
        tokens = jnp.where(valid, token, self.length)

        rows = jnp.arange(self.count * self.size, dtype=jnp.int32)
        place = jnp.full(self.length, self.count * self.size, jnp.int32)
        place = place.at[tokens.reshape(rows.shape)].set(rows, mode="drop")
        return _Packed(sequence, busy & (rank == 0), busy & (rank == chunks_of[known] - 1), tokens, place)

    def prepare(self, array: Any) -> Any:
        """An array `[b, t, ...]` as `piece` reads it."""
        if self.packed or array is None:
            return array
        array = jnp.flip(array, 1) if self.reverse else array
        spare = self.count * self.size - self.length
        return jnp.pad(array, [(0, 0), (0, spare), *[(0, 0)] * (array.ndim - 2)]) if spare else array

    def piece(self, array: Any, step: Any) -> Any:
        """The tokens of one chunk `[b, c, ...]` of a prepared array; anything where there is none."""
        if array is None:
            return None
        if self.packed:
            tokens = jnp.broadcast_to(self._at(self._chunks.tokens, step), (self.batch, self.size))
            return jax.vmap(_rows)(array, tokens)
        return array if self.count == 1 else jax.lax.dynamic_slice_in_dim(array, step * self.size, self.size, axis=1)

    def valid(self, step: Any) -> Any:
        """Which tokens of a chunk exist `[1 or b, c]`; None for all."""
        if self.packed:
            return self._at(self._chunks.tokens, step) < self.length
        if self.count * self.size == self.length:
            return None
        return (step * self.size + jnp.arange(self.size, dtype=jnp.int32) < self.length)[None]

    def restore(self, pieces: Any) -> Any:
        """The pieces of all chunks `[m, b, c, ...]` as one array `[b, t, ...]`; 0 for tokens outside of every sequence."""
        if pieces is None:
            return None
        joined = pieces[0] if self.count == 1 else jnp.moveaxis(pieces, 0, 1)
        joined = joined.reshape(self.batch, self.count * self.size, *pieces.shape[3:])
        if self.packed:
            place = jnp.broadcast_to(self._chunks.place, (self.batch, self.length))
            rows = jax.vmap(_rows)(joined, place)
            return jnp.where(_like(place < joined.shape[1], rows), rows, 0)
        joined = joined[:, : self.length]
        return jnp.flip(joined, 1) if self.reverse else joined

    def begin(self, carried: Any, of_sequences: Any, step: Any) -> Any:
        """A state `[b, ...]` before a chunk: of its sequence, from `[b, n, ...]`, where that begins; else as carried."""
        return self._either(carried, of_sequences, step, first=True)

    def end(self, carried: Any, of_sequences: Any, step: Any) -> Any:
        """The gradient of a state after a chunk: of its sequence where that ends; else as carried."""
        return self._either(carried, of_sequences, step, first=False)

    def _either(self, carried: Any, of_sequences: Any, step: Any, first: bool) -> Any:
        edge = self._flags(first, step)
        sequence = jnp.broadcast_to(self._at(self._chunks.sequence, step), (self.batch,))
        return jnp.where(_like(edge, carried), jax.vmap(_rows)(of_sequences, sequence), carried)

    def forget_before(self, carried: Any, step: Any) -> Any:
        """A gradient `[b, ...]`, 0 where the chunk begins its sequence."""
        return jnp.where(_like(self._flags(True, step), carried), 0, carried)

    def write(self, of_sequences: Any, state: Any, step: Any, *, at_first: bool) -> Any:
        """`of_sequences` with the state of the chunk's sequence where that begins (or ends)."""
        sequence = jnp.where(self._flags(at_first, step), self._at(self._chunks.sequence, step), of_sequences.shape[1])
        return jax.vmap(_set_row)(of_sequences, jnp.broadcast_to(sequence, (self.batch,)), state)

    def _flags(self, first: bool, step: Any) -> Any:
        return self._at(self._chunks.first if first else self._chunks.last, step)

    def _at(self, values: Any, step: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(values, step, axis=1, keepdims=False)

    def loop(
        self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, like: Any, *, reverse: bool = False
    ) -> tuple[Any, Any]:
        """`jax.lax.scan` of `body(carry, step)` over all chunks; a single one needs no loop. `like`: arrays that it reads."""
        carry = vary_like(carry, like)
        if self.count == 1:
            carry, pieces = body(carry, 0)
            return carry, jax.tree.map(lambda leaf: leaf[None], pieces)
        return jax.lax.scan(body, carry, jnp.arange(self.count, dtype=jnp.int32), reverse=reverse)


def _rows(array: Any, rows: Any) -> Any:
    """Rows of an array; the last one for those beyond the end."""
    return array.at[rows].get(mode="clip")


def _set_row(array: Any, row: Any, value: Any) -> Any:
    return array.at[row].set(value, mode="drop")


def _like(flags: Any, array: Any) -> Any:
    """Flags of the leading axes of an array, shaped to broadcast against it."""
    return flags.reshape(*flags.shape, *[1] * (array.ndim - flags.ndim))
