"""Work items of a batch of requests, computed on the device from their lengths.

An item is a run of new tokens of one request. Items are in token order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.paged_attention.interface import PagedAttentionCall


class Items(NamedTuple):
    """Arrays `[items]`.

    request counts through all members of the batch; the item has the tokens `base + low <= token < base + high`. An item of one
    token has low 0. Others read a whole tile from base on, which therefore ends with the last token at the latest.
    """

    request: Any
    base: Any
    low: Any
    high: Any


class Requests(NamedTuple):
    """Arrays `[b R]`: first new token, position of packed token 0, visible keys, and 1 if all needed pages are valid."""

    start: Any
    shift: Any
    length: Any
    complete: Any


def max_items(batch: int, tokens: int, requests: int, tile: int) -> int:
    """With c new tokens a request has at most `(c - 1) / tile + 1` tiles."""
    busy = min(requests, tokens)
    return batch * ((tokens - busy) // tile + busy)


def make_items(call: PagedAttentionCall, starts: Any, tokens: int, tile: int) -> tuple[Items, Any]:
    """Items and their number, from `query_start_loc [b, R + 1]`; `tokens` are at least a tile."""
    batch, requests = starts.shape[0], starts.shape[1] - 1
    begins = jnp.clip(starts[:, :-1], 0, call.query.shape[1])
    counts = jnp.maximum(jnp.clip(starts[:, 1:], 0, call.query.shape[1]) - begins, 0).reshape(-1)
    begins = begins.reshape(-1)
    tiles = -(-counts // tile)
    up_to = jnp.cumsum(tiles)
    index = jnp.arange(max_items(batch, call.query.shape[1], requests, tile), dtype=jnp.int32)
    request = jnp.searchsorted(up_to, index, side="right", method="compare_all").astype(jnp.int32)
    request = jnp.minimum(request, batch * requests - 1)
    place = index - (up_to - tiles)[request]
    first = begins[request] + place * tile
    own = jnp.clip(counts[request] - place * tile, 0, tile)
    base = jnp.where(own == 1, first, jnp.minimum(first, tokens - tile))
    low = first - base
    items = Items(*(column.astype(jnp.int32) for column in (request, base, low, low + own)))
    return items, up_to[-1]


def make_requests(call: PagedAttentionCall, starts: Any, lengths: Any, tables: Any) -> Requests:
    """From `query_start_loc [b, R + 1]`, `kv_lens [b, R]` and `block_tables [1|b, R, W]`."""
    lengths, shift = jnp.clip(lengths, 0, call.longest), lengths - starts[:, 1:]
    needed = jnp.arange(tables.shape[2])[None, None] * call.pages.page_size < lengths[..., None]
    there = (tables >= 0) & (tables < call.pages.pages)
    complete = jnp.all(there | ~needed, axis=2).astype(jnp.int32)
    return Requests(*(column.reshape(-1) for column in (starts[:, :-1], shift, lengths, complete)))


def owned(starts: Any, tokens: int) -> tuple[Any, Any]:
    """The request of every token, and whether it has one, `[b, N]` each."""
    token = jnp.arange(tokens, dtype=jnp.int32)[None]
    request = jnp.sum(starts[:, None, 1:] <= token[..., None], axis=2, dtype=jnp.int32)
    known = jnp.minimum(request, starts.shape[1] - 2)
    begin = jnp.take_along_axis(starts, known, axis=1)
    return known, (request < starts.shape[1] - 1) & (begin <= token)
