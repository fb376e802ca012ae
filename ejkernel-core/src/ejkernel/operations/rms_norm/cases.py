"""Named problems of `rms_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.operations._case import Case, Toggle


def _arrays(*shape: int, axis: int = -1, scale: bool = True, offset: bool = False, magnitude: float = 1.0) -> Any:
    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        width = shape[axis]
        arrays = {"x": (magnitude * rng.standard_normal(shape)).astype(np.float32)}
        if scale:
            arrays["scale"] = (1 + 0.5 * rng.standard_normal(width)).astype(np.float32)
        if offset:
            arrays["offset"] = rng.standard_normal(width).astype(np.float32)
        return arrays

    return make


CASES = (
    Case("plain", _arrays(4, 33, 64, scale=False)),
    Case("scale", _arrays(4, 33, 64), tags=frozenset({"transforms"})),
    Case("scale-offset", _arrays(2, 3, 5, 48, offset=True), {"epsilon": 1e-5}),
    Case("gemma", _arrays(4, 128), {"scale_offset": 1.0}),
    Case("middle-axis", _arrays(3, 40, 5, axis=1), {"axis": 1}),
    Case("one-axis", _arrays(37)),
    Case("width-1", _arrays(5, 1), {"epsilon": 0.5}),  # a small epsilon leaves a gradient made of cancellation
    Case("no-rows", _arrays(0, 16)),
    Case("wide", _arrays(3, 4099)),
    Case("tiny-values", _arrays(4, 64, magnitude=1e-3), {"epsilon": 1e-6}),
    Case("bench-16384x4096", _arrays(16384, 4096), tags=frozenset({"bench"})),
    Case("bench-131072x128", _arrays(131072, 128), tags=frozenset({"bench"})),
)

TOGGLES = {
    "scale": Toggle("scale", drop="scale"),
    "offset": Toggle("scale-offset", drop="offset"),
    "epsilon": Toggle("tiny-values", {"epsilon": 1e-3}),
    "scale_offset": Toggle("gemma", {"scale_offset": 0.0}),
}
