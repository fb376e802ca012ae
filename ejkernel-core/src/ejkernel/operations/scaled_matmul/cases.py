"""Named problems of `scaled_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, most: int) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-most - 1, most, shape, np.int8, endpoint=True)
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def arrays(
    rows: tuple[int, ...],
    inner: int,
    columns: int,
    left: str = E4M3,
    right: str = E4M3,
    *,
    transpose: bool = False,
    scales: str = "row column",
    most: int = 7,
    special: Mapping[tuple[int, int], float] | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`scales` names those that are no single number; `most` is the largest int8; `special` are elements of lhs."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        lhs = _values(rng, (*rows, inner), left, most)
        for place, value in (special or {}).items():
            lhs[place] = value
        unit = max(inner, 1) ** -0.5 / (most**2 / 3 if left == "int8" else 1)
        return {
            "lhs": lhs,
            "rhs": _values(rng, (columns, inner) if transpose else (inner, columns), right, most),
            "lhs_scale": np.asarray(unit * rng.uniform(0.5, 2.0, rows if "row" in scales else ()), np.float32),
            "rhs_scale": np.asarray(rng.uniform(0.5, 2.0, columns if "column" in scales else ()), np.float32),
        }

    return make


_FLOAT32 = {"out_dtype": "float32"}
_TRANSPOSED = {**_FLOAT32, "transpose_rhs": True}
_TRANSFORMS = frozenset({"transforms"})
_WIDE_RANGE = frozenset({"wide-range"})
_NAN = frozenset({"nan"})
_BENCH = frozenset({"bench", "bench-float8"})
_BENCH_CPU = frozenset({"bench-cpu"})

CASES = (
    Case("float8", arrays((12,), 32, 24), _FLOAT32, _TRANSFORMS),
    Case("float8-transposed", arrays((12,), 32, 24, transpose=True), _TRANSPOSED),
    Case("float8-one-scale", arrays((12,), 32, 16, scales=""), _FLOAT32, _TRANSFORMS),
    Case("float8-row-scale", arrays((12,), 32, 16, scales="row"), _FLOAT32),
    Case("float8-column-scale", arrays((12,), 32, 16, scales="column"), _FLOAT32),
    Case("float8-gradient-of-lhs", arrays((12,), 32, 16, E5M2, E4M3, transpose=True), _TRANSPOSED),
    Case("float8-gradient-of-rhs", arrays((12,), 32, 16, E4M3, E5M2, scales=""), _FLOAT32),
    Case("float8-e5m2", arrays((12,), 32, 16, E5M2, E5M2), _FLOAT32),
    Case("float8-tails", arrays((77,), 33, 17, transpose=True), _TRANSPOSED),
    Case("float8-deep", arrays((8,), 7168, 16), _FLOAT32),
    Case("float8-batch", arrays((2, 3, 5), 32, 16, transpose=True), _TRANSPOSED),
    Case("float8-one-row", arrays((1,), 48, 40), _FLOAT32),
    Case("float8-vector", arrays((), 48, 40), _FLOAT32),
    Case("float8-square", arrays((12,), 16, 16), _FLOAT32),
    Case("float8-nan", arrays((6,), 32, 16, special={(1, 3): np.nan, (4, 0): np.nan}), _FLOAT32, _NAN),
    Case(
        "float8-e5m2-infinite",
        arrays((6,), 32, 16, E5M2, E5M2, special={(1, 3): np.inf, (2, 5): -np.inf, (4, 0): np.nan}),
        _FLOAT32,
        _NAN,
    ),
    Case("int8", arrays((12,), 32, 24, "int8", "int8"), _FLOAT32, _TRANSFORMS),
    Case("int8-transposed-one-scale", arrays((12,), 32, 24, "int8", "int8", transpose=True, scales=""), _TRANSPOSED),
    Case("int8-tails-batch", arrays((3, 7), 33, 17, "int8", "int8"), _FLOAT32),
    Case("int8-whole-range", arrays((8,), 64, 16, "int8", "int8", most=127), _FLOAT32, _WIDE_RANGE),
    Case("int8-deep", arrays((8,), 7168, 16, "int8", "int8", most=127), _FLOAT32, _WIDE_RANGE),
    Case("no-rows", arrays((0,), 16, 8), _FLOAT32),
    Case("inner-0", arrays((6,), 0, 8), _FLOAT32),
    Case("columns-0", arrays((6,), 16, 0, "int8", "int8"), _FLOAT32),
    Case("columns-1", arrays((6,), 16, 1), _FLOAT32),
    Case("precision", arrays((12,), 32, 16), {**_FLOAT32, "precision": "highest"}),
    Case("bench-float8-8192x4096x4096", arrays((8192,), 4096, 4096), tags=_BENCH),
    Case("bench-float8-8192x4096x4096-one-scale", arrays((8192,), 4096, 4096, scales=""), tags=_BENCH),
    Case("bench-int8-8192x4096x4096", arrays((8192,), 4096, 4096, "int8", "int8"), tags=frozenset({"bench"})),
    Case("bench-float8-256x1024x1024", arrays((256,), 1024, 1024), tags=_BENCH_CPU),
    Case("bench-int8-256x1024x1024", arrays((256,), 1024, 1024, "int8", "int8"), tags=_BENCH_CPU),
)

TOGGLES = {
    "out_dtype": Toggle("float8", {"out_dtype": "bfloat16"}),
    "transpose_rhs": Toggle("float8-square", {"transpose_rhs": True}),
    "precision": Toggle("precision", {"precision": "default"}, program=True),
}
