"""Named problems of `grouped_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.round(values * 64).clip(-127, 127).astype(np.int8) if dtype == "int8" else values.astype(jnp.dtype(dtype))


def _arrays(
    rows: int,
    inner: int,
    columns: int,
    sizes: tuple[int, ...],
    *,
    transpose: bool = False,
    existing: bool = False,
    offset: int | None = None,
    held: int | None = None,
    poison: bool = True,
    stored: str = "float32",
    left: str = "float32",
    scale: str = "",
    row_scale: str = "",
    bias: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Rows whose group has no matrix hold NaN if `poison`. `held` is the number of matrices, from group `offset` on.

    `stored` is the dtype of rhs and `left` that of lhs; `scale` is "" for none, "group" for `[G]` or "column" for `[G,N]`, and
    `row_scale` "" for none, "one" for a number or "row" for `[M]`, where rows without a matrix hold NaN too.
    """

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        count, first = held if held is not None else len(sizes), offset or 0
        group = np.repeat(np.arange(len(sizes)), sizes)
        group = np.concatenate([group, np.full(rows - group.size, -1)])
        lhs = rng.standard_normal((rows, inner)).astype(np.float32)
        shrunk = max(inner, 1) ** 0.5
        narrow = left != "float32"  # float8 holds numbers of size 1 best; what makes the sum so is left to the scale
        foreign = ((group < first) | (group >= first + count)) & poison
        lhs[foreign] = np.nan
        shape = (count, columns, inner) if transpose else (count, inner, columns)
        arrays: dict[str, Any] = {
            "lhs": lhs.astype(jnp.dtype(left)),
            "rhs": _stored(rng.standard_normal(shape) / (1.0 if narrow else shrunk), stored),
            "group_sizes": np.array(sizes, np.int32),
        }
        if offset is not None:
            arrays["group_offset"] = np.array(offset, np.int32)
        if existing:
            arrays["existing_out"] = rng.standard_normal((rows, columns)).astype(np.float32)
        if scale:
            sizes_of = (count, columns) if scale == "column" else (count,)
            unit = 1 / shrunk if narrow else {"int8": 1 / 64}.get(stored, 1.0)
            arrays["rhs_scale"] = (unit * rng.uniform(0.5, 2.0, sizes_of)).astype(np.float32)
        if bias:
            arrays["bias"] = rng.standard_normal((count, columns)).astype(np.float32)
        if row_scale:
            scales = rng.uniform(0.5, 2.0, () if row_scale == "one" else rows)
            arrays["lhs_scale"] = np.where(foreign, np.nan, scales).astype(np.float32) if scales.ndim else np.float32(scales)
        return arrays

    return make


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def _float8(
    rows: int, inner: int, columns: int, sizes: tuple[int, ...], **changes: Any
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Both sides in e4m3, a scale for every row and every column, matrices `[G,N,K]`; with changes."""
    usual: dict[str, Any] = {"left": E4M3, "stored": E4M3, "scale": "column", "row_scale": "row", "transpose": True}
    return _arrays(rows, inner, columns, sizes, **{**usual, **changes})


_TRANSPOSED = {"transpose_rhs": True}
_FLOAT32_OUT = {"preferred_element_type": "float32"}
_NARROW = {**_TRANSPOSED, **_FLOAT32_OUT}
"""Results in float32, in whatever dtype the scales are: what is made of exact products is exact too."""
_BENCH = frozenset({"bench"})
_BENCH_FLOAT8 = frozenset({"bench-float8"})
_TRANSFORMS = frozenset({"transforms"})

CASES = (
    Case("plain", _arrays(48, 32, 24, (16, 20, 12)), tags=_TRANSFORMS),
    Case("empty-groups", _arrays(40, 16, 24, (0, 7, 0, 0, 33, 0))),
    Case("unused-rows", _arrays(40, 16, 24, (5, 0, 9))),
    Case("skewed", _arrays(131, 16, 8, (1, 127, 2, 1))),
    Case("all-empty", _arrays(9, 8, 8, (0, 0, 0))),
    Case("transposed", _arrays(48, 32, 24, (16, 20, 12), transpose=True), {"transpose_rhs": True}),
    Case("square-transposed", _arrays(20, 16, 16, (9, 11), transpose=True), {"transpose_rhs": True}),
    Case("existing-out", _arrays(40, 16, 24, (5, 0, 9), existing=True)),
    Case("shard-of-groups", _arrays(40, 16, 24, (5, 6, 7, 8, 9), offset=1, held=2)),
    Case("last-shard-existing-out", _arrays(40, 16, 24, (5, 6, 7, 8, 9), offset=3, held=2, existing=True)),
    Case("first-shard", _arrays(40, 16, 24, (5, 6, 7, 8, 9), offset=0, held=2)),
    Case("offset-past-held", _arrays(30, 16, 8, (9, 12, 9), offset=1, held=3, poison=False)),
    Case("float32-out", _arrays(24, 16, 8, (10, 14)), {"preferred_element_type": "float32"}),
    Case("precision", _arrays(24, 16, 8, (10, 14)), {"precision": "highest"}),
    Case("one-row", _arrays(1, 16, 8, (0, 1, 0))),
    Case("few-rows-many-groups", _arrays(3, 16, 8, (0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0))),
    Case("no-rows", _arrays(0, 16, 8, (0, 0))),
    Case("no-groups", _arrays(6, 16, 8, ())),
    Case("inner-0", _arrays(6, 0, 8, (2, 3), existing=True)),
    Case("columns-0", _arrays(6, 5, 0, (2, 4))),
    Case("columns-1", _arrays(6, 5, 1, (2, 4))),
    Case("scale-bias", _arrays(40, 16, 24, (5, 0, 9), scale="group", bias=True, existing=True), tags=_TRANSFORMS),
    Case("column-scale-shard", _arrays(40, 16, 24, (5, 6, 7, 8, 9), offset=1, held=2, scale="column")),
    Case("int8", _arrays(24, 16, 8, (10, 12), stored="int8", scale="column", bias=True)),
    Case(
        "float8-transposed",
        _arrays(24, 16, 8, (10, 0, 12), stored="float8_e4m3fn", scale="group", transpose=True),
        {"transpose_rhs": True},
    ),
    Case("row-scale", _arrays(40, 16, 24, (5, 0, 9), row_scale="row", scale="column")),
    Case(
        "one-scale-shard",
        _arrays(40, 16, 24, (5, 6, 7, 8, 9), offset=1, held=2, row_scale="one", bias=True, existing=True, transpose=True),
        {"transpose_rhs": True},
    ),
    Case("float8", _float8(40, 16, 24, (5, 0, 9), bias=True), _NARROW, tags=_TRANSFORMS),
    Case("float8-shard", _float8(40, 16, 24, (5, 6, 7, 8, 9), offset=1, held=2, left=E5M2, transpose=False), _FLOAT32_OUT),
    Case("float8-one-scale", _float8(77, 33, 17, (30, 1, 40), stored=E5M2, scale="group", row_scale="one"), _NARROW),
    Case("float8-unscaled", _float8(24, 16, 8, (10, 0, 12), scale="", row_scale=""), _NARROW),
    Case("float8-deep", _float8(24, 7168, 8, (10, 12)), _NARROW),
    Case("odd-sizes", _arrays(77, 33, 17, (30, 1, 46))),
    Case("bench-8192-8x4096x14336", _arrays(8192, 4096, 14336, (1024,) * 8), tags=_BENCH),
    Case("bench-32768-32x7168x4096", _arrays(32768, 7168, 4096, (1024,) * 32), tags=_BENCH),
    Case("bench-131072-128x2048x768", _arrays(131072, 2048, 768, (1024,) * 128), tags=_BENCH),
    Case("bench-float8-8192-8x4096x14336", _float8(8192, 4096, 14336, (1024,) * 8), _TRANSPOSED, _BENCH_FLOAT8),
    Case("bench-float8-32768-32x7168x4096", _float8(32768, 7168, 4096, (1024,) * 32), _TRANSPOSED, _BENCH_FLOAT8),
    Case("bench-float8-131072-128x2048x768", _float8(131072, 2048, 768, (1024,) * 128), _TRANSPOSED, _BENCH_FLOAT8),
    Case("bench-1024-8x512x1024", _arrays(1024, 512, 1024, (128,) * 8), tags=frozenset({"bench-cpu"})),
    Case(
        "bench-1024-8x512x1024-skewed",
        _arrays(1024, 512, 1024, (500, 12, 0, 256, 128, 64, 1, 63)),
        tags=frozenset({"bench-cpu"}),
    ),
)

TOGGLES = {
    "existing_out": Toggle("existing-out", drop="existing_out"),
    "group_offset": Toggle("offset-past-held", drop="group_offset"),
    "rhs_scale": Toggle("scale-bias", drop="rhs_scale"),
    "bias": Toggle("scale-bias", drop="bias"),
    "lhs_scale": Toggle("row-scale", drop="lhs_scale"),
    "preferred_element_type": Toggle("float32-out", {"preferred_element_type": "bfloat16"}),
    "transpose_rhs": Toggle("square-transposed", {"transpose_rhs": False}),
    "precision": Toggle("precision", {"precision": "default"}, program=True, dtype="float32"),
}
