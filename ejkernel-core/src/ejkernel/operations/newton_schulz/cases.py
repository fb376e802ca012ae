"""Named problems of `newton_schulz`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    *shape: int, size: float = 1.0, rank: int | None = None, special: Mapping[tuple[int, ...], float] | None = None
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Normal numbers of a size, of a `rank` below the full one, but for `special` ones."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = rng.standard_normal(shape)
        if rank is not None:
            x = x[..., :rank] @ rng.standard_normal((*shape[:-2], rank, shape[-1]))
        x = (size * x).astype(np.float32)
        for place, value in (special or {}).items():
            x[place] = value
        return {"x": x}

    return make


_FLOAT32 = {"dtype": "float32"}
_TRANSFORMS = frozenset({"transforms"})
_NAN = frozenset({"nan"})
_BENCH = frozenset({"bench"})
_EACH = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
"""The first steps of Dion's."""

CASES = (
    Case("wide-float32", arrays(24, 40), _FLOAT32, _TRANSFORMS),
    Case("tall-float32", arrays(40, 24), _FLOAT32, _TRANSFORMS),
    Case("wide", arrays(24, 40)),
    Case("tall", arrays(40, 24)),
    Case("square", arrays(48, 48)),
    Case("square-float32", arrays(48, 48), _FLOAT32),
    Case("batch", arrays(3, 24, 40)),
    Case("batch-float32", arrays(3, 24, 40), _FLOAT32, _TRANSFORMS),
    Case("two-batch-axes", arrays(2, 3, 20, 12), _FLOAT32),
    Case("tails", arrays(2, 77, 129)),
    Case("tails-float32", arrays(2, 77, 129), _FLOAT32),
    Case("several-tiles", arrays(200, 260)),
    Case("several-tiles-float32", arrays(200, 260), _FLOAT32),
    Case("one-step", arrays(24, 40), {"steps": 1}),
    Case("steps-of-their-own", arrays(24, 40), {"coefficients": _EACH, **_FLOAT32}),
    Case("converging", arrays(24, 40), {"coefficients": (1.5, -0.5, 0.0), "steps": 8, **_FLOAT32}),
    Case("no-steps", arrays(24, 40), {"steps": 0}),
    Case("eps", arrays(24, 40), {"eps": 10.0, **_FLOAT32}),
    Case("small", arrays(24, 40, size=1e-4), _FLOAT32),
    Case("large", arrays(24, 40, size=1e15), _FLOAT32, frozenset({"wide-range"})),
    Case("rank-2", arrays(24, 40, rank=2), {"steps": 3, **_FLOAT32}),
    Case("zeros", arrays(8, 16, size=0.0)),
    Case("one-row", arrays(1, 40)),
    Case("one-element", arrays(1, 1)),
    Case("no-rows", arrays(0, 16)),
    Case("no-columns", arrays(6, 0)),
    Case("no-matrices", arrays(0, 6, 8)),
    Case("nan", arrays(3, 24, 40, special={(1, 3, 5): np.nan}), _FLOAT32, _NAN),
    Case("infinite", arrays(3, 24, 40, special={(2, 3, 5): np.inf}), _FLOAT32, _NAN),
    Case("bench-2048x2048", arrays(2048, 2048), tags=_BENCH),
    Case("bench-24x2048x2048", arrays(24, 2048, 2048), tags=_BENCH),
    Case("bench-24x2048x5504", arrays(24, 2048, 5504), tags=_BENCH),
    Case("bench-4096x11008", arrays(4096, 11008), tags=_BENCH),
    Case("bench-512x1024", arrays(512, 1024), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "coefficients": Toggle("steps-of-their-own", {"coefficients": _EACH[:2]}),
    "eps": Toggle("eps", {"eps": 1e-7}),
    "dtype": Toggle("wide", {"dtype": "float32"}, program=True),
}
