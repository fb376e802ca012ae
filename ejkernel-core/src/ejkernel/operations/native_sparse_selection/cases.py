"""Named problems of `native_sparse_selection`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle

Change = Callable[[np.random.Generator, dict[str, Any]], None]


def arrays(
    length: int = 30,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 8,
    batch: int = 2,
    *,
    block_size: int = 3,
    levels: int = 0,
    lengths: tuple[int, ...] = (),
    caches: tuple[int, ...] = (),
    counted: int = 0,
    change: Change | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments.

    Args:
        length, heads, key_heads, size, batch, block_size: of the queries and keys.
        levels: numbers are integers from `-levels` to `levels`, whose weights are often equal.
        lengths: of sequences that are packed.
        caches: of each member of the batch, whose last token is its only query.
        counted: block_counts from -1 to so many; 0 for none.
        change: to make to the arrays.
    """

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def values(*shape: int) -> Any:
            drawn = rng.integers(-levels, levels + 1, shape) if levels else rng.standard_normal(shape)
            return drawn.astype(np.float32)

        queries, rows = (1, len(caches)) if caches else (length, batch)
        owns = np.arange(length)[None] // block_size
        firsts = None
        entries = -(-length // block_size)
        if caches:
            owns = np.asarray(caches)[:, None] - 1
            owns = np.where(owns < 0, -1, owns // block_size)
        if lengths:
            each = [np.arange(one) // block_size for one in lengths]
            needed = [-(-one // block_size) for one in lengths]
            owns = np.full((1, length), -1)
            owns[0, : sum(lengths)] = np.concatenate(each)
            firsts = np.zeros((1, length), np.int32)
            firsts[0, : sum(lengths)] = np.repeat(np.cumsum([0, *needed[:-1]]), lengths)
            entries = sum(needed) + 1
        made: dict[str, Any] = {
            "query": values(rows, queries, heads, size),
            "means": values(rows, entries, key_heads, size),
            "lse": np.full((rows, queries, heads), np.log(entries + 1) + 1.5 * max(levels, 1) ** 2, np.float32),
            "own_blocks": owns.astype(np.int32),
        }
        if firsts is not None:
            made["first_blocks"] = firsts
        if counted:
            made["block_counts"] = rng.integers(-1, counted + 1, (rows, queries, key_heads)).astype(np.int32)
        if change is not None:
            change(rng, made)
        return made

    return make


def _equal_weights(rng: np.random.Generator, made: dict[str, Any]) -> None:
    made["means"] = np.zeros_like(made["means"])


def _poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN and infinities in blocks that are seen and in those that are not, and in statistics."""
    made["means"][:, 3] = np.nan
    made["means"][0, 5] = np.inf
    made["means"][1, 9:] = np.nan
    made["lse"][:, 20] = -np.inf
    made["lse"][:, 23] = np.nan


_BENCH, _CPU = frozenset({"bench"}), frozenset({"bench-cpu"})
_TRANSFORMS = frozenset({"transforms"})

CASES = (
    Case("groups", arrays(), {"count": 5}, tags=_TRANSFORMS),
    Case("one-head-each", arrays(heads=2, size=12), {"count": 4}),
    Case("one-key-head", arrays(heads=16, key_heads=1, size=20, batch=1), {"count": 6}),
    Case("ties", arrays(40, heads=2, levels=1, size=3), {"count": 6, "softmax_scale": 0.5}, tags=_TRANSFORMS),
    Case("equal-weights", arrays(change=_equal_weights), {"count": 5}),
    Case("many-blocks", arrays(300, 2, 2, 4, 1, block_size=1, levels=1), {"count": 40}),
    Case("packed", arrays(40, batch=1, lengths=(7, 0, 1, 22, 6)), {"count": 4}),
    Case("packed-counted", arrays(40, batch=1, lengths=(20, 16), counted=4), {"count": 4}),
    Case("counted", arrays(counted=6), {"count": 6}),
    Case("decoding", arrays(90, caches=(90, 1, 0, 33)), {"count": 7}),
    Case("poisoned", arrays(change=_poisoned), {"count": 6}),
    Case("own-block", arrays(), {"count": 1}),
    Case("own-block-and-the-one-before", arrays(), {"count": 2}),
    Case("all", arrays(), {"count": 10}),
    Case("none", arrays(), {"count": 0}),
    Case("no-queries", arrays(0), {"count": 0}),
    Case("bench-t512-h4-n32", arrays(512, batch=1, size=32, block_size=16), {"count": 8}, tags=_CPU),
    Case("bench-t8192-h64-n128", arrays(8192, 64, 4, 128, 1, block_size=64), {"count": 16}, tags=_BENCH),
    Case("bench-t32768-h64-n512", arrays(32768, 64, 4, 128, 1, block_size=64), {"count": 16}, tags=_BENCH),
)

TOGGLES = {
    "count": Toggle("groups", {"count": 4}),
    "softmax_scale": Toggle("groups", {"softmax_scale": 3.0}),
    "first_blocks": Toggle("packed", drop="first_blocks"),
    "block_counts": Toggle("counted", drop="block_counts"),
}
