"""Named problems of `sparse_latent_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle

Change = Callable[[np.random.Generator, dict[str, Any]], None]


def _arrays(
    queries: int = 13,
    tokens: int | None = None,
    heads: int = 4,
    size: int = 12,
    batch: int = 2,
    *,
    slots: int = 5,
    magnitude: float = 1.0,
    change: Change | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Random distinct tokens, causal where there are as many tokens as queries; -1 where there are fewer."""
    tokens = queries if tokens is None else tokens

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        indices = np.full((batch, queries, slots), -1, np.int32)
        for row, query in np.ndindex(batch, queries):
            chosen = rng.permutation(query + 1 if tokens == queries else tokens)[:slots]
            indices[row, query, : len(chosen)] = chosen
        arrays = {
            "query": (magnitude * rng.standard_normal((batch, queries, heads, size))).astype(np.float32),
            "key_value": (magnitude * rng.standard_normal((batch, tokens, size))).astype(np.float32),
            "token_indices": indices,
        }
        if change is not None:
            change(rng, arrays)
        return arrays

    return make


def _any_indices(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """Negative numbers, tokens that do not exist, repetitions."""
    made["token_indices"] = rng.integers(-4, 18, made["token_indices"].shape).astype(np.int32)


def _poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN and infinities in tokens that nobody names, and in a query that names none."""
    made["token_indices"] = np.where(np.isin(made["token_indices"], (0, 3, 7)), -1, made["token_indices"])
    made["token_indices"][:, 6] = -1
    made["key_value"][:, [0, 3]] = np.nan
    made["key_value"][:, 7] = np.inf
    made["query"][:, 6] = np.nan


_BENCH = frozenset({"bench"})

CASES = (
    Case("rope-part", _arrays(), {"value_size": 8}, tags=frozenset({"transforms"})),
    Case("all-values", _arrays()),
    Case("one-head", _arrays(heads=1, batch=1), {"value_size": 5}),
    Case("more-tokens", _arrays(5, 19), {"value_size": 8}),
    Case("one-slot", _arrays(slots=1), {"value_size": 8}),
    Case("no-slots", _arrays(4, slots=0)),
    Case("every-token", _arrays(9, slots=9), {"value_size": 8, "return_lse": True}),
    Case("any-indices", _arrays(change=_any_indices), {"value_size": 8, "return_lse": True}),
    Case("scale-and-lse", _arrays(), {"softmax_scale": 0.75, "return_lse": True}),
    Case("poisoned", _arrays(change=_poisoned), {"value_size": 8, "return_lse": True}),
    Case("length-1", _arrays(1)),
    Case("length-0", _arrays(0)),
    Case("large-logits", _arrays(magnitude=15.0), {"return_lse": True}, tags=frozenset({"extreme"})),
    Case(
        "bench-t256-h16-k128",
        _arrays(256, heads=16, size=192, batch=1, slots=128),
        {"value_size": 128},
        tags=frozenset({"bench-cpu"}),
    ),
    Case("bench-t8192-h128-k2048", _arrays(8192, heads=128, size=576, batch=1, slots=2048), {"value_size": 512}, tags=_BENCH),
)

TOGGLES = {
    "value_size": Toggle("rope-part", {"value_size": 6}),
    "softmax_scale": Toggle("rope-part", {"softmax_scale": 0.1}),
    "return_lse": Toggle("rope-part", {"return_lse": True}, program=True),
}
