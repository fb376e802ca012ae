"""Tiled logits: a loop over vocabulary tiles, for some of the rows at a time.

Arrays over rows are `[b, n, ...]`. A step takes every `steps`-th row, so that a partitioning of the rows is preserved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call import known_size, vary_like
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.dtypes import accumulator, common_dtype
from ejkernel_xla._numerics import dot_precision

_CPU_TILE, _TILE = 2**20, 2**26
"""Logits of one tile."""


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """Tile size of logits that are computed by a head; clipped to the sizes of the call.

    Attributes:
        block_rows: rows of a tile.
        block_vocabulary: vocabulary entries of a tile.
    """

    block_rows: int
    block_vocabulary: int

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a value >= 1")


def heuristic(call: Any, target: Target) -> VocabularyConfig:
    """Large matmuls, with a tile that is small compared to the head."""
    if target.backend == "cpu":
        return VocabularyConfig(1024, _CPU_TILE // 1024)
    return VocabularyConfig(16384, _TILE // 16384)


def search_space(call: Any, target: Target) -> tuple[VocabularyConfig, ...]:
    """The heuristic, and tiles half as large along one axis or the other."""
    first = heuristic(call, target)
    rows, columns = first.block_rows, first.block_vocabulary
    return (
        first,
        VocabularyConfig(rows // 2, columns),
        VocabularyConfig(rows, columns // 2),
        VocabularyConfig(rows // 2, 2 * columns),
    )


CONFIGS = ConfigSpace(VocabularyConfig, heuristic, search_space)


class Head(NamedTuple):
    """The head that computes logits: matrix `[b?, d, v]` (or `[b?, v, d]`) and bias `[b?, v]`; both None if the rows are
    logits."""

    matrix: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The static part of a sweep over the vocabulary.

    Attributes:
        size: of the vocabulary.
        block: entries of one tile.
        transposed: the matrix is `[b, v, d]`.
        precision: of the products.
    """

    size: int
    block: int
    transposed: bool
    precision: str | None

    @classmethod
    def of(cls, size: int, block: int, transposed: bool, precision: str | None, head: Any) -> Tiles:
        return cls(size, size if head is None else min(block, size), transposed, precision)

    @property
    def starts(self) -> np.ndarray:
        """int32 `[tiles, 2]`: first column of each tile, and the first that is its own: the last tile begins early."""
        own = np.arange(0, self.size, self.block)
        return np.stack([np.minimum(own, self.size - self.block), own], axis=1).astype(np.int32)

    def fold(self, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """`step(state, (start, first))` over all tiles."""
        if len(self.starts) == 1:
            return step(state, (0, 0))
        return jax.lax.scan(lambda state, tile: (step(state, (tile[0], tile[1])), None), state, self.starts)[0]

    def columns(self, tile: Any) -> tuple[Any, Any]:
        """Entries of a tile `[1, 1, block]`, and whether each is the tile's own; None where all are."""
        columns = jax.lax.iota(jnp.int32, self.block)[None, None] + tile[0]
        return columns, None if self.size % self.block == 0 else columns >= tile[1]

    def matrix(self, head: Head, tile: Any) -> Any:
        axis = 1 if self.transposed else 2
        return jax.lax.dynamic_slice_in_dim(head.matrix, tile[0], self.block, axis)

    def logits(self, x: Any, head: Head, tile: Any) -> Any:
        """Logits `[b, n, block]` of one tile, wide."""
        wide = accumulator(x.dtype)
        if head.matrix is None:
            return (x if x.shape[2] == self.block else jax.lax.dynamic_slice_in_dim(x, tile[0], self.block, 2)).astype(wide)
        found = self._product(x, self.matrix(head, tile), (2, 2 if self.transposed else 1))
        if head.bias is not None:
            found = found + jax.lax.dynamic_slice_in_dim(head.bias, tile[0], self.block, 1)[:, None].astype(found.dtype)
        return found

    def d_rows(self, d_logits: Any, head: Head, tile: Any) -> Any:
        """`d_logits . head^T`: `[b, n, d]`, wide."""
        matrix = self.matrix(head, tile)
        return self._product(d_logits.astype(matrix.dtype), matrix, (2, 1 if self.transposed else 2))

    def _product(self, rows: Any, matrix: Any, contracted: tuple[int, int]) -> Any:
        common = common_dtype(rows.dtype, matrix.dtype)
        options: dict[str, Any] = {
            "precision": dot_precision(self.precision, common),
            "preferred_element_type": accumulator(common),
        }
        rows, matrix = rows.astype(common), matrix.astype(common)
        if matrix.shape[0] == 1:
            return jax.lax.dot_general(rows, matrix[0], (((contracted[0],), (contracted[1] - 1,)), ((), ())), **options)
        return jax.lax.dot_general(rows, matrix, (((contracted[0],), (contracted[1],)), ((0,), (0,))), **options)

    def add_to_head(self, sums: Head, x: Any, d_logits: Any, tile: Any) -> Head:
        """The part of the head's gradient that one tile makes."""
        shared = sums.matrix.shape[0] == 1
        dtype = common_dtype(x.dtype, sums.matrix.dtype) if sums.matrix.dtype.itemsize < 4 else x.dtype
        left, right = (d_logits, x) if self.transposed else (x, d_logits)
        axes = ((0, 1), (0, 1)) if shared else ((1,), (1,))
        part = jax.lax.dot_general(
            left.astype(dtype),
            right.astype(dtype),
            (axes, ((), ()) if shared else ((0,), (0,))),
            precision=dot_precision(self.precision, dtype),
            preferred_element_type=accumulator(dtype),
        )
        part = part[None] if shared else part
        matrix = added(sums.matrix, part, tile[0], 1 if self.transposed else 2)
        if sums.bias is None:
            return Head(matrix)
        total = jnp.sum(d_logits, axis=(0, 1) if sums.bias.shape[0] == 1 else 1)
        return Head(matrix, added(sums.bias, total[None] if total.ndim == 1 else total, tile[0], 1))


def added(total: Any, part: Any, start: Any, axis: int) -> Any:
    """`total[start : ...] += part` along an axis, summed in part's dtype and rounded to total's."""
    if total.shape == part.shape:
        return (total.astype(part.dtype) + part).astype(total.dtype)
    size = part.shape[axis]
    current = jax.lax.dynamic_slice_in_dim(total, start, size, axis)
    return jax.lax.dynamic_update_slice_in_dim(total, (current.astype(part.dtype) + part).astype(total.dtype), start, axis)


def merged_rows(x: Any, trailing: int) -> Any:
    """`[b, ..., <trailing>]` as `[b, n, <trailing>]`."""
    keep = x.shape[x.ndim - trailing :]
    rows = math.prod(x.shape[1 : x.ndim - trailing])
    return x.reshape(x.shape[0], rows, *keep)


def row_steps(batch: int, rows: int, block: int) -> int:
    """In how many steps rows are worked on: the fewest, or a few more where that divides them."""
    if not isinstance(rows, int):  # a symbolic dimension, which no number is known to divide
        return 1
    fewest = max(-(-rows * max(known_size(batch), 1) // block), 1)
    return next((steps for steps in range(fewest, min(2 * fewest, rows + 1)) if rows % steps == 0), fewest)


def over_rows(work: Callable[[Any, Any], tuple[Any, Any]], sums: Any, arrays: Any, steps: int) -> tuple[Any, Any]:
    """`sums, results = work(sums, arrays)` for every group of rows; arrays and results are pytrees of `[b, n, ...]`.

    Padding rows of the last group are 0 in every array.
    """
    if steps == 1:
        return work(sums, arrays)
    rows = jax.tree.leaves(arrays)[0].shape[1]
    padded = -(-rows // steps) * steps

    def split(x: Any) -> Any:
        x = jnp.pad(x, ((0, 0), (0, padded - rows), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], padded // steps, steps, *x.shape[2:]), 2, 0)

    def join(x: Any) -> Any:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(x.shape[0], padded, *x.shape[3:])[:, :rows]

    sums, results = jax.lax.scan(work, sums, jax.tree.map(split, arrays))
    return sums, jax.tree.map(join, results)


def zero_head(head: Head, several: bool, like: Any) -> Head:
    """Zeros for the head's gradient: in its own dtype if every entry is written once, else in the accumulator's."""

    def zeros(x: Any) -> Any:
        return None if x is None else vary_like(jnp.zeros(x.shape, accumulator(x.dtype) if several else x.dtype), like)

    return Head(*map(zeros, head))
