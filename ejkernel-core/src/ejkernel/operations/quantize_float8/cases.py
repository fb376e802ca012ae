"""Named problems of `quantize_float8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    *shape: int, scale: float | None = 0.01, size: float = 1.0, special: Mapping[tuple[int, ...], float] | None = None
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Normal numbers of a size, but for `special` ones; of `scale` None that which fits."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = rng.standard_normal(shape).astype(np.float32) * np.float32(size)
        for place, value in (special or {}).items():
            x[place] = value
        return {"x": x} if scale is None else {"x": x, "scale": np.float32(scale)}

    return make


_TRANSPOSED = {"transposed": True}
_E5M2 = {"dtype": "float8_e5m2"}
_NAN = frozenset({"nan"})

CASES = (
    Case("fitting", arrays(24, 32, scale=None), _TRANSPOSED),
    Case("plain", arrays(24, 32), tags=frozenset({"transforms"})),
    Case("transposed", arrays(24, 32), _TRANSPOSED, frozenset({"transforms"})),
    Case("e5m2", arrays(24, 32), {**_E5M2, **_TRANSPOSED}),
    Case("saturated", arrays(24, 32, scale=1e-3), _TRANSPOSED),
    Case("subnormal", arrays(24, 32, scale=40.0), _TRANSPOSED),
    Case("tails", arrays(77, 33, scale=0.03), _TRANSPOSED),
    Case("narrow", arrays(130, 1), _TRANSPOSED),
    Case("one-row", arrays(1, 200), _TRANSPOSED),
    Case("batch", arrays(2, 3, 5, 32)),
    Case("vector", arrays(48)),
    Case("zeros", arrays(4, 8, scale=None, size=0.0)),
    Case("no-rows", arrays(0, 16), _TRANSPOSED),
    Case("no-columns", arrays(6, 0), _TRANSPOSED),
    Case("infinite", arrays(12, 32, special={(3, 5): np.inf, (4, 0): -np.inf}), _TRANSPOSED, _NAN),
    Case("nan", arrays(12, 32, special={(3, 5): np.nan, (4, 0): np.inf}), _TRANSPOSED, _NAN),
    Case("bench-8192x2048", arrays(8192, 2048), _TRANSPOSED, frozenset({"bench"})),
    Case("bench-8192x5504-e5m2", arrays(8192, 5504), {**_E5M2, **_TRANSPOSED}, frozenset({"bench"})),
    Case("bench-8192x5504-as-it-lies", arrays(8192, 5504), tags=frozenset({"bench"})),
    Case("bench-1024x1024", arrays(1024, 1024), _TRANSPOSED, frozenset({"bench-cpu"})),
)

TOGGLES = {
    "dtype": Toggle("e5m2", {"dtype": "float8_e4m3fn"}),
    "transposed": Toggle("transposed", {"transposed": False}),
}
