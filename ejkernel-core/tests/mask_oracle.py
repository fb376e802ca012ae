"""Visibility by the definition, one entry at a time, in plain Python over NumPy values."""

from __future__ import annotations

from typing import Any

import numpy as np


def at(array: Any, b: int, i: int) -> int:
    host = np.asarray(array)
    return int(host[b if host.shape[0] > 1 else 0, i])


def length(array: Any, b: int) -> int:
    host = np.asarray(array)
    return int(host[b if host.shape[0] > 1 else 0])


def visible(info: Any, b: int, h: int, i: int, j: int) -> bool:
    if info.dense is not None:
        dense = np.asarray(info.dense)
        index = tuple(x if size > 1 else 0 for x, size in zip((b, h, i, j), dense.shape, strict=True))
        if not dense[index]:
            return False
    query = None if info.query_segments is None else at(info.query_segments, b, i)
    key = None if info.key_segments is None else at(info.key_segments, b, j)
    if (query is not None and query < 0) or (key is not None and key < 0):
        return False
    if query is not None and key is not None and query != key:
        return False
    if info.query_lengths is not None and i >= length(info.query_lengths, b):
        return False
    if info.key_lengths is not None and j >= length(info.key_lengths, b):
        return False
    p = (i if info.query_positions is None else at(info.query_positions, b, i)) + info.causal_offset
    r = j if info.key_positions is None else at(info.key_positions, b, j)
    if info.causal and r > p and not (info.prefix is not None and r < info.prefix):
        return False
    if info.window is not None:
        left, right = info.window
        if left is not None and r < p - left:
            return False
        if right is not None and r > p + right:
            return False
    return info.chunk_size is None or p // info.chunk_size == r // info.chunk_size


def dense(info: Any, batch: int, heads: int, queries: int, keys: int) -> np.ndarray:
    """`[batch, heads, queries, keys]` bool."""
    out = np.zeros((batch, heads, queries, keys), bool)
    for b, h, i, j in np.ndindex(out.shape):
        out[b, h, i, j] = visible(info, b, h, i, j)
    return out
