"""Named problems of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.operations.common.case import Case, Toggle
from ejkernel.quantization.format import resolve_format


def packed(rng: np.random.Generator, rows: int, columns: int, mode: str, bits: int, group: int) -> dict[str, Any]:
    """Random words and scales of a matrix, with a deviation of about 1 per element of a column; every code occurs."""
    form = resolve_format(mode, group, bits)
    words = rng.integers(0, 2**32, (rows, form.words(columns)), dtype=np.uint32)
    shape = (rows, columns // group)
    if mode in ("mxfp8", "nvfp8"):
        codes = words.view(np.uint8)
        words = np.where(codes % 128 == 127, codes - 1, codes).view(np.uint32)  # 127 and 255 are NaN
    if mode.startswith("mx"):
        return {"w": words, "scales": rng.integers(117 if bits == 8 else 123, 127, shape).astype(np.uint8)}
    if mode.startswith("nv"):
        return {"w": words, "scales": rng.integers(0 if bits == 8 else 16, 48, shape).astype(np.uint8)}
    if mode == "nf4":
        return {"w": words, "scales": rng.uniform(0.5, 2.0, shape).astype(np.float32)}
    scales = (rng.uniform(0.5, 2.0, shape) * 3 / 2**bits).astype(np.float32)
    return {"w": words, "scales": scales, "zeros": rng.uniform(0.3, 0.7, shape).astype(np.float32) * np.float32(2**bits)}


def _arrays(
    rows: int, inner: int, columns: int, mode: str, bits: int, group: int, *, transpose: bool = False
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        stored = (columns, inner) if transpose else (inner, columns)
        x = (rng.standard_normal((rows, inner)) / max(inner, 1) ** 0.5).astype(np.float32)
        return {"x": x, **packed(rng, *stored, mode, bits, group)}

    return make


def _case(
    name: str, rows: int, inner: int, columns: int, mode: str, bits: int, group: int, tags: str = "", **flags: bool
) -> Case:
    options = {"mode": mode, "bits": bits, "group_size": group, **flags}
    return Case(name, _arrays(rows, inner, columns, mode, bits, group, **flags), options, frozenset(tags.split()))


CASES = (
    _case("affine-4", 5, 24, 64, "affine", 4, 32, "transforms"),
    _case("affine-4-transposed", 5, 64, 24, "affine", 4, 32, transpose=True),
    _case("affine-2", 3, 9, 96, "affine", 2, 32),
    _case("affine-3-half-a-word-left", 3, 8, 48, "affine", 3, 16),
    _case("affine-5", 3, 8, 64, "affine", 5, 64),
    _case("affine-6-transposed", 3, 32, 9, "affine", 6, 16, transpose=True),
    _case("affine-7-groups-of-7", 2, 5, 21, "affine", 7, 7),
    _case("affine-8", 4, 17, 32, "affine", 8, 16),
    _case("nf4", 4, 16, 64, "nf4", 4, 32),
    _case("mxfp4-transposed", 4, 64, 10, "mxfp4", 4, 32, "transforms", transpose=True),
    _case("mxfp8", 4, 16, 64, "mxfp8", 8, 32),
    _case("nvfp4", 4, 16, 48, "nvfp4", 4, 16),
    _case("nvfp8-transposed", 4, 48, 16, "nvfp8", 8, 16, transpose=True),
    _case("square", 3, 64, 64, "affine", 4, 32),
    _case("one-row", 1, 64, 40, "affine", 4, 64, transpose=True),
    _case("no-rows", 0, 16, 32, "affine", 4, 32),
    _case("inner-0", 3, 0, 32, "affine", 4, 32),
    _case("columns-0", 3, 32, 0, "nf4", 4, 32, transpose=True),
    _case("bench-1x4096x14336", 1, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-16x4096x14336", 16, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-4096x4096x14336", 4096, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-1x2048x2048", 1, 2048, 2048, "affine", 4, 64, "bench-cpu"),
    _case("bench-128x2048x2048", 128, 2048, 2048, "affine", 4, 64, "bench-cpu"),
)

TOGGLES = {
    "zeros": Toggle("affine-4", {"mode": "nf4"}, drop="zeros"),
    "transpose": Toggle("square", {"transpose": True}),
    "mode": Toggle("affine-4", {"mode": "nf4"}, drop="zeros"),
    "bits": Toggle("affine-4", {"bits": 8, "group_size": 16}),
    "group_size": Toggle("affine-4", {"bits": 8, "group_size": 16}),
}
