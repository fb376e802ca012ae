"""Packed sequences cut into chunks of tokens, as a table whose length depends on shapes only."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Chunks(NamedTuple):
    """For members that are the batch or, where all rows have the same sequences, one.

    bounds `[members, n + 1]`: where sequences begin and end, within the length and not decreasing.
    first `[members, n + 1]`: the first chunk of each sequence.
    sequence `[members, count]`: the sequence of each chunk; n for those that are not used.
    """

    bounds: Any
    first: Any
    sequence: Any

    @property
    def counts(self) -> tuple[int, int]:
        """How many chunks and sequences a member has."""
        return self.sequence.shape[1], self.bounds.shape[1] - 1


def chunks_of(bounds: Any, length: int, size: int) -> Chunks:
    """Cut sequences of tokens between `bounds [members, n + 1]` into chunks of at most `size` tokens."""
    sequences = bounds.shape[1] - 1
    bounds = jax.lax.cummax(jnp.clip(bounds, 0, length), axis=1)
    counts = -(-jnp.diff(bounds, axis=1) // size)
    first = jnp.pad(jnp.cumsum(counts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    most = sequences + length // size
    marks = jax.vmap(lambda row: jnp.zeros((most,), jnp.int32).at[row].add(1, mode="drop"))(first)
    return Chunks(bounds, first, jnp.cumsum(marks, axis=1, dtype=jnp.int32) - 1)
