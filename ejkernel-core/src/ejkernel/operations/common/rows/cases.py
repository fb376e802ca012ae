"""Named problems of every normalisation over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def norm_arrays(
    *shape: int,
    axis: int | tuple[int, ...] = -1,
    scale: bool = True,
    offset: bool = False,
    magnitude: float = 1.0,
    shift: float = 0.0,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """x, and the parameters that are asked for."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        width = [shape[one] for one in (axis if isinstance(axis, tuple) else (axis,))]
        arrays = {"x": (shift + magnitude * rng.standard_normal(shape)).astype(np.float32)}
        if scale:
            arrays["scale"] = (1 + 0.5 * rng.standard_normal(width)).astype(np.float32)
        if offset:
            arrays["offset"] = rng.standard_normal(width).astype(np.float32)
        return arrays

    return make


NORM_CASES = (
    Case("plain", norm_arrays(4, 33, 64, scale=False)),
    Case("scale", norm_arrays(4, 33, 64)),
    Case("offset-alone", norm_arrays(3, 7, 24, scale=False, offset=True)),
    Case("scale-offset", norm_arrays(2, 3, 5, 48, offset=True), {"epsilon": 1e-5}),
    Case("gemma", norm_arrays(4, 128), {"scale_offset": 1.0}),
    Case("middle-axis", norm_arrays(3, 40, 5, axis=1), {"axis": 1}),
    Case("first-axis", norm_arrays(40, 6, axis=0, offset=True), {"axis": 0}),
    Case("one-axis", norm_arrays(37, offset=True)),
    Case("many-axes", norm_arrays(2, 1, 2, 1, 3, 1, 2, 1, 8, offset=True)),
    Case("two-axes", norm_arrays(3, 5, 8, axis=(1, 2), offset=True), {"axis": (2, 1)}),
    Case("outer-axes", norm_arrays(3, 5, 4, axis=(0, 2)), {"axis": (0, -1)}),
    Case("all-axes", norm_arrays(3, 8, axis=(0, 1), offset=True), {"axis": (0, 1)}),
    Case("width-1", norm_arrays(5, 1), {"epsilon": 0.1}),
    Case("width-0", norm_arrays(5, 0, offset=True)),
    Case("no-rows", norm_arrays(0, 16, offset=True)),
    Case("wide", norm_arrays(3, 4099)),
    Case("far-from-zero", norm_arrays(4, 64, shift=30.0), tags=frozenset({"extreme"})),
    Case("tiny-values", norm_arrays(4, 64, magnitude=1e-3), {"epsilon": 1e-6}),
    Case("far-beyond-its-spread", norm_arrays(3, 300, offset=True, shift=1449.5, magnitude=0.45)),
    Case("far-beyond-its-spread-wide", norm_arrays(2, 4099, shift=-1e5, magnitude=3.0), tags=frozenset({"extreme"})),
    Case("large-squares", norm_arrays(5, 64, magnitude=3e19, offset=True), tags=frozenset({"wide-range"})),
    Case("large-squares-wide", norm_arrays(2, 4099, magnitude=1e25), tags=frozenset({"wide-range"})),
    Case("squares-of-nothing", norm_arrays(5, 64, magnitude=1e-25), tags=frozenset({"wide-range"})),
    Case("bench-16384x4096", norm_arrays(16384, 4096), tags=frozenset({"bench"})),
    Case("bench-131072x128", norm_arrays(131072, 128), tags=frozenset({"bench"})),
    Case("bench-2048x4096", norm_arrays(2048, 4096), tags=frozenset({"bench-cpu"})),
    Case("bench-32768x128", norm_arrays(32768, 128), tags=frozenset({"bench-cpu"})),
)

NORM_TOGGLES = {
    "scale": Toggle("scale", drop="scale"),
    "offset": Toggle("scale-offset", drop="offset"),
    "epsilon": Toggle("tiny-values", {"epsilon": 1e-3}),
    "scale_offset": Toggle("gemma", {"scale_offset": 0.0}),
}
