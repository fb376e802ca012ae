"""Named problems of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
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


def grouped_arrays(
    rows: int,
    inner: int,
    columns: int,
    sizes: tuple[int, ...],
    form: tuple[str, int, int],
    *,
    transpose: bool = False,
    offset: int | None = None,
    held: int | None = None,
    poison: bool = True,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Rows whose group has no matrix hold NaN if `poison`. `held` is the number of matrices, from group `offset` on."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        count, first = held if held is not None else len(sizes), offset or 0
        stored = (columns, inner) if transpose else (inner, columns)
        flat = packed(rng, count * stored[0], stored[1], *form)
        x = (rng.standard_normal((rows, inner)) / max(inner, 1) ** 0.5).astype(np.float32)
        group = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(rows - sum(sizes), -1)])
        x[((group < first) | (group >= first + count)) & poison] = np.nan
        arrays = {name: value.reshape(count, stored[0], value.shape[1]) for name, value in flat.items()}
        arrays |= {"x": x, "group_sizes": np.array(sizes, np.int32)}
        return arrays if offset is None else {**arrays, "group_offset": np.array(offset, np.int32)}

    return make


def _grouped(
    name: str,
    shape: tuple[int, int, int],
    sizes: tuple[int, ...],
    form: tuple[str, int, int],
    tags: str = "",
    *,
    transpose: bool = False,
    **shard: Any,
) -> Case:
    options = {"mode": form[0], "bits": form[1], "group_size": form[2], "transpose": transpose}
    arrays = grouped_arrays(*shape, sizes, form, transpose=transpose, **shard)
    return Case(name, arrays, options, frozenset(tags.split()))


_AFFINE, _MXFP4 = ("affine", 4, 32), ("mxfp4", 4, 32)

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
    _grouped("grouped", (23, 24, 64), (5, 0, 11, 7), _AFFINE, "transforms"),
    _grouped("grouped-transposed", (23, 64, 24), (5, 0, 11, 7), _AFFINE, transpose=True),
    _grouped("grouped-square", (9, 32, 32), (4, 5), _AFFINE),
    _grouped("grouped-unused-rows", (40, 16, 64), (5, 0, 19), ("affine", 8, 16)),
    _grouped("grouped-skewed-affine-3", (70, 9, 48), (1, 65, 2, 1), ("affine", 3, 16)),
    _grouped("grouped-one-row-nf4", (1, 16, 64), (0, 1, 0), ("nf4", 4, 32)),
    _grouped("grouped-few-rows-mxfp4", (3, 64, 10), (0, 1, 0, 0, 0, 1, 0, 1, 0), _MXFP4, transpose=True),
    _grouped("grouped-mxfp8", (7, 16, 64), (3, 4), ("mxfp8", 8, 32)),
    _grouped("grouped-nvfp4", (7, 16, 48), (4, 3), ("nvfp4", 4, 16)),
    _grouped("grouped-nvfp8", (7, 48, 16), (0, 7), ("nvfp8", 8, 16), transpose=True),
    _grouped("grouped-shard", (35, 24, 64), (5, 6, 7, 8, 9), _AFFINE, offset=1, held=2),
    _grouped("grouped-last-shard-mxfp4", (35, 64, 24), (5, 6, 7, 8, 9), _MXFP4, transpose=True, offset=3, held=2),
    _grouped("grouped-offset-past-held", (20, 8, 32), (6, 9, 5), _AFFINE, offset=1, held=3, poison=False),
    _grouped("grouped-all-empty", (9, 8, 32), (0, 0, 0), _AFFINE),
    _grouped("grouped-no-rows", (0, 8, 32), (0, 0), _AFFINE),
    _grouped("grouped-no-groups", (6, 8, 32), (), _AFFINE),
    _grouped("grouped-inner-0", (6, 0, 32), (2, 3), _AFFINE),
    _grouped("grouped-columns-0", (6, 32, 0), (2, 4), ("nf4", 4, 32), transpose=True),
    _grouped("bench-grouped-64-64x2048x1408", (64, 2048, 1408), (1,) * 64, ("affine", 4, 64), "bench"),
    _grouped("bench-grouped-4096-8x4096x14336", (4096, 4096, 14336), (512,) * 8, ("affine", 4, 64), "bench"),
    _grouped("bench-grouped-64-8x512x1024", (64, 512, 1024), (8,) * 8, ("affine", 4, 64), "bench-cpu"),
    _case("bench-1x4096x14336", 1, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-16x4096x14336", 16, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-4096x4096x14336", 4096, 4096, 14336, "affine", 4, 64, "bench"),
    _case("bench-1x2048x2048", 1, 2048, 2048, "affine", 4, 64, "bench-cpu"),
    _case("bench-128x2048x2048", 128, 2048, 2048, "affine", 4, 64, "bench-cpu"),
)


def _first_matrix(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value if name == "x" else value[0] for name, value in arrays.items()}


TOGGLES = {
    "zeros": Toggle("affine-4", {"mode": "nf4"}, drop="zeros"),
    "transpose": Toggle("square", {"transpose": True}),
    "mode": Toggle("affine-4", {"mode": "nf4"}, drop="zeros"),
    "bits": Toggle("affine-4", {"bits": 8, "group_size": 16}),
    "group_size": Toggle("affine-4", {"bits": 8, "group_size": 16}),
    "group_sizes": Toggle("grouped-square", drop="group_sizes", change=_first_matrix),
    "group_offset": Toggle("grouped-offset-past-held", drop="group_offset"),
}
