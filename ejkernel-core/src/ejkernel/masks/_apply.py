"""Adding restrictions to a mask: as static structure where that is exact, as a dense part where it is not."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.masks import _checks, _derive, _materialise
from ejkernel.masks._parts import Mask, Parts

Combine = Literal["union", "intersect", "replace"]
ZeroPolicy = Literal["q", "kv", "both", "none"]
PLAIN: dict[str, Any] = {"causal": False, "causal_offset": 0, "window": None, "chunk_size": None, "prefix": None}
"""The static structure of a mask that has none."""


def structured(info: Parts) -> bool:
    """Whether anything depends on positions."""
    return info.causal or info.window is not None or info.chunk_size is not None


def with_dense(info: Mask, part: Any) -> Mask:
    """AND a `[B|1, H|1, T|1, S|1]` part into the dense mask."""
    return info.replace(dense=part if info.dense is None else info.dense & part)


def _restrict(info: Mask, offset: Any, **structure: Any) -> Mask:
    """AND the visibility of one structure, at `offset`, into the dense mask; the rest of the mask keeps its kind."""
    query_length, key_length = info.known_sizes("apply_*")
    static = not isinstance(offset, jax.Array)
    only = info.replace(**{**PLAIN, **structure, "causal_offset": offset if static else 0}, dense=None)
    if not static:
        shift = jnp.asarray(offset, jnp.int32).reshape(-1, 1)
        only = only.replace(query_positions=_materialise.query_positions(only, query_length) + shift)
    (part, *more) = _materialise.structural(only, query_length, key_length)
    for other in more:
        part = part & other
    return with_dense(info, part[:, None])


def _offset(offset: Any) -> Any:
    """A static int, or an array (one offset, or one per example)."""
    return jnp.asarray(offset) if isinstance(offset, (jax.Array, np.ndarray)) else _checks.integer("offset", offset)


def _fits(info: Parts, offset: Any) -> bool:
    """Whether structure at `offset` can join what is there: the same offset, or nothing that has one."""
    return not isinstance(offset, jax.Array) and (not structured(info) or info.causal_offset == offset)


def apply_causal(info: Mask, offset: Any = 0) -> Mask:
    """Also require key position <= query position + offset."""
    offset = _offset(offset)
    if _fits(info, offset):
        return info.replace(causal=True, causal_offset=offset)
    only_causal = info.causal and info.window is None and info.chunk_size is None
    if only_causal and not isinstance(offset, jax.Array):
        return info.replace(causal_offset=min(offset, info.causal_offset))  # the same prefix is exempt from both
    return _restrict(info, offset, causal=True, prefix=info.prefix)


def _narrower(one: int | None, two: int | None) -> int | None:
    return min((side for side in (one, two) if side is not None), default=None)


def apply_sliding_window(info: Mask, sliding_window: Any, offset: Any = 0) -> Mask:
    """Also require the key within `(left, right)` of the query position + offset."""
    window, offset = _checks.window(sliding_window), _offset(offset)
    if window is None:
        return info
    if not _fits(info, offset):
        return _restrict(info, offset, window=window).replace(sliding_window_baked_in=True)
    if info.window is not None:
        window = (_narrower(window[0], info.window[0]), _narrower(window[1], info.window[1]))
    return info.replace(window=window, causal_offset=offset, sliding_window_baked_in=True)


def apply_chunked(info: Mask, chunk_size: int, offset: int = 0) -> Mask:
    """Also require the query's own chunk of `chunk_size` positions, and causality at `offset`."""
    size = _checks.integer("chunk_size", chunk_size, 1)
    if not _fits(info, 0):
        info = _restrict(info, 0, chunk_size=size)
    elif info.chunk_size is None or info.chunk_size % size == 0:
        info = info.replace(chunk_size=size, causal_offset=0)
    elif size % info.chunk_size != 0:  # when it is a multiple, the smaller chunks already say it
        info = _restrict(info, 0, chunk_size=size)
    return apply_causal(info, offset)


def _rows(array: Any, index: Any, axis: int) -> Any:
    """Rows `index` `[B, n]` of `axis`, per example; an axis of size 1 broadcasts and stays."""
    if array is None or (array.ndim == 4 and array.shape[axis] == 1):
        return array
    batch = max(index.shape[0], array.shape[0])
    array, index = jnp.broadcast_to(array, (batch, *array.shape[1:])), jnp.broadcast_to(index, (batch, index.shape[1]))
    return jnp.take_along_axis(array, jnp.expand_dims(index, [a for a in range(1, array.ndim) if a != axis]), axis=axis)


def apply_kv_lengths(info: Mask, kv_lengths: Any, *, q_len: int | None, end_index: Any, sliding_window: int | None) -> Mask:
    """Keep keys before `kv_lengths`; then the `q_len` queries, and the `sliding_window` keys, that end at `end_index`."""
    lengths = _lengths("kv_lengths", kv_lengths)
    if q_len is None and sliding_window is None:
        shorter = lengths if info.key_lengths is None else jnp.minimum(info.key_lengths, lengths)
        return info.replace(key_lengths=shorter)
    query_length, key_length = info.known_sizes("apply_kv_lengths(q_len=, sliding_window=)")
    end = lengths if end_index is None else _lengths("end_index", end_index)
    info = _derive.resolved(
        apply_kv_lengths(info, lengths, q_len=None, end_index=None, sliding_window=None), query_length, key_length
    )
    changes: dict[str, Any] = {
        "query_positions": _materialise.query_positions(info, query_length),
        "key_positions": _materialise.key_positions(info, key_length),
    }
    changes |= {"query_segments": info.query_segments, "key_segments": info.key_segments, "dense": info.dense}
    if q_len is not None:
        index = _span(end, _within("q_len", q_len, query_length), query_length)
        for name in ("query_positions", "query_segments"):
            changes[name] = _rows(changes[name], index, 1)
        changes["dense"] = _rows(changes["dense"], index, 2)
        query_length = q_len
    if sliding_window is not None:
        width = min(_window_width(sliding_window), key_length)
        index = _span(end, width, key_length)
        for name in ("key_positions", "key_segments"):
            changes[name] = _rows(changes[name], index, 1)
        changes["dense"] = _rows(changes["dense"], index, 3)
        changes["sliding_window_baked_in"] = True
        key_length = width
    return info.replace(**changes, causal_offset=0, sizes=(info.sizes[0], query_length, key_length))


def _lengths(name: str, value: Any) -> Any:
    array = _checks.as_array(name, value)
    return _checks.integers(name, array.reshape(-1) if len(array.shape) < 2 else array, "batch")


def _within(name: str, value: Any, size: int) -> int:
    number = _checks.integer(name, value, 0)
    if number > size:
        raise invalid(name, number, f"at most the mask's {size}")
    return number


def _window_width(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        raise wrong_type(
            "sliding_window", value, "an int", remedy="the last keys are kept, so only a number of keys makes sense"
        )
    return _checks.integer("sliding_window", value, 1)


def _span(end: Any, length: int, size: int) -> Any:
    """Indices `[B, length]` of the span that ends at `end`, moved inside `[0, size)`."""
    start = jnp.clip(end - length, 0, size - length)
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)


def apply_token_type_ids(info: Mask, token_type_ids: Any, *, combine: Combine, zero_policy: ZeroPolicy) -> Mask:
    """Combine the mask with "query and key have the same type"."""
    if combine not in ("union", "intersect", "replace"):
        raise invalid("combine", repr(combine), "'union', 'intersect' or 'replace'")
    if zero_policy not in ("q", "kv", "both", "none"):
        raise invalid("zero_policy", repr(zero_policy), "'q', 'kv', 'both' or 'none'")
    pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids, token_type_ids)
    query, key = (_checks.integers("token_type_ids", ids, "batch token") for ids in pair)
    same = query[:, :, None] == key[:, None, :]
    if zero_policy in ("q", "both"):
        same &= (query != 0)[:, :, None]
    if zero_policy in ("kv", "both"):
        same &= (key != 0)[:, None, :]
    part = same[:, None]
    if combine == "intersect":
        return with_dense(info, part)
    if combine == "replace":
        unsaid = dict.fromkeys(("query_segments", "key_segments", "query_lengths", "key_lengths"))
        return info.replace(**PLAIN, **unsaid, dense=part)
    pairs = [pair[:, None] for pair in _materialise.structural(info, *part.shape[2:])]
    base = _materialise.conjunction(pairs if info.dense is None else [info.dense, *pairs], *part.shape[2:])
    return info.replace(**PLAIN, dense=base | part)
