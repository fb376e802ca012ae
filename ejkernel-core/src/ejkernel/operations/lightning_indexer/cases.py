"""Named problems of `lightning_indexer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.lightning_indexer.interface import FLOAT8

Change = Callable[[np.random.Generator, dict[str, Any]], None]


def arrays(
    queries: int = 13,
    tokens: int | None = None,
    heads: int = 4,
    size: int = 12,
    batch: int = 2,
    *,
    levels: int = 0,
    lengths: tuple[int, ...] | None = None,
    scaled: bool = False,
    stored: str = "float32",
    change: Change | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments. Integers from `-levels` to `levels` have scores that are exact in every dtype, and many ties."""
    tokens = queries if tokens is None else tokens

    def values(rng: np.random.Generator, *shape: int) -> Any:
        return rng.integers(-levels, levels + 1, shape) if levels else rng.standard_normal(shape)

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        made: dict[str, Any] = {
            "query": values(rng, batch, queries, heads, size).astype(jnp.dtype(stored)),
            "key": values(rng, batch, tokens, size).astype(jnp.dtype(stored)),
            "weights": values(rng, batch, queries, heads).astype(np.float32),
        }
        if lengths is not None:
            made["kv_lens"] = np.asarray(lengths, np.int32)
        if scaled:
            made["key_scale"] = 2.0 ** rng.integers(-2, 3, (batch, tokens)).astype(np.float32)
        if change is not None:
            change(rng, made)
        return made

    return make


def _equal_scores(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """Every score is 0, of negative weights too."""
    made["key"] = np.zeros_like(made["key"])


def _poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN and infinities in tokens that exist and in those that do not."""
    made["key"][:, [2, 5]] = np.nan
    made["key"][:, 7] = np.inf
    made["key"][0, 11:] = np.nan
    made["key"][1, 14:] = np.inf
    made["weights"][:, 3] = np.nan


_BENCH, _CPU = frozenset({"bench"}), frozenset({"bench-cpu"})
_TRANSFORMS = frozenset({"transforms"})

CASES = (
    Case("causal", arrays(8), {"k": 5}, tags=_TRANSFORMS),
    Case("every-token", arrays(), {"k": 5, "causal": False}),
    Case("ties", arrays(16, levels=1, size=3), {"k": 6}, tags=_TRANSFORMS),
    Case("ties-of-many", arrays(5, 300, levels=2, size=4, batch=1), {"k": 40, "causal": False}),
    Case("equal-scores", arrays(9, change=_equal_scores), {"k": 4, "causal": False}),
    Case("lengths", arrays(3, 21, levels=3, lengths=(21, 8)), {"k": 7}),
    Case("lengths-of-nothing", arrays(3, 21, lengths=(0, 2)), {"k": 7}),
    Case("lengths-not-causal", arrays(3, 21, levels=3, lengths=(21, 8)), {"k": 10, "causal": False}),
    Case("one-token", arrays(1, 70, heads=3, lengths=(70, 33)), {"k": 16}),
    Case("many-heads", arrays(6, heads=70, size=20, batch=1, levels=2), {"k": 3}),
    Case("key-scale", arrays(9, levels=3, scaled=True), {"k": 4}),
    Case("float8", arrays(9, 20, levels=7, stored=FLOAT8, scaled=True), {"k": 6, "causal": False}),
    Case("poisoned", arrays(6, 19, levels=3, lengths=(11, 14), change=_poisoned), {"k": 8}),
    Case("all", arrays(7), {"k": 7}),
    Case("none", arrays(4), {"k": 0}),
    Case("no-tokens", arrays(4, 0), {"k": 0}),
    Case("no-queries", arrays(0, 5), {"k": 3}),
    Case("no-heads", arrays(4, heads=0), {"k": 2}),
    Case("bench-t256-h4-k64", arrays(256, heads=4, size=32, batch=1), {"k": 64}, tags=_CPU),
    Case("bench-t8192-h64-k2048", arrays(8192, heads=64, size=128, batch=1), {"k": 2048}, tags=_BENCH),
    Case("bench-t1-s32768-h64-k2048", arrays(1, 32768, 64, 128, 64, lengths=(32768,) * 64), {"k": 2048}, tags=_BENCH),
)

TOGGLES = {"k": Toggle("causal", {"k": 3}), "key_scale": Toggle("key-scale", drop="key_scale")}
