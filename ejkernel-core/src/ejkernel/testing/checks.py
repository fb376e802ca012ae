"""What tests of kernels share: inputs and results in float64, relative errors, and random groups of rows."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np

_Values = TypeVar("_Values")


def widened(values: _Values) -> _Values:
    """The same tree of NumPy arrays for a reference: all in float64, but int32 (sizes, indices), uint32
    (random words) and bool as they are.

    Stored integers of a quantised matrix or cache are numbers and become float64 too. None stays None.
    """

    def widen(value: Any) -> np.ndarray:
        array = np.asarray(value)
        return array if array.dtype in (np.int32, np.uint32, np.bool_) else array.astype(np.float64)

    return jax.tree.map(widen, values)


def relative_error(got: Any, wanted: Any, floor: float = 1e-30) -> float:
    """||got - wanted|| / ||wanted||; raises `AssertionError` where shapes or the places of infinities differ.

    NaN in either gives NaN, which is below no limit.

    Args:
        got: the result.
        wanted: what it should be.
        floor: the least divisor, for expected results that are (almost) zero.
    """
    got, wanted = np.asarray(got).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert got.shape == wanted.shape
    infinite = np.isinf(wanted)
    np.testing.assert_array_equal(np.isinf(got), infinite)
    got, wanted = np.where(infinite, 0, got), np.where(infinite, 0, wanted)
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), floor))


def random_group_sizes(rng: np.random.Generator, groups: int, rows: int) -> np.ndarray:
    """int32 [groups]: sizes of groups of rows, some of them 0, that leave some of the rows without a group."""
    sizes = np.bincount(rng.integers(0, groups + 1, rows), minlength=groups + 1)[:groups]
    return np.where(rng.random(groups) < 0.3, 0, sizes).astype(np.int32)


def matrix_of_rows(sizes: np.ndarray, offset: int, rows: int, matrices: int) -> np.ndarray:
    """[rows]: the matrix that a grouped matmul multiplies each row by, -1 where there is none.

    Args:
        sizes: rows of each group.
        offset: group of the first matrix.
        rows: number of rows; those after the last group have no matrix.
        matrices: number of matrices held.
    """
    group = np.repeat(np.arange(len(sizes)), sizes) - offset
    group = np.concatenate([group, np.full(rows - group.size, -1)])
    return np.where((group >= 0) & (group < matrices), group, -1)
