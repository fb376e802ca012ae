"""What can be read off a mask without changing it: padding, positions, and the same mask in fewer kinds of parts."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.masks import _materialise
from ejkernel.masks._parts import Mask, Parts

Side = Literal["query", "key"]


def positions_from_segments(segments: Any) -> Any:
    """Position of each token among the valid tokens of its segment, `[B, T]`; -1 on padding. Runs of equal ids are segments.

    Padding inside a segment is not counted: ids `[0, -1, 0]` sit at `[0, -1, 1]`.
    """
    valid = segments >= 0
    rank = jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
    index = jnp.arange(segments.shape[-1], dtype=jnp.int32)
    newest = jax.lax.cummax(jnp.where(valid, index, -1), axis=segments.ndim - 1)
    before = jnp.concatenate([jnp.full_like(newest[..., :1], -1), newest[..., :-1]], axis=-1)
    previous = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=-1)
    starts = valid & ((before < 0) | (previous != segments))
    first = jax.lax.cummax(jnp.where(starts, rank, 0), axis=segments.ndim - 1)
    return jnp.where(valid, rank - first, -1)


def segments_with_lengths(segments: Any, lengths: Any, size: int) -> Any:
    """Segments whose padding includes the indices at and past `lengths`; None if neither is given."""
    if lengths is None:
        return segments
    inside = jnp.arange(size)[None] < lengths[:, None]
    return jnp.where(inside, 0 if segments is None else segments, -1).astype(jnp.int32)


def segment_ids(info: Parts, side: Side) -> Any:
    """Segment ids `[B, size]` of one side as said, else padding read from the dense mask; None if the size is unknown.

    Segments cannot express a dense mask, so from one they only mark padding: 0 where the token takes part, -1 where no
    head lets it see or be seen.
    """
    query = side == "query"
    size = info.q_len if query else info.kv_len
    if size is None:
        return None
    said = segments_with_lengths(
        *((info.query_segments, info.query_lengths) if query else (info.key_segments, info.key_lengths)), size
    )
    if said is not None:
        return said
    if info.dense is not None:
        used = info.dense.any(axis=(1, 3) if query else (1, 2))
        return jnp.broadcast_to(jnp.where(used, 0, -1).astype(jnp.int32), (used.shape[0], size))
    return jnp.zeros((info.batch_size or 1, size), jnp.int32)


def both_segments(info: Parts, query_length: int, key_length: int) -> tuple[Any, Any]:
    """Lengths folded into segments, and both sides or neither."""
    query = segments_with_lengths(info.query_segments, info.query_lengths, query_length)
    key = segments_with_lengths(info.key_segments, info.key_lengths, key_length)
    if query is None and key is None:
        return None, None
    if info.query_segments is None or info.key_segments is None:  # no pairs to compare: only padding was said
        query = jnp.zeros((1, query_length), jnp.int32) if query is None else jnp.minimum(query, 0)
        key = jnp.zeros((1, key_length), jnp.int32) if key is None else jnp.minimum(key, 0)
    return query, key


def resolved(info: Mask, query_length: int, key_length: int) -> Mask:
    """The same mask without lengths, with segments on both sides or neither, and positions on both sides or neither.

    Where there are positions, `causal_offset` is folded into them and is 0.
    """
    query, key = both_segments(info, query_length, key_length)
    changes: dict[str, Any] = {"query_segments": query, "key_segments": key, "query_lengths": None, "key_lengths": None}
    if info.query_positions is not None or info.key_positions is not None:
        changes["query_positions"] = _materialise.query_positions(info, query_length)
        changes["key_positions"] = _materialise.key_positions(info, key_length)
        changes["causal_offset"] = 0
    return info.replace(**changes)
