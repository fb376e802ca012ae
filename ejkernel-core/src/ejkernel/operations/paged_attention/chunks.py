"""Chunked attention over a paged cache, said with requests of one chunk each, which every kernel serves.

A token at position p sees the keys of its own chunk, `p // chunk_size`, alone. The new tokens of a request that stand in one chunk
are a request of their own: its pages are those of the chunk, and its keys end where its tokens do. Packed tokens keep their order.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid


def check_chunks(chunk_size: int, page_size: int, causal: bool, qq_bias: Any) -> None:
    """Refuse what cannot be said that way."""
    if chunk_size % page_size:
        raise invalid("chunk_size", chunk_size, f"a multiple of the {page_size} tokens of a page")
    if not causal:
        raise invalid("chunk_size", chunk_size, "None without causal")
    if qq_bias is not None:
        raise invalid("chunk_size", chunk_size, "None beside qq_bias, which counts the new tokens of a whole request")


def requests_of_chunks(
    starts: Any, lengths: Any, tables: Any, known_starts: Any, tokens: int, page_size: int, chunk_size: int
) -> tuple[Any, Any, Any]:
    """Starts `[1, V + 1]`, lengths `[1, V]` and tables `[1, V, W']` of the requests of one chunk each.

    V depends on shapes only: it is the most chunks that so many new tokens may touch; the last ones may be empty.

    Args:
        starts, lengths, tables: int32 `[1, R + 1]`, `[1, R]`, `[1, R, W]`.
        known_starts: the starts if their values are known, else anything: they say more about V.
        tokens: N.
        page_size: divides chunk_size.
        chunk_size: positions of a chunk.
    """
    starts, lengths, tables = starts[0], lengths[0], tables[0]
    requests, width = tables.shape
    count = _most_pieces(known_starts, requests, tokens, chunk_size)
    if requests == 0 or count == 0:
        return starts[None], lengths[None], tables[None]
    begin = jnp.clip(starts[:-1], 0, tokens)
    end = jnp.maximum(jnp.clip(starts[1:], 0, tokens), begin)
    first_position = lengths - (end - begin)
    # Tokens before the first key see nothing, in whichever chunk they are counted.
    first = jnp.maximum(first_position, 0) // chunk_size
    last = jnp.maximum(lengths - 1, 0) // chunk_size
    pieces = jnp.where(end > begin, last - first + 1, 0)
    up_to = jnp.cumsum(pieces)

    index = jnp.arange(count, dtype=jnp.int32)
    busy = index < up_to[-1]
    owner = jnp.minimum(jnp.searchsorted(up_to, index, side="right"), requests - 1)
    chunk = first[owner] + index - (up_to - pieces)[owner]
    chunk_start = chunk * chunk_size
    token = begin[owner] + jnp.where(chunk == first[owner], 0, chunk_start - first_position[owner])
    keys = jnp.minimum(lengths[owner], chunk_start + chunk_size) - chunk_start
    pages = min(width, chunk_size // page_size)
    entry = (chunk_start // page_size)[:, None] + jnp.arange(pages, dtype=jnp.int32)[None]
    found = tables[owner[:, None], jnp.clip(entry, 0, max(width - 1, 0))]
    bounds = jnp.concatenate([jnp.where(busy, token, end[-1]), end[-1:]])
    return bounds[None], jnp.where(busy, keys, 0)[None], jnp.where(entry < width, found, -1)[None]


def _most_pieces(known_starts: Any, requests: int, tokens: int, chunk_size: int) -> int:
    """The most chunks that the new tokens of all requests touch: q tokens of one touch `(q - 2) // chunk_size + 2` at most."""
    if isinstance(known_starts, np.ndarray):
        new = np.maximum(np.diff(known_starts), 0)
        return int(np.sum(np.where(new > 1, (new - 2) // chunk_size + 2, new)))
    return min(2 * requests + tokens // chunk_size, max(tokens, 1))
