"""Random numbers that operations may be tuned on: floats, and integers that are packed lengths, segments, positions."""

from __future__ import annotations

import concurrent.futures
import math
from typing import Any

import numpy as np

from ejkernel.call.arrays import ArraySpec

_PIECE = 2**22
"""Numbers that one thread draws at a time."""


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Normal floats, drawn by all cores; the same on every machine."""
    out = np.empty(math.prod(shape), dtype)
    pieces = [out[start : start + _PIECE] for start in range(0, out.size, _PIECE)]

    def fill(piece: Any, rng: np.random.Generator) -> None:
        piece[...] = rng.standard_normal(piece.size, np.float32)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(fill, pieces, rng.spawn(len(pieces))))
    return out.reshape(shape)


def shares(rng: np.random.Generator, spec: ArraySpec, total: int) -> Any:
    """Sizes `[..., n]` >= 0 that sum to `total`, uneven as real ones are."""
    *rows, count = spec.shape
    cuts = np.sort(rng.integers(0, total + 1, (*rows, max(count - 1, 0))), axis=-1)
    ends = np.concatenate([cuts, np.full((*rows, min(count, 1)), total)], axis=-1)
    return np.diff(ends, axis=-1, prepend=0).astype(spec.dtype)


def cumulative(rng: np.random.Generator, spec: ArraySpec, total: int) -> Any:
    """Cumulative lengths `[..., n + 1]` from 0 to `total`."""
    *rows, count = spec.shape
    cuts = np.sort(rng.integers(0, total + 1, (*rows, max(count - 2, 0))), axis=-1)
    parts = [np.zeros((*rows, 1)), cuts, np.full((*rows, 1), total)][: count if count < 2 else 3]
    return np.concatenate(parts, axis=-1).astype(spec.dtype)


def segments(spec: ArraySpec, count: int = 4) -> Any:
    """Segment ids `[..., t]`: `count` sequences of about one length, one after the other."""
    length = spec.shape[-1]
    return np.broadcast_to(np.arange(length) * count // max(length, 1), spec.shape).astype(spec.dtype)


def positions(spec: ArraySpec) -> Any:
    """Positions `[..., t]` from 0 on."""
    return np.broadcast_to(np.arange(spec.shape[-1]), spec.shape).astype(spec.dtype)


def requests(rng: np.random.Generator, call: Any, tokens: int, pages: int, page_size: int) -> dict[str, Any]:
    """`query_start_loc`, `kv_lens` and `block_tables` of a mix of requests that together own all tokens; pages in no order."""
    starts = cumulative(rng, call.query_start_loc, tokens)
    longest = call.block_tables.shape[-1] * page_size
    new = np.minimum(np.diff(starts, axis=-1), longest)
    *rows, count, width = call.block_tables.shape
    order = np.stack([rng.permutation(max(pages, count * width)) for _ in range(int(np.prod(rows)))])
    tables = order[:, : count * width].reshape(call.block_tables.shape) % max(pages, 1)
    lengths = np.broadcast_to(new + ((longest - new) * rng.random(new.shape)).astype(np.int64), call.kv_lens.shape)
    return {"query_start_loc": starts, "kv_lens": lengths.astype(np.int32), "block_tables": tables.astype(np.int32)}
