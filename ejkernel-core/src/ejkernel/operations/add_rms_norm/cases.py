"""Named problems of `add_rms_norm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.common.rows.cases import norm_arrays


def _arrays(*shape: int, axis: int = -1, scale: bool = True, magnitude: float = 1.0, apart: float | None = None) -> Any:
    """x and residual are independent, or, with `apart`, cancel but for so much."""
    make_rows: Callable[[np.random.Generator], Mapping[str, Any]] = norm_arrays(
        *shape, axis=axis, scale=scale, magnitude=magnitude
    )

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        rows = make_rows(rng)
        other = rng.standard_normal(shape).astype(np.float32)
        residual = np.float32(magnitude) * other if apart is None else np.float32(apart) * other - rows["x"]
        return {"x": rows["x"], "residual": residual, **{name: value for name, value in rows.items() if name != "x"}}

    return make


CASES = (
    Case("plain", _arrays(4, 33, 64, scale=False)),
    Case("scale", _arrays(4, 33, 64)),
    Case("gemma", _arrays(4, 128), {"scale_offset": 1.0}),
    Case("middle-axis", _arrays(3, 40, 5, axis=1), {"axis": 1}),
    Case("first-axis", _arrays(40, 6, axis=0), {"axis": 0}),
    Case("one-axis", _arrays(37)),
    Case("many-axes", _arrays(2, 1, 2, 1, 3, 1, 2, 1, 8)),
    Case("width-1", _arrays(5, 1), {"epsilon": 0.1}),
    Case("width-0", _arrays(5, 0)),
    Case("no-rows", _arrays(0, 16)),
    Case("wide", _arrays(3, 4099)),
    Case("cancelling", _arrays(4, 64, apart=0.25), tags=frozenset({"extreme"})),
    Case("tiny-values", _arrays(4, 64, magnitude=1e-3), {"epsilon": 1e-6}),
    Case("large-squares", _arrays(5, 64, magnitude=3e19), tags=frozenset({"wide-range"})),
    Case("bench-16384x4096", _arrays(16384, 4096), tags=frozenset({"bench"})),
    Case("bench-131072x128", _arrays(131072, 128), tags=frozenset({"bench"})),
    Case("bench-2048x4096", _arrays(2048, 4096), tags=frozenset({"bench-cpu"})),
    Case("bench-32768x128", _arrays(32768, 128), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "scale": Toggle("scale", drop="scale"),
    "epsilon": Toggle("tiny-values", {"epsilon": 1e-3}),
    "scale_offset": Toggle("gemma", {"scale_offset": 0.0}),
}
