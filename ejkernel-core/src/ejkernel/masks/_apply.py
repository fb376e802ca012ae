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
WindowMode = Literal["default", "decode", "prefill"]
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


def apply_sliding_window(info: Mask, sliding_window: Any, offset: Any, mode: WindowMode | None, index: Any) -> Mask:
    """Also require the key within `(left, right)` of the query position + offset; then cut the mask as `mode` says."""
    if mode not in (None, "default", "decode", "prefill"):
        raise invalid("mode", repr(mode), "'default', 'decode' or 'prefill'")
    if (index is not None) != (mode == "decode"):
        raise invalid("index", index, "the place of the query, an int or [B]" if mode == "decode" else "None but for 'decode'")
    offset = _offset(offset)
    windowed = _with_window(info, sliding_window, offset)
    if mode in (None, "default"):
        return windowed
    query_length, key_length = info.known_sizes(f"apply_sliding_window(mode={mode!r})")
    left, right = (None, None) if sliding_window is None else _checks.window(sliding_window) or (None, None)
    if left is None or right is None:
        raise invalid("sliding_window", sliding_window, f"a window with two ends for mode={mode!r}")
    if mode == "prefill":
        width = min(left if isinstance(sliding_window, (int, np.integer)) else left + right + 1, key_length)
        return _cut(windowed, None, _span(jnp.array([key_length]), width, key_length))
    width = min(left + right + 1, key_length)
    row = jnp.clip(_lengths("index", index), 0, query_length - 1)
    keys = _span(row + offset - left + width, width, key_length)
    return _cut(windowed, row[:, None], keys)


def _sides(window: Any) -> tuple[Any, Any] | None:
    """The sides of a window of which one is a JAX array; None for any other window."""
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or not any(isinstance(side, jax.Array) for side in sides):
        return None
    left, right = (side if side is None else _scalar("sliding_window", side, 0) for side in sides)
    return left, right


def _scalar(name: str, value: Any, least: int) -> Any:
    """An int of at least `least`, or an integer array without axes, whose value may be unknown."""
    if not isinstance(value, jax.Array):
        return _checks.integer(name, value, least)
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
        raise invalid(name, f"{value.dtype} of shape {value.shape}", "an int, or an integer array without axes")
    return value


def _pairs(info: Parts, offset: Any) -> tuple[Any, Any]:
    """Positions of queries, at `offset`, and of keys, `[B|1, T, 1]` and `[B|1, 1, S]`, for parts that are said in arrays."""
    query_length, key_length = info.known_sizes("apply_*")
    shift = jnp.asarray(offset, jnp.int32).reshape(-1, 1) - info.causal_offset
    query = _materialise.query_positions(info, query_length) + shift
    return query[:, :, None], _materialise.key_positions(info, key_length)[:, None, :]


def _with_window(info: Mask, sliding_window: Any, offset: Any) -> Mask:
    sides = _sides(sliding_window)
    if sides is not None:
        query, key = _pairs(info, offset)
        parts = [] if sides[0] is None else [key >= query - sides[0]]
        parts += [] if sides[1] is None else [key <= query + sides[1]]
        for part in parts:
            info = with_dense(info, part[:, None])
        return info.replace(sliding_window_baked_in=True)
    window = _checks.window(sliding_window)
    if window is None:
        return info
    if not _fits(info, offset):
        return _restrict(info, offset, window=window).replace(sliding_window_baked_in=True)
    if info.window is not None:
        window = (_narrower(window[0], info.window[0]), _narrower(window[1], info.window[1]))
    return info.replace(window=window, causal_offset=offset, sliding_window_baked_in=True)


def apply_chunked(info: Mask, chunk_size: Any, offset: int = 0) -> Mask:
    """Also require the query's own chunk of `chunk_size` positions, and causality at `offset`."""
    if isinstance(chunk_size, jax.Array):
        size, (query, key) = _scalar("chunk_size", chunk_size, 1), _pairs(info, 0)
        return apply_causal(with_dense(info, (query // size == key // size)[:, None]), offset)
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
    info = apply_kv_lengths(info, lengths, q_len=None, end_index=None, sliding_window=None)
    queries = None if q_len is None else _span(end, _within("q_len", q_len, query_length), query_length)
    if sliding_window is None:
        return _cut(info, queries, None)
    keys = _span(end, min(_window_width(sliding_window), key_length), key_length)
    return _cut(info, queries, keys).replace(sliding_window_baked_in=True)


def _cut(info: Mask, queries: Any, keys: Any) -> Mask:
    """Keep these queries and keys, indices `[B, n]`, None for all. Positions keep the structure exact."""
    query_length, key_length = info.known_sizes("apply_*")
    info = _derive.resolved(info, query_length, key_length)
    changes: dict[str, Any] = {
        "query_positions": _materialise.query_positions(info, query_length),
        "key_positions": _materialise.key_positions(info, key_length),
    }
    changes |= {"query_segments": info.query_segments, "key_segments": info.key_segments, "dense": info.dense}
    for index, names, axis in (
        (queries, ("query_positions", "query_segments"), 2),
        (keys, ("key_positions", "key_segments"), 3),
    ):
        if index is not None:
            changes |= {name: _rows(changes[name], index, 1) for name in names}
            changes["dense"] = _rows(changes["dense"], index, axis)
    sizes = (query_length if queries is None else queries.shape[1], key_length if keys is None else keys.shape[1])
    return info.replace(**changes, causal_offset=0, sizes=(info.sizes[0], *sizes))


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
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


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
