"""A named case in a dtype as a concrete problem: its own arrays, and what every run on them is held against."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call import Cost, Request, named
from ejkernel.operations import get_operation
from ejkernel.plugin import Phase
from ejkernel.targets import resolve_target
from ejkernel.testing.dispatch import policy_for_call
from ejkernel.testing.problem import as_dtype, seed_of
from ejkernel.tuning.problems import TuningProblem
from ejkernel_bench._select import Selected

_POOL = 2**22 + 7
"""More normal numbers than this are repetitions: drawing 10^9 of them takes a host longer than all that is measured."""

_STATISTICS = ("lse", "logit_sum")
"""Public outputs that no loss depends on as a rule: their cotangents are 0, and peers that do not return them are compared."""


@dataclasses.dataclass(frozen=True)
class BenchProblem(TuningProblem):
    """One phase of a case.

    Attributes:
        selected: the case.
        base: its canonical inputs, on the device.
        joint: forward and backward in one program; `phase` is backward then.
    """

    selected: Selected = dataclasses.field(kw_only=True)
    base: Any = dataclasses.field(kw_only=True, compare=False, repr=False)
    joint: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def of(cls, selected: Selected, phase: str, base: tuple[Request, Any] | None = None) -> BenchProblem:
        """The problem of one phase; `base` is what `prepare` returned for the case."""
        request, inputs = base or prepare(selected)
        device = next(iter(jax.tree.leaves(inputs)[0].devices()))
        kind: Phase = "forward" if phase == "forward" else "backward"
        return cls(request, kind, device, selected=selected, base=inputs, joint=phase == "forward+backward")

    @property
    def title(self) -> str:
        """The phase as results call it."""
        return "forward+backward" if self.joint else self.phase

    @property
    def cost(self) -> Cost:
        operation, call = self.request.operation, self.request.call
        saving = dataclasses.replace(call, save_residuals=True)
        if self.phase == "forward":
            return operation.cost(call, "forward")
        backward = operation.cost(saving, "backward")
        if not self.joint:
            return backward
        forward = operation.cost(saving, "forward")
        return Cost(forward.flops + backward.flops, forward.bytes + backward.bytes)

    def inputs(self, seed: int, rng: np.random.Generator) -> Any:
        """The case's own inputs; other sets hold the same floating numbers at other places."""
        return jax.tree.map(lambda leaf: _rolled(leaf, seed), self.base) if seed else self.base

    def cotangents(self, outputs: Any, rng: np.random.Generator) -> Any:
        """Random, and 0 for statistics beside other outputs."""
        found = super().cotangents(outputs, _generator(int(rng.integers(2**31))))
        if all(name in _STATISTICS for name, _ in named(found)):
            return found
        return found._replace(**{name: jnp.zeros_like(value) for name, value in named(found) if name in _STATISTICS})

    @functools.cached_property
    def differentiated(self) -> tuple[str, ...]:
        """Public outputs that have a cotangent."""
        return tuple(name for name, _ in named(self.first[2]))


def prepare(selected: Selected) -> tuple[Request, Any]:
    """The request of a case as dispatch would get it, and its canonical inputs."""
    operation = get_operation(selected.operation)
    generated = selected.case.arrays(_generator(seed_of(selected.operation, selected.case.name)))
    arrays = {name: jax.tree.map(lambda leaf: as_dtype(leaf, selected.dtype), value) for name, value in generated.items()}
    operation.check_values(arrays)
    bound = operation.canonicalise(**arrays, **selected.case.options)
    policy = policy_for_call(selected.operation, None)
    target = resolve_target(jax.tree.leaves(arrays), policy.target)
    return Request(operation, bound.call, target, policy), bound.inputs


def _rolled(leaf: Any, places: int) -> Any:
    return jnp.roll(leaf, places, -1) if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


class _Pooled(np.random.Generator):
    """A generator whose large normal arrays repeat a pool, in float32, which is what cases make of them."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:  # pyright: ignore
        if out is not None or size is None or np.prod(size) <= _POOL:
            return super().standard_normal(size, dtype, out)
        return np.resize(super().standard_normal(_POOL, np.float32), size)


def _generator(seed: int) -> np.random.Generator:
    return _Pooled(np.random.PCG64(seed))
