"""Named problems of `native_sparse_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle

Change = Callable[[np.random.Generator, dict[str, Any]], None]


def _arrays(
    length: int = 22,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 8,
    value_size: int | None = None,
    batch: int = 2,
    *,
    slots: int = 3,
    block_size: int = 4,
    magnitude: float = 1.0,
    change: Change | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Random distinct blocks among those that a query of one sequence has, and its own; -1 where there are fewer."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int, factor: float = 1.0) -> Any:
            return (factor * rng.standard_normal(shape)).astype(np.float32)

        indices = np.full((batch, length, key_heads, slots), -1, np.int32)
        for row, token, head in np.ndindex(*indices.shape[:3]):
            own = token // block_size
            chosen = np.concatenate([[own], rng.permutation(own)])[:slots]
            indices[row, token, head, : len(chosen)] = rng.permutation(chosen)
        arrays = {
            "query": normal(batch, length, heads, size, factor=magnitude),
            "key": normal(batch, length, key_heads, size, factor=magnitude),
            "value": normal(batch, length, key_heads, value_size or size),
            "block_indices": indices,
        }
        if change is not None:
            change(rng, arrays)
        return arrays

    return make


def _random_indices(least: int, most: int) -> Change:
    """Anything goes: negative numbers, the future, repetitions."""

    def change(rng: np.random.Generator, made: dict[str, Any]) -> None:
        made["block_indices"] = rng.integers(least, most, made["block_indices"].shape).astype(np.int32)

    return change


def _random_counts(rng: np.random.Generator, made: dict[str, Any]) -> None:
    shape = made["block_indices"].shape
    made["block_counts"] = rng.integers(0, shape[-1] + 2, shape[:-1]).astype(np.int32)


def _packed(*bounds: int, poison: bool = False) -> Change:
    def change(rng: np.random.Generator, made: dict[str, Any]) -> None:
        _random_indices(-1, 4)(rng, made)
        made["cu_seqlens"] = np.array(bounds, np.int32)
        if poison:
            for name in ("query", "key", "value"):
                made[name][:, bounds[-1] :] = np.nan

    return change


def _poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN and infinities in keys that no query names, and in queries that name nothing."""
    made["block_indices"] = np.where(made["block_indices"] == 2, -1, made["block_indices"])
    made["block_indices"][:, 13] = -1
    for name, bad in (("key", np.nan), ("value", np.inf)):
        made[name][:, 8:12] = bad
    made["query"][:, 13] = np.nan


_FOUR = {"block_size": 4}
_TRANSFORMS = frozenset({"transforms"})
_BENCH = frozenset({"bench"})

CASES = (
    Case("gqa", _arrays(), _FOUR, tags=_TRANSFORMS),
    Case("packed", _arrays(batch=1, change=_packed(0, 5, 6, 19)), _FOUR, tags=_TRANSFORMS),
    Case("one-head", _arrays(heads=1, key_heads=1, batch=1), _FOUR),
    Case("mqa", _arrays(heads=3, key_heads=1), _FOUR),
    Case("value-size", _arrays(17, size=12, value_size=5), _FOUR),
    Case("block-size-1", _arrays(9, slots=4, block_size=1), {"block_size": 1}),
    Case("block-longer-than-sequence", _arrays(9, block_size=16), {"block_size": 16}),
    Case("no-slots", _arrays(5, slots=0), _FOUR),
    Case("scale-and-lse", _arrays(), {**_FOUR, "softmax_scale": 0.75, "return_lse": True}),
    Case("any-indices", _arrays(change=_random_indices(-3, 9)), {**_FOUR, "return_lse": True}),
    Case("count", _arrays(slots=4), {**_FOUR, "block_counts": 2}),
    Case("counts", _arrays(slots=4, change=_random_counts), _FOUR),
    Case("packed-empty-sequences", _arrays(batch=1, change=_packed(0, 0, 9, 9, 22, 22)), _FOUR),
    Case("packed-unused-tail", _arrays(batch=1, change=_packed(0, 7, 13, poison=True)), {**_FOUR, "return_lse": True}),
    Case("packed-no-sequence", _arrays(5, batch=1, change=_packed(0)), _FOUR),
    Case("poisoned", _arrays(change=_poisoned), _FOUR),
    Case("length-1", _arrays(1), _FOUR),
    Case("length-0", _arrays(0), _FOUR),
    Case("large-logits", _arrays(magnitude=20.0), {**_FOUR, "return_lse": True}, tags=frozenset({"extreme"})),
    Case(
        "bench-t1024-h8-d64",
        _arrays(1024, 8, 2, 64, batch=1, slots=8, block_size=32),
        {"block_size": 32},
        tags=frozenset({"bench-cpu"}),
    ),
    Case("bench-t32768-h64-d128", _arrays(32768, 64, 4, 128, batch=1, slots=16, block_size=64), tags=_BENCH),
)

TOGGLES = {
    "sequence_starts": Toggle("packed", drop="cu_seqlens"),
    "block_size": Toggle("gqa", {"block_size": 3}),
    "softmax_scale": Toggle("gqa", {"softmax_scale": 0.1}),
    "return_lse": Toggle("gqa", {"return_lse": True}, program=True),
}
