"""Splits packed sequences into chunks of tokens. The table's length depends on shapes only."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Chunks(NamedTuple):
    """`members` is the batch size, or 1 if all rows have the same sequences.

    bounds `[members, n + 1]`: non-decreasing sequence boundaries, clipped to the length.

    first `[members, n + 1]`: first chunk of each sequence.

    sequence `[members, count]`: sequence of each chunk; n for unused chunks.
    """

    bounds: Any
    first: Any
    sequence: Any

    @property
    def counts(self) -> tuple[int, int]:
        """Number of chunks and of sequences of a member."""
        return self.sequence.shape[1], self.bounds.shape[1] - 1


def chunks_of(bounds: Any, length: int, size: int) -> Chunks:
    """Split sequences of tokens with boundaries `bounds [members, n + 1]` into chunks of at most `size` tokens."""
    sequences = bounds.shape[1] - 1
    bounds = jax.lax.cummax(jnp.clip(bounds, 0, length), axis=1)
    counts = -(-jnp.diff(bounds, axis=1) // size)
    first = jnp.pad(jnp.cumsum(counts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    most = sequences + length // size
    marks = jax.vmap(lambda row: jnp.zeros((most,), jnp.int32).at[row].add(1, mode="drop"))(first)
    return Chunks(bounds, first, jnp.cumsum(marks, axis=1, dtype=jnp.int32) - 1)
