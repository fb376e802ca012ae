"""Slots of the new tokens, computed on the device from the lengths of requests."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall


class Runs(NamedTuple):
    """Per token `[b tokens]`: its page, its offset in the page, and the number of tokens copied at once from it on.

    The size is a power of two where a copy begins, and 0 elsewhere. Copies do not cross pages or steps.
    """

    page: Any
    offset: Any
    size: Any


class Chunks(NamedTuple):
    """Chunks of consecutive slots of a page, `[chunks]`: batch member, page, first offset, and written slots `low <= slot <
    high`.

    shared `[1]` is not 0 if two requests write into one chunk.
    """

    member: Any
    page: Any
    offset: Any
    low: Any
    high: Any
    shared: Any


def make_runs(call: PagedCacheUpdateCall, starts: Any, lengths: Any, tables: Any, tile: int) -> Runs:
    """From `query_start_loc [b, R + 1]`, `kv_lens [b, R]` and `block_tables [b, R, W]`, for steps of `tile` tokens."""
    batch, tokens = call.key.shape[:2]
    requests, width = tables.shape[1:]
    size, count = call.pages.page_size, -(-tokens // tile) * tile
    token = jnp.arange(count, dtype=jnp.int32)[None]
    request = jnp.sum(starts[:, None, 1:] <= token[..., None], axis=2, dtype=jnp.int32)
    known = jnp.minimum(request, requests - 1)
    begin, end, length = (jnp.take_along_axis(array, known, axis=1) for array in (starts[:, :-1], starts[:, 1:], lengths))
    position = length - end + token
    there = (request < requests) & (token >= begin) & (token < tokens) & (position >= 0) & (position < width * size)
    position = jnp.clip(position, 0, width * size - 1)
    entry = known * width + position // size
    page = jnp.take_along_axis(tables.reshape(batch, -1), entry, axis=1)
    there &= (page >= 0) & (page < call.pages.pages)
    page, offset = jnp.where(there, page, -1), jnp.where(there, position % size, 0)
    return Runs(*(array.reshape(-1) for array in (page, offset, _sizes(page, offset, token, tile))))


def _sizes(page: Any, offset: Any, token: Any, tile: int) -> Any:
    """A run of n tokens is copied in the powers of two that n is the sum of, the largest first."""
    follows = (page == jnp.roll(page, 1, axis=1)) & (offset == jnp.roll(offset, 1, axis=1) + 1) & (page >= 0)
    follows &= token % tile != 0
    first = jax.lax.cummax(jnp.where(follows, 0, token), axis=1)
    ends = ~jnp.roll(follows, -1, axis=1) | (token == token.shape[1] - 1)
    after = jax.lax.cummin(jnp.where(ends, token + 1, token.shape[1]), axis=1, reverse=True)
    length, index = after - first, token - first
    found = jnp.zeros_like(page)
    for power in range(tile.bit_length()):
        begins = (index == (length >> (power + 1)) << (power + 1)) & ((length >> power) & 1 == 1)
        found = jnp.where(begins & (page >= 0), 1 << power, found)
    return found


def max_chunks(batch: int, tokens: int, requests: int, rows: int) -> int:
    """The c new tokens of a request lie in at most `(c - 1) / rows + 2` chunks, and in at most c."""
    busy = min(requests, tokens)
    return batch * min(tokens, (tokens - busy) // rows + 2 * busy)


def make_chunks(call: PagedCacheUpdateCall, starts: Any, lengths: Any, tables: Any, rows: int) -> tuple[Chunks, Any, Any]:
    """Chunks, their number, and the token of each of their slots `[chunks, rows]`; an arbitrary token for unwritten slots."""
    batch, tokens = call.key.shape[:2]
    requests, width = tables.shape[1:]
    size = call.pages.page_size
    shift = (lengths - starts[:, 1:]).reshape(-1)  # position of token 0
    begin, end = (jnp.clip(array, 0, tokens).reshape(-1) for array in (starts[:, :-1], starts[:, 1:]))
    low, high = jnp.maximum(shift + begin, 0), jnp.minimum(shift + end, width * size)
    counts = jnp.where(high > low, -(-high // rows) - low // rows, 0)
    up_to = jnp.cumsum(counts)
    index = jnp.arange(max_chunks(batch, tokens, requests, rows), dtype=jnp.int32)
    request = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    request = jnp.minimum(request, batch * requests - 1)
    chunk = low[request] // rows + index - (up_to - counts)[request]
    first = chunk * rows
    entry = jnp.clip(first // size, 0, width - 1)
    page = tables.reshape(-1, width)[request, entry]
    there = (index < up_to[-1]) & (page >= 0) & (page < call.pages.pages)
    low, high = jnp.maximum(low[request] - first, 0), jnp.minimum(high[request] - first, rows)
    member, page, offset = request // requests, jnp.where(there, page, -1), first % size
    token = jnp.clip(first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None] - shift[request][:, None], 0, tokens - 1)
    member, page, offset, low, high = (column.astype(jnp.int32) for column in (member, page, offset, low, high))
    chunks = Chunks(member, page, offset, low, high, _shared(member, page, offset))
    return chunks, up_to[-1], token


def _shared(*columns: Any) -> Any:
    """Whether two chunks of a page are one, `[1]`."""
    member, page, offset = jax.lax.sort(columns, num_keys=3)
    same = (member[1:] == member[:-1]) & (page[1:] == page[:-1]) & (offset[1:] == offset[:-1]) & (page[1:] >= 0)
    return jnp.any(same).astype(jnp.int32).reshape(1)
