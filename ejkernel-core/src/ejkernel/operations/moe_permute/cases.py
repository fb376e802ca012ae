"""Named problems of `moe_permute`, and makers of choices that `moe_unpermute` shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def choices(rng: np.random.Generator, tokens: int, k: int, experts: int, *, dropped: float = 0.0, skewed: bool = False) -> Any:
    """Different experts of each token `[tokens, k]`, all from the first k if `skewed`; a share `dropped`, and the last token's, are
    -1."""
    found = np.argsort(rng.random((tokens, k if skewed else experts)), axis=1)[:, :k].astype(np.int32)
    if dropped:
        found[rng.random(found.shape) < dropped] = -1
        found[-1:] = -1
    return found


def arrays(
    tokens: int, width: int, k: int, experts: int, *, dropped: float = 0.0, skewed: bool = False
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments; tokens of which no copy is left hold NaN."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        found = choices(rng, tokens, k, experts, dropped=dropped, skewed=skewed)
        x = rng.standard_normal((tokens, width)).astype(np.float32)
        x[(found < 0).all(axis=1)] = np.nan
        return {"x": x, "experts": found}

    return make


def _foreign(rng: np.random.Generator) -> Mapping[str, Any]:
    """Experts of other devices, on both sides of those held here."""
    made = arrays(12, 8, 3, 8)(rng)
    return {**made, "experts": made["experts"] - 3}


_BENCH = frozenset({"bench"})

CASES = (
    Case("plain", arrays(9, 16, 2, 4), {"num_experts": 4}, tags=frozenset({"transforms"})),
    Case("dropped", arrays(13, 8, 3, 8, dropped=0.4), {"num_experts": 8}, tags=frozenset({"transforms"})),
    Case("foreign", _foreign, {"num_experts": 4}),
    Case("one-choice", arrays(21, 5, 1, 8), {"num_experts": 8}),
    Case("to-one-expert", arrays(17, 8, 1, 16, skewed=True), {"num_experts": 16}),
    Case("empty-experts", arrays(17, 8, 2, 32, skewed=True), {"num_experts": 32}),
    Case("all-dropped", arrays(5, 8, 2, 4, dropped=1.0), {"num_experts": 4}),
    Case("one-expert", arrays(6, 7, 1, 1), {"num_experts": 1}),
    Case("one-token", arrays(1, 33, 8, 256), {"num_experts": 256}),
    Case("no-tokens", arrays(0, 8, 2, 4), {"num_experts": 4}),
    Case("width-0", arrays(5, 0, 2, 4), {"num_experts": 4}),
    Case("tail", arrays(70, 130, 4, 12, dropped=0.1), {"num_experts": 12}),
    Case("many", arrays(300, 24, 8, 64), {"num_experts": 64}),
    Case("bench-t2048-d512-e64-k8", arrays(2048, 512, 8, 64), {"num_experts": 64}, tags=frozenset({"bench-cpu"})),
    Case("bench-t8192-d4096-e8-k2", arrays(8192, 4096, 2, 8), {"num_experts": 8}, tags=_BENCH),
    Case("bench-t16384-d2048-e64-k8", arrays(16384, 2048, 8, 64), {"num_experts": 64}, tags=_BENCH),
    Case("bench-step-t64-d2048-e64-k8", arrays(64, 2048, 8, 64), {"num_experts": 64}, tags=_BENCH),
)

TOGGLES = {"num_experts": Toggle("plain", {"num_experts": 3})}
