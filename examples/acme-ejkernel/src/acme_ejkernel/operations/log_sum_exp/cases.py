"""Named problems for tests, benchmarks and tuning, and how to see that each optional field is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.operation import Case, Toggle


def _rows(*shape: int, factor: float = 1.0) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    return lambda rng: {"x": (factor * rng.standard_normal(shape)).astype(np.float32)}


CASES = (
    Case("plain", _rows(4, 33)),
    Case("scale", _rows(5, 64), {"scale": -0.5}),
    Case("one-element", _rows(3, 1)),
    Case("no-rows", _rows(0, 8)),
    Case("large", _rows(4, 33, factor=1e4), tags=frozenset({"extreme"})),
    Case("bench-4096x4096", _rows(4096, 4096), tags=frozenset({"bench", "bench-cpu"})),
)
TOGGLES = {"scale": Toggle("scale", {"scale": 1.0})}
