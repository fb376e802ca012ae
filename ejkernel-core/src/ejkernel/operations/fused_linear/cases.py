"""Named problems of `fused_linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    rows: tuple[int, ...],
    inner: int,
    columns: int,
    parts: str = "",
    *,
    gated: bool = False,
    magnitude: float = 1.0,
    special: Mapping[tuple[int, ...], float] | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`columns` rows of weight; `parts` names others than x and weight; `special` are elements of x."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = (magnitude * rng.standard_normal((*rows, inner))).astype(np.float32)
        for place, value in (special or {}).items():
            x[place] = value
        weight = rng.standard_normal((columns, inner)) / max(inner, 1) ** 0.5
        sizes = {"norm_scale": (inner,), "bias": (columns,), "residual": (*rows, columns // 2 if gated else columns)}
        others = {name: rng.standard_normal(sizes[name]).astype(np.float32) for name in parts.split()}
        return {"x": x, "weight": weight.astype(np.float32), **others}

    return make


def _gated(activation: str) -> dict[str, Any]:
    return {"activation": activation}


_ALL = "norm_scale bias residual"
_TRANSFORMS = frozenset({"transforms"})
_NAN = frozenset({"nan"})
_SPECIAL = {(1, 3): np.nan, (2, 5): np.inf}
_KINDS = ("gelu", "gelu_tanh", "relu", "sigmoid")

CASES = (
    Case("product", arrays((4,), 48, 24), tags=_TRANSFORMS),
    Case("norm", arrays((2, 3), 48, 24, "norm_scale"), tags=_TRANSFORMS),
    Case("residual", arrays((3,), 48, 24, "residual"), tags=_TRANSFORMS),
    Case("bias", arrays((3,), 48, 24, "bias")),
    Case("silu", arrays((2, 2), 48, 40, "norm_scale", gated=True), _gated("silu"), _TRANSFORMS),
    *(Case(kind.replace("_", "-"), arrays((3,), 40, 24, gated=True), _gated(kind)) for kind in _KINDS),
    Case("all", arrays((5,), 48, 24, _ALL), {"epsilon": 1e-5}, _TRANSFORMS),
    Case("all-gated", arrays((5,), 48, 40, _ALL, gated=True), _gated("silu"), _TRANSFORMS),
    Case("gemma", arrays((2,), 48, 24, "norm_scale"), {"scale_offset": 1.0}),
    Case("vector", arrays((), 48, 24, _ALL)),
    Case("many-axes", arrays((2, 1, 3), 32, 16, _ALL)),
    Case("one-row", arrays((1,), 272, 72, _ALL)),
    Case("two-rows-gated", arrays((2,), 272, 72, _ALL, gated=True), _gated("silu")),
    Case("sixteen-rows", arrays((16,), 272, 72, _ALL)),
    Case("more-rows-gated", arrays((3, 7), 272, 72, _ALL, gated=True), _gated("silu")),
    Case("sixty-four-rows", arrays((64,), 80, 40, _ALL)),
    Case("hundred-rows", arrays((100,), 80, 40, _ALL)),
    Case("tails", arrays((3,), 131, 37, _ALL)),
    Case("tails-gated", arrays((18,), 131, 38, _ALL, gated=True), _gated("gelu")),
    Case("tails-of-one-row", arrays((1,), 1031, 38, "norm_scale", gated=True), _gated("silu")),
    Case("deep", arrays((2,), 5504, 16, "residual")),
    Case("deep-norm", arrays((9,), 2050, 16, "norm_scale")),
    Case("tiny-values", arrays((4,), 64, 16, "norm_scale", magnitude=1e-3), {"epsilon": 1e-6}),
    Case("large-squares", arrays((5,), 64, 16, "norm_scale", magnitude=3e19), tags=frozenset({"wide-range"})),
    Case("not-finite", arrays((4,), 40, 16, special=_SPECIAL), tags=_NAN),
    Case("norm-not-finite", arrays((4,), 40, 16, "norm_scale", special=_SPECIAL), tags=_NAN),
    Case("gated-not-finite", arrays((20,), 40, 16, "norm_scale", gated=True, special=_SPECIAL), _gated("silu"), _NAN),
    Case("columns-1", arrays((3,), 40, 1, _ALL)),
    Case("inner-1", arrays((3,), 1, 8, "bias")),
    Case("inner-0", arrays((3,), 0, 8, "bias residual")),
    Case("columns-0", arrays((3,), 16, 0, "norm_scale")),
    Case("no-rows", arrays((0,), 16, 8, _ALL)),
    *(
        Case(f"bench-{rows}x{inner}x{columns}{suffix}", arrays((rows,), inner, columns, parts, gated=gated), options, tags)
        for rows, tags in ((1, frozenset({"bench"})), (16, frozenset({"bench"})), (4, frozenset({"bench-cpu"})))
        for inner, columns, parts, gated, suffix, options in (
            (2048, 4096, "norm_scale", False, "-norm", {}),
            (2048, 2048, "residual", False, "-residual", {}),
            (2048, 11008, "norm_scale", True, "-norm-silu", _gated("silu")),
            (5504, 2048, "residual", False, "-residual", {}),
        )
    ),
)

TOGGLES = {
    "norm_scale": Toggle("norm", drop="norm_scale"),
    "bias": Toggle("bias", drop="bias"),
    "residual": Toggle("residual", drop="residual"),
    "activation": Toggle("silu", {"activation": "relu"}),
    "epsilon": Toggle("tiny-values", {"epsilon": 1e-3}),
    "scale_offset": Toggle("gemma", {"scale_offset": 0.0}),
}
