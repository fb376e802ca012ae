"""Dense visibility from every part of a mask: the one place where the parts get their meaning in code."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp

from ejkernel.masks._parts import Parts


def query_positions(info: Parts, length: int) -> Any:
    """Where the queries sit for causal, window and chunk masks, `[B|1, T]`; `causal_offset` included."""
    positions = info.query_positions if info.query_positions is not None else jnp.arange(length, dtype=jnp.int32)[None]
    return positions + info.causal_offset


def key_positions(info: Parts, length: int) -> Any:
    """Where the keys sit, `[B|1, S]`."""
    return info.key_positions if info.key_positions is not None else jnp.arange(length, dtype=jnp.int32)[None]


def structural(info: Parts, query_length: int, key_length: int) -> list[Any]:
    """The static parts (causal with prefix, window, chunk), each `[B|1, T, S]`."""
    parts: list[Any] = []
    if not info.causal and info.window is None and info.chunk_size is None:
        return parts
    query = query_positions(info, query_length)[:, :, None]
    key = key_positions(info, key_length)[:, None, :]
    if info.causal:
        parts.append(key <= query if info.prefix is None else (key <= query) | (key < info.prefix))
    if info.window is not None:
        left, right = info.window
        if left is not None:
            parts.append(key >= query - left)
        if right is not None:
            parts.append(key <= query + right)
    if info.chunk_size is not None:
        parts.append(query // info.chunk_size == key // info.chunk_size)
    return parts


def padding(info: Parts, query_length: int, key_length: int) -> list[Any]:
    """Segments and lengths, each broadcasting to `[B, T, S]`. One side's segments alone only mark that side's padding."""
    parts: list[Any] = []
    query, key = info.query_segments, info.key_segments
    if query is not None and key is not None:
        parts.append(query[:, :, None] == key[:, None, :])
    if query is not None:
        parts.append(query[:, :, None] >= 0)
    if key is not None:
        parts.append(key[:, None, :] >= 0)
    if info.query_lengths is not None:
        parts.append(jnp.arange(query_length)[None, :, None] < info.query_lengths[:, None, None])
    if info.key_lengths is not None:
        parts.append(jnp.arange(key_length)[None, None, :] < info.key_lengths[:, None, None])
    return parts


def conjunction(parts: list[Any], query_length: int, key_length: int) -> Any:
    """All of the 4-D parts at once, `[B|1, H|1, T, S]`; nothing said means everything is visible."""
    if not parts:
        return jnp.ones((1, 1, query_length, key_length), jnp.bool_)
    seen = functools.reduce(operator.and_, parts)
    return jnp.broadcast_to(seen, (*seen.shape[:2], query_length, key_length))


def visibility(info: Parts, query_length: int, key_length: int) -> Any:
    """Whether query i sees key j, `[B|1, H|1, T, S]` bool, from everything that was said."""
    pairs = structural(info, query_length, key_length) + padding(info, query_length, key_length)
    parts = [part[:, None] for part in pairs]
    return conjunction(parts if info.dense is None else [info.dense, *parts], query_length, key_length)
