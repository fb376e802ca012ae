"""Splits packed sequences into chunks of tokens. The table's length depends on shapes only."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """Split sequences of tokens with boundaries `bounds [members, n + 1]` into chunks of at most `size` tokens.

    Sums and maxima over masks, which XLA fuses to three kernels; a scan or a scatter is several.
    """
    sequences = bounds.shape[1] - 1
    order = jnp.arange(sequences + 1, dtype=jnp.int32)
    upto = (order[None, :] <= order[:, None])[None]  # [1, n + 1, n + 1]
    bounds = jnp.max(jnp.where(upto, jnp.clip(bounds, 0, length)[:, None, :], 0), axis=2)
    counts = -(-jnp.diff(bounds, axis=1) // size)
    first = jnp.sum(jnp.where(upto[..., 1:], counts[:, None, :], 0), axis=2, dtype=jnp.int32)
    chunk = jnp.arange(sequences + length // size, dtype=jnp.int32)
    sequence = jnp.sum(first[:, None, :] <= chunk[None, :, None], axis=2, dtype=jnp.int32) - 1
    return Chunks(bounds, first, sequence)
