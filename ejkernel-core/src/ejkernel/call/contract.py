"""What an operation declares: its arrays, their dimensions, its results and its cost."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np

from ejkernel.call.arrays import ArraySpec, has_gradient, named
from ejkernel.call.random import normal
from ejkernel.call.records import Bound, Cost, keep_former_names
from ejkernel.plugin import Implementation, Phase


class Contract(abc.ABC):
    """One mathematical function with one contract. Subclasses are stateless; one instance exists per name.

    Class attributes:
        name: as users and plugins write it.
        Call: subclass of `Call`.
        Inputs: NamedTuple of arrays (None where absent).
        Outputs: NamedTuple of what forward returns: the public outputs, then residuals (None unless `save_residuals`).
        revisions: how many optional fields `Call` had in the contract's first revision, then the names of those that each later
            one added. An implementation says which revision it was written for, and is given no later field.
        brought: optional fields that others bring with them, each with those: a refusal names the latter alone.
        renamed: former names of fields, which earlier code may use, each with the present one; no new revision.
        differentiable: fields of `Inputs` that have a gradient, when they hold floats of two bytes or more.
        constants: public outputs that count as constants under differentiation, whose cotangents backward ignores.
        shardable: factors along which the operation may be split over devices without communication, except sums of
            gradients over factors that an input lacks. An axis of a factor may have different sizes in different arrays
            (query heads and key heads) as long as each divides by the number of shards.
        formed_early: the residual, by input, of which the gradient is a multiple: forward forms it, and over devices sums its
            parts, so that backward must not sum them again.
        traceable: options of `canonicalise` that may be traced: it computes with them instead of writing them into the call.
    """

    name: ClassVar[str]
    Call: ClassVar[type]
    Inputs: ClassVar[type]
    Outputs: ClassVar[type]
    revisions: ClassVar[tuple[int | tuple[str, ...], ...]]
    brought: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    differentiable: ClassVar[tuple[str, ...]]
    constants: ClassVar[tuple[str, ...]] = ()
    shardable: ClassVar[tuple[str, ...]] = ("b",)
    formed_early: ClassVar[Mapping[str, str]] = MappingProxyType({})
    traceable: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Call" in cls.__dict__:
            _check_revisions(cls)
            for record in (cls.Call, cls.Inputs):
                keep_former_names(record, cls.renamed)

    @functools.cached_property
    def optional_fields(self) -> Mapping[str, int]:
        """The fields of `Call` that have a default, each with the revision of the contract that brought it."""
        later = {name: number for number, names in enumerate(_later(self.revisions), 2) for name in names}
        return {name: later.get(name, 1) for name in _optional(self.Call)}

    def accepts(self, implementation: Implementation, field: str) -> bool:
        """Whether an implementation honours an optional field of the call; one that it was written before, it does not."""
        names = {field, *(old for old, new in self.renamed if new == field)}
        if implementation.accepts is not None:
            return not names.isdisjoint(implementation.accepts)
        since = self.optional_fields.get(field)
        return since is not None and since <= implementation.contract and names.isdisjoint(implementation.without)

    @abc.abstractmethod
    def canonicalise(self, *args: Any, **kwargs: Any) -> Bound:
        """Check the arguments, resolve defaults and return the canonical call. Kernels rely on what is checked here."""

    @abc.abstractmethod
    def dimensions(self, call: Any) -> Mapping[str, str]:
        """The dims of every field of Inputs and Outputs, e.g. `"b t h d"`; `?` marks an axis that may be 1 (broadcast), `h*2` one
        that devices split in units of two elements.

        The first dim of every array is the batch factor `b`, into which `vmap` folds.
        """

    def time(self, call: Any) -> Mapping[str, int] | None:
        """Of a causal call: the factors of `dimensions` that run over time, with the time of their first index; None of others.

        Nothing later changes anything before it. Where the call has a `reverse` that is True, time runs from the last index on.
        """
        return None

    def moving(self, inputs: Any) -> dict[str, Any]:
        """The present inputs that have a gradient, by name."""
        return {name: array for name, array in named(inputs) if name in self.differentiable and has_gradient(array)}

    @abc.abstractmethod
    def output_specs(self, call: Any) -> Any:
        """`Outputs` of `ArraySpec`s: what forward must return for this call; residuals None unless `save_residuals`."""

    @abc.abstractmethod
    def public(self, call: Any) -> tuple[str, ...]:
        """The fields of Outputs that the public function returns, and so have cotangents."""

    @abc.abstractmethod
    def cost(self, call: Any, phase: Phase) -> Cost:
        """Exact work of one phase; masked tiles are not counted."""

    @abc.abstractmethod
    def run(self, request: Any, inputs: Any) -> Any:
        """Run a canonical request on canonical inputs; differentiable, batchable, partitionable. Returns Outputs."""

    def random_inputs(self, call: Any, rng: np.random.Generator, **given: Any) -> Any:
        """Concrete NumPy inputs of a call, legal for the operation, on which implementations are checked and timed.

        Floats are normal, int8 is of its whole range. An operation with inputs of other types gives them itself.

        Raises:
            NotImplementedError: an input that is not floating is not given.
        """
        values: dict[str, Any] = dict.fromkeys(self.Inputs._fields)  # pyright: ignore[reportAttributeAccessIssue]
        for name in values:
            spec: ArraySpec | None = getattr(call, name)
            if spec is not None:
                values[name] = given[name] if name in given else _normal(self.name, name, spec, rng)
        return self.Inputs(**values)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        """Check concrete values (never tracers) before anything runs, e.g. that cumulative lengths are sorted."""


def _normal(operation: str, name: str, spec: ArraySpec, rng: np.random.Generator) -> Any:
    dtype = jax.numpy.dtype(spec.dtype)
    if dtype == np.int8:  # quantised numbers
        return rng.integers(-127, 128, spec.shape, np.int8)
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        raise NotImplementedError(f"{operation}: does not say what a random {name} of {spec.dtype} may hold")
    return normal(rng, spec.shape, dtype)


def _optional(call: type) -> tuple[str, ...]:
    fields = (field for field in dataclasses.fields(call) if field.name != "save_residuals")
    return tuple(field.name for field in fields if field.default is not dataclasses.MISSING)


def _later(revisions: tuple[int | tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(names for names in revisions[1:] if isinstance(names, tuple))


def _check_revisions(contract: type[Contract]) -> None:
    """Every optional field belongs to a revision: one that nobody listed would be honoured by nobody, or by all.

    Raises:
        TypeError: it has more optional fields than its revisions count, fewer, or others.
    """
    fields, revisions = _optional(contract.Call), getattr(contract, "revisions", ())
    later = [name for names in _later(revisions) for name in names]
    counted = len(later) + (revisions[0] if revisions and isinstance(revisions[0], int) else 0)
    if counted != len(fields) or not {*later} <= {*fields}:
        expected = f"({len(fields)},) in its first revision; later ones append the names of fields that are new"
        raise TypeError(
            f"{contract.__name__}.revisions: got {revisions}, expected {len(fields)} optional fields of "
            f"{contract.Call.__name__} ({', '.join(fields)}) in all: {expected}"
        )
