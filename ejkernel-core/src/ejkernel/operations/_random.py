"""Random integers that operations may be tuned on: packed lengths, segments, positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel._arrays import ArraySpec


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
