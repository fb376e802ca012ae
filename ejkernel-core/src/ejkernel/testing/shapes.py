"""The arrays of a named problem as shapes and dtypes, for what is compiled and never run."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from ejkernel._pipeline.operation import get_operation
from ejkernel.call.case import Case

_LARGE = 1 << 20
"""Elements from which on an array is not made."""


class _Spread(np.ndarray):
    """One number in the place of many, whose values do not matter: arithmetic makes one more."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:  # pyright: ignore
        arrays = [value.view(np.ndarray) if isinstance(value, _Spread) else np.asarray(value) for value in inputs]
        options.pop("out", None)  # in place of what it holds comes the result
        if method == "__call__" and not options and all(value.size for value in arrays):
            shape = np.broadcast_shapes(*(value.shape for value in arrays))
            return _spread(ufunc(*(value[(0,) * value.ndim] for value in arrays)), shape)
        return getattr(ufunc, method)(*arrays, **options)

    def __setitem__(self, where: Any, value: Any) -> None:
        """What an array holds does not matter here."""

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:  # pyright: ignore
        return _spread(np.zeros((), dtype), self.shape)


def _spread(value: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(np.asarray(value), shape).view(_Spread)


class Zeros(np.random.Generator):
    """A generator whose floats are zeros, the large arrays of which take no memory, whatever is computed from them."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:  # pyright: ignore
        shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
        return np.zeros(shape, dtype) if math.prod(shape) < _LARGE else _spread(np.zeros((), dtype), shape)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:  # pyright: ignore
        return self.standard_normal(size)


def shapes_of(case: Case, dtype: str) -> dict[str, Any]:
    """The array arguments of a case as `jax.ShapeDtypeStruct`; those in float32 in the dtype asked for, others as JAX
    stores them."""

    def described(value: Any) -> Any:
        stored = dtype if value.dtype == np.float32 else jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct(value.shape, stored)

    return jax.tree.map(described, dict(case.arrays(Zeros())))


def bound_shapes(operation: str, case: Case, dtype: str) -> tuple[Any, Any]:
    """The canonical inputs of a case as `jax.ShapeDtypeStruct`, and the call; nothing is computed."""
    calls: list[Any] = []

    def bind(arrays: dict[str, Any]) -> Any:
        bound = get_operation(operation).canonicalise(**arrays, **case.options)
        calls.append(bound.call)
        return bound.inputs

    return jax.eval_shape(bind, shapes_of(case, dtype)), calls[0]
