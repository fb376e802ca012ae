"""A function of one score as data: compared and printed as text, evaluated over tiles by `mapped`, read node by node by kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.utils.spelled import Spelled

SCALARS = ("score", "batch", "head", "query", "key")
"""What a function is called with, in this order; a mask function without the score."""

Kind = Literal["values", "integers"]


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One of `SCALARS`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number that is known."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Captured:
    """An array of the function, by its place in `captures`."""

    index: int


@dataclasses.dataclass(frozen=True)
class Result:
    """The only result of a node, by its place in `nodes`."""

    node: int


Ref = Scalar | Constant | Captured | Result


@dataclasses.dataclass(frozen=True)
class Node:
    """One result of one primitive of JAX.

    Attributes:
        primitive: its name.
        params: its parameters.
        operands: what it reads.
        shape, dtype: of the result.
        accesses: whether it only takes elements of an array out of it.
        run: the result, from the values of the operands.
        derivative: the text of a gradient of its own.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    dtype: str
    accesses: bool
    run: Callable[[Sequence[Any]], Any]
    derivative: str


@dataclasses.dataclass(frozen=True)
class Capture:
    """An array that a function reads: its place among the numbers of its kind, its shape and its dtype."""

    kind: Kind
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def unpacked(self, numbers: Any) -> Any:
        """The array, from all numbers of its kind."""
        return numbers[self.start : self.start + self.size].reshape(self.shape).astype(self.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScoreFunction(Spelled):
    """A traced function, and where it finds its arrays. Functions are equal if their texts are.

    Attributes:
        text: what it computes, gradients included.
        nodes: its primitives in order.
        output: its result.
        captures: its arrays; all floating numbers stand in one vector, `mod_values`, all others in another, `mod_integers`.
        loads: elements of arrays, or arrays, that it computes with.
        scalars: which of `SCALARS` it reads.
    """

    text: str
    nodes: tuple[Node, ...]
    output: Ref
    captures: tuple[Capture, ...]
    loads: tuple[Ref, ...]
    scalars: frozenset[str]

    @functools.cached_property
    def single_loads(self) -> bool:
        """Whether everything that it computes with is a number, and no vector."""
        return all(self._shape(load) == () for load in self.loads)

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        if isinstance(ref, Result):
            return self.nodes[ref.node].shape
        return self.captures[ref.index].shape if isinstance(ref, Captured) else ()

    def dtype_of(self, load: Ref) -> str:
        """The dtype of an element of `loads`."""
        while isinstance(load, Result):
            load = self.nodes[load.node].operands[0]
        return self.captures[load.index].dtype if isinstance(load, Captured) else ""

    def loaded(self, scalars: Mapping[str, Any], values: Any, integers: Any) -> tuple[Any, ...]:
        """The elements that one score needs, from the vectors of all numbers."""
        numbers = {"values": values, "integers": integers}
        arrays = [capture.unpacked(numbers[capture.kind]) for capture in self.captures]
        known: dict[Ref, Any] = {Captured(i): array for i, array in enumerate(arrays)}
        return tuple(self._value(load, scalars, known) for load in self.loads)

    def computed(self, scalars: Mapping[str, Any], loads: Sequence[Any]) -> Any:
        """The result for one score, from the elements that it needs."""
        return self._value(self.output, scalars, dict(zip(self.loads, loads, strict=True)))

    def _value(self, ref: Ref, scalars: Mapping[str, Any], known: dict[Ref, Any]) -> Any:
        if isinstance(ref, Constant):
            return ref.value
        if ref not in known:
            if isinstance(ref, Scalar):
                known[ref] = scalars[ref.name]
            else:
                node = self.nodes[ref.node]  # pyright: ignore[reportAttributeAccessIssue]
                known[ref] = node.run([self._value(operand, scalars, known) for operand in node.operands])
        return known[ref]


class Places(NamedTuple):
    """Where the scores of a tile stand, int32: batch `[b]`, heads `[b?, ...]` with the head axes of the scores, queries `[b?, q]`,
    keys `[b?, s]`; and the numbers that functions read, `[b?, n]` or None. An axis `b?` may have size 1."""

    batch: Any
    head: Any
    query: Any
    key: Any
    values: Any
    integers: Any


class Mapped:
    """A function over a tile of scores.

    Args:
        function: what to apply.
        places: of the tile.
        axes: the axes of its scores, a letter each: b, then any order of the heads' (all that are neither b, q nor s), q and s.
    """

    def __init__(self, function: ScoreFunction, places: Places, axes: str) -> None:
        self.function, self.axes = function, axes
        heads = "".join(axis for axis in axes if axis not in "bqs")
        own = {"batch": "b", "head": f"b{heads}", "query": "bq", "key": "bs", "values": "b", "integers": "b"}
        self.arrays: dict[str, Any] = {}
        self.letters: dict[str, str] = {"score": axes}
        for name, letters in own.items():
            array = getattr(places, name)
            if array is not None:
                shared = name != "batch" and array.shape[0] == 1
                self.arrays[name] = array[0] if shared else array
                self.letters[name] = letters[1:] if shared else letters

    def __call__(self, score: Any) -> Any:
        """The results; `score` is None for a mask function."""
        return self.with_values(score, self.arrays.get("values"))

    def with_values(self, score: Any, values: Any) -> Any:
        """The same with other floating numbers, of the shape that `arrays` has."""

        def one(given: Mapping[str, Any]) -> Any:
            loads = self.function.loaded(given, given.get("values"), given.get("integers"))
            return self.function.computed(given, loads)

        return self._over(one, self._given(score, values))

    def loads(self, values: Any) -> tuple[Any, ...]:
        """What every score of the tile reads, each in the shape of the scores."""
        return self._over(
            lambda given: self.function.loaded(given, given.get("values"), given.get("integers")), self._given(None, values)
        )

    def computed(self, score: Any, loads: tuple[Any, ...]) -> Any:
        """The results, from what `loads` returned."""
        given = self._given(score, None)
        names = {f"load {i}": load for i, load in enumerate(loads)}
        letters = dict.fromkeys(names, self.axes)
        return self._over(lambda given: self.function.computed(given, [given[name] for name in names]), given | names, letters)

    def _given(self, score: Any, values: Any) -> dict[str, Any]:
        given = {name: array for name, array in self.arrays.items() if name != "values"}
        given |= {} if score is None else {"score": score}
        return given if values is None else given | {"values": values}

    def _over(
        self, one: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> Any:
        letters = {name: {**self.letters, **(more or {})}[name] for name in given}
        run = one
        for axis in reversed(self.axes):
            in_axes = ({name: 0 if axis in letters[name] else None for name in given},)
            sizes = {given[name].shape[letters[name].index(axis)] for name in given if axis in letters[name]}
            run = jax.vmap(run, in_axes=in_axes, axis_size=max(sizes))
        return run(dict(given))


def packed(arrays: Sequence[tuple[Capture, Any]], kind: Kind, dtype: Any) -> Any:
    """The numbers of all arrays of a kind, `[1, n]`; None where there are none."""
    numbers = [array.reshape(-1).astype(dtype) for capture, array in arrays if capture.kind == kind and capture.size]
    return jnp.concatenate(numbers)[None] if numbers else None
