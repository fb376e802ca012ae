"""The visible pairs of a canonical call: as an array, as a bound for tiles, and their exact number where it is static."""

from __future__ import annotations

from typing import Any

import numpy as np


def visible(call: Any, inputs: Any, xp: Any) -> Any:
    """Which (query, key) pairs are visible: bool `[B|1, H|1, T, S]`. `xp` is `numpy` or `jax.numpy`."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    query = inputs.query_positions
    query = (xp.arange(queries) + call.query_offset)[None] if query is None else query
    key = xp.arange(keys)[None] if inputs.key_positions is None else inputs.key_positions
    query, key = query[:, None, :, None], key[:, None, None, :]
    seen = xp.ones((1, 1, queries, keys), bool)
    if call.causal:
        seen = seen & ((key <= query) | (key < (call.prefix or 0) if call.prefix else False))
    if call.window is not None:
        left, right = call.window
        seen = seen if left is None else seen & (key >= query - left)
        seen = seen if right is None else seen & (key <= query + right)
    if call.chunk_size is not None:
        seen = seen & (query // call.chunk_size == key // call.chunk_size)
    if inputs.query_segments is not None:
        own, other = inputs.query_segments[:, None, :, None], inputs.key_segments[:, None, None, :]
        seen = seen & (own == other) & (own >= 0)
    return seen if inputs.mask is None else seen & inputs.mask


def tile_visibility(call: Any, q_low: Any, q_high: Any, k_low: Any, k_high: Any, xp: Any) -> tuple[Any, Any]:
    """Whether a tile of query and key positions (both ends included) has some visible entry, and only visible entries.

    Causal, window, chunk and prefix only. Each is judged alone, so `some` may be true for a tile that only their combination
    empties. The bounds broadcast together; `xp` is `numpy` or `jax.numpy`.
    """
    some = every = xp.ones(xp.broadcast_shapes(q_low.shape, k_low.shape), bool)
    if call.causal:
        prefix = call.prefix or 0
        some = some & ((k_low <= q_high) | (k_low < prefix))
        every = every & (k_high <= xp.maximum(q_low, prefix - 1))
    left, right = call.window or (None, None)
    if left is not None:
        some = some & (q_low - k_high <= left)
        every = every & (q_high - k_low <= left)
    if right is not None:
        some = some & (k_low - q_high <= right)
        every = every & (k_high - q_low <= right)
    if call.chunk_size is not None:
        first_chunks = q_low // call.chunk_size, k_low // call.chunk_size
        last_chunks = q_high // call.chunk_size, k_high // call.chunk_size
        some = some & (last_chunks[0] >= first_chunks[1]) & (first_chunks[0] <= last_chunks[1])
        every = every & (first_chunks[0] == last_chunks[0]) & (first_chunks[1] == last_chunks[1])
        every = every & (first_chunks[0] == first_chunks[1])
    return some, every


def count_pairs(call: Any) -> int:
    """Number of pairs of one head that causal, window, chunk and prefix leave; all of them where positions are arrays."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    if call.query_positions is not None or call.key_positions is not None:
        return queries * keys
    position = np.arange(queries, dtype=np.int64) + call.query_offset
    first, last = np.zeros_like(position), np.full_like(position, keys - 1)
    if call.causal:
        last = np.minimum(last, np.maximum(position, (call.prefix or 0) - 1))
    if call.window is not None:
        left, right = call.window
        first = first if left is None else np.maximum(first, position - left)
        last = last if right is None else np.minimum(last, position + right)
    if call.chunk_size is not None:
        start = position // call.chunk_size * call.chunk_size
        first, last = np.maximum(first, start), np.minimum(last, start + call.chunk_size - 1)
    return int(np.maximum(last - first + 1, 0).sum())
