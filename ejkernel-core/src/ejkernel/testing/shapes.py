"""The arrays of a named problem as shapes and dtypes, for what is compiled and never run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel.operations._case import Case


class Zeros(np.random.Generator):
    """A generator whose floats are zeros: their pages are never touched, so that arrays of any size cost nothing."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:  # pyright: ignore
        return np.zeros(() if size is None else size, dtype)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:  # pyright: ignore
        return self.standard_normal(size)


def shapes_of(case: Case, dtype: str) -> dict[str, Any]:
    """The array arguments of a case as `jax.ShapeDtypeStruct`; those in float32 in the dtype asked for."""

    def described(value: Any) -> Any:
        return jax.ShapeDtypeStruct(value.shape, dtype if value.dtype == np.float32 else value.dtype)

    return jax.tree.map(described, dict(case.arrays(Zeros())))
