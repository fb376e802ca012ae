"""Named problems of `moe_unpermute`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.moe_permute.cases import choices


def arrays(
    tokens: int, width: int, k: int, experts: int = 4, *, dropped: float = 0.0, weights: bool = True
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments; rows of no group and weights without a row hold NaN."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        found = choices(rng, tokens, k, experts, dropped=dropped)
        row = np.argsort(np.argsort(np.where(found < 0, experts, found).reshape(-1), kind="stable")).reshape(found.shape)
        rows = rng.standard_normal((tokens * k, width)).astype(np.float32)
        rows[np.count_nonzero(found >= 0) :] = np.nan
        made: dict[str, Any] = {"rows": rows, "positions": np.where(found < 0, ~row, row).astype(np.int32)}
        if weights:
            made["weights"] = np.where(found < 0, np.nan, rng.random(found.shape)).astype(np.float32)
        return made

    return make


_BENCH = frozenset({"bench"})

CASES = (
    Case("weights", arrays(9, 16, 2)),
    Case("dropped", arrays(13, 8, 3, dropped=0.4), tags=frozenset({"transforms"})),
    Case("sum", arrays(9, 16, 2, weights=False), tags=frozenset({"transforms"})),
    Case("sum-dropped", arrays(13, 8, 3, dropped=0.4, weights=False)),
    Case("one-choice", arrays(21, 5, 1)),
    Case("all-dropped", arrays(5, 8, 2, dropped=1.0)),
    Case("one-token", arrays(1, 33, 8, 256)),
    Case("no-tokens", arrays(0, 8, 2)),
    Case("width-0", arrays(5, 0, 2)),
    Case("tail", arrays(70, 130, 4, 12, dropped=0.1)),
    Case("many", arrays(300, 24, 8, 64)),
    Case("bench-t2048-d512-e64-k8", arrays(2048, 512, 8, 64), tags=frozenset({"bench-cpu"})),
    Case("bench-t8192-d4096-e8-k2", arrays(8192, 4096, 2, 8), tags=_BENCH),
    Case("bench-t16384-d2048-e64-k8", arrays(16384, 2048, 8, 64), tags=_BENCH),
    Case("bench-step-t64-d2048-e64-k8", arrays(64, 2048, 8, 64), tags=_BENCH),
)

TOGGLES = {"weights": Toggle("weights", drop="weights")}
