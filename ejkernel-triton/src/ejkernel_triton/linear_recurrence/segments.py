"""Segments: the tokens of one sequence that one program runs over, and the tables of them for packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel_triton._chunks import chunks_of


class Segments(NamedTuple):
    """How a call's tokens are cut into segments.

    For packed sequences a table pads the call's sequences with two: the tokens before and after them. Without packed sequences
    the query is a placeholder for each of its arrays.

    Attributes:
        bounds, first, sequence: the table, see `ejkernel_triton._chunks.Chunks`.
        size: tokens of a segment.
        number: segments of a batch member.
        length: tokens of a batch member.
        sequences: of the call, without the two of the padding.
    """

    bounds: Any
    first: Any
    sequence: Any
    size: int
    number: int
    length: int
    sequences: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments that every kernel takes in this order."""
        return self.bounds, self.first, self.sequence, self.length, self.number, self.sequences

    @property
    def used(self) -> Any:
        """Which segments have tokens `[members, segments]`."""
        return self.sequence < self.first.shape[1] - 1

    @property
    def empty(self) -> Any:
        """Which of the call's sequences have no tokens `[members, n]`."""
        return self.first[:, 1:-2] == self.first[:, 2:-1]


def segments_of(cu_seqlens: Any, placeholder: Any, length: int, sequences: int, size: int) -> Segments:
    """Cut tokens into segments of `size` tokens; `cu_seqlens` is None without packed sequences."""
    if cu_seqlens is None:
        return Segments(placeholder, placeholder, placeholder, size, -(-length // size), length, sequences)
    bounds = jnp.pad(cu_seqlens, ((0, 0), (1, 0)))
    bounds = jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=length)
    table = chunks_of(bounds, length, size)
    return Segments(table.bounds, table.first, table.sequence, size, table.sequence.shape[1], length, sequences)


def keep_states_of_empty_sequences(states: Any, segments: Segments, given: Any) -> Any:
    """The states after packed sequences `[b, n, H, d, v]`, where those without tokens, which no program runs, keep the state given
    for them: zero if `given` is None."""
    return jnp.where(segments.empty[..., None, None, None], 0.0 if given is None else given.astype(jnp.float32), states)
