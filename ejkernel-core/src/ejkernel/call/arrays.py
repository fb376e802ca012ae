"""Static descriptions of arrays and of the named dimensions along which an operation may be split or batched."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from ejkernel.utils.spelled import Spelled


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of a call."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Any) -> ArraySpec:
        return cls(tuple(array.shape), np.dtype(array.dtype).name)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        import jax.numpy as jnp  # registers bfloat16 and the float8 types with NumPy

        return self.size * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


STAND_IN = 8
"""What symbolic dimensions count as where only speed depends on them."""


def known_size(size: Any, unknown: int = STAND_IN) -> int:
    """The size of an axis as a number; `unknown` if it is a symbolic dimension of `jax.export`."""
    return int(size) if isinstance(size, (int, np.integer)) else unknown


def with_known_sizes(call: Any) -> Any:
    """A call, or a part of one, in which every symbolic dimension is a number: what heuristics and orders are asked about.

    The call itself where none is symbolic.
    """
    if isinstance(call, tuple):
        parts = cast("tuple[Any, ...]", call)
        known = parts if hasattr(parts, "_fields") else tuple(map(with_known_sizes, parts))
        return parts if all(map(operator.is_, parts, known)) else known
    if isinstance(call, (type, Spelled)):
        return call
    if dataclasses.is_dataclass(call):
        fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call) if field.init}
        changed = {name: with_known_sizes(value) for name, value in fields.items()}
        different = {name: value for name, value in changed.items() if value is not fields[name]}
        return dataclasses.replace(cast(Any, call), **different) if different else call
    from jax import export

    return STAND_IN if export.is_symbolic_dim(call) else call


@dataclasses.dataclass(frozen=True)
class Dim:
    """One axis of an array: the factor that it runs over, in units of so many elements that devices must not part, and whether it
    may have size 1 instead (broadcast)."""

    factor: str
    broadcasts: bool = False
    unit: int = 1

    def divides(self, size: int, pieces: int) -> bool:
        """Whether an axis of this size falls into so many pieces of whole units."""
        return size % (pieces * self.unit) == 0


def parse_dims(text: str) -> tuple[Dim, ...]:
    """Read `"b? h*2 t d"`: factors by name, `?` where size 1 stands for any size, `*2` for units of two elements."""
    found: list[Dim] = []
    for word in text.split():
        factor, _, unit = word.rstrip("?").partition("*")
        found.append(Dim(factor, word.endswith("?"), int(unit or 1)))
    return tuple(found)


def has_gradient(array: Any) -> bool:
    """Whether gradients are formed in an array's dtype: floating, of two bytes or more."""
    import jax.numpy as jnp

    return jnp.issubdtype(array.dtype, jnp.floating) and np.dtype(array.dtype).itemsize > 1


def named(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The present fields of a NamedTuple, as pairs."""
    for name, value in zip(values._fields, values, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
        if value is not None:
            yield name, value


def statistics_dtype(dtype: str) -> str:
    """The dtype of saved statistics of rows of this dtype: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"
