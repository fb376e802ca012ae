"""A recorded call as a concrete problem: random arguments of its shapes, and what results on them are held against."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _dispatch
from ejkernel._arrays import has_gradient, named
from ejkernel._records import Candidate
from ejkernel.operation import Request
from ejkernel.plugin import Phase
from ejkernel.testing.tolerance import FORWARD, GRADIENT, deviation
from ejkernel.tuning._entry import Check

_PORTABLE = "xla"
_REFERENCE_FLOPS = 2e9
"""Above it the float64 reference takes too long, and XLA's implementation, checked against it at other sizes, stands in."""

_FLOOR = 1e-2
"""Size below which expected values do not shrink the scale of an error: sums of cancelling terms are as good as their terms."""


def pinned(request: Request, phase: Phase, candidate: Candidate, config: Any) -> Request:
    """The request as this implementation alone may run it, with this config."""
    policy = dataclasses.replace(request.policy, platforms=(candidate.id,), source="autotune", overlay=())
    request = dataclasses.replace(request, policy=policy, config=config)
    return request.saving_residuals() if phase == "backward" else request


@dataclasses.dataclass(frozen=True)
class TuningProblem:
    """One phase of one call, on a device.

    Attributes:
        request: the operation with its call; its policy says which platforms may run it.
        phase: forward or backward.
        device: where it runs.
    """

    request: Request
    phase: Phase
    device: Any

    def __str__(self) -> str:
        return f"{self.request.operation.name} {self.phase}"

    def candidates(self) -> list[Candidate]:
        """The implementations that support the call and may run it, in the order of preference."""
        request = self.request.saving_residuals() if self.phase == "backward" else self.request
        return _dispatch.willing(request, self.phase)

    def program(self, candidate: Candidate, config: Any) -> Any:
        """One implementation with one config, as a jitted function of the phase's arguments."""
        request = pinned(self.request, self.phase, candidate, config)
        run = _dispatch.run_forward if self.phase == "forward" else _dispatch.run_backward
        return jax.jit(lambda *arguments: run(request, *arguments))

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """Random arguments on the device: inputs, and for backward the outputs that belong to them and cotangents."""
        rng = np.random.default_rng(seed)
        operation, call = self.request.operation, self.request.call
        inputs = jax.device_put(operation.random_inputs(call, rng), self.device)
        if self.phase == "forward":
            return (inputs,)
        outputs = jax.jit(lambda inputs: _dispatch.run_forward(self._trusted("forward"), inputs))(inputs)
        visible = operation.public(call)
        fields = {
            name: jnp.asarray(rng.standard_normal(value.shape, np.float32), value.dtype)
            for name, value in named(outputs)
            if name in visible and has_gradient(value)
        }
        cotangents = operation.Outputs(**{**dict.fromkeys(outputs._fields), **fields})
        return inputs, outputs, jax.device_put(cotangents, self.device)

    @functools.cached_property
    def first(self) -> tuple[Any, ...]:
        """The arguments on which every config is checked."""
        return self.arguments(0)

    @functools.cached_property
    def expected(self) -> tuple[Mapping[str, Any], str]:
        """What the phase should give on the first arguments, and who says so."""
        operation = self.request.operation
        known = any(candidate.platform == _PORTABLE for candidate in self._portable())
        if operation.cost(self.request.call, self.phase).flops > _REFERENCE_FLOPS and known:
            run = _dispatch.run_forward if self.phase == "forward" else _dispatch.run_backward
            request = self._trusted(self.phase)
            return dict(named(jax.jit(lambda *arguments: run(request, *arguments))(*self.first))), "XLA with its heuristic"
        reference = importlib.import_module(f"ejkernel.operations.{operation.name}.reference")
        wide = jax.tree.map(_widened, self.first)
        call = dataclasses.replace(self.request.call, save_residuals=True)
        with np.errstate(all="ignore"):
            if self.phase == "forward":
                return dict(named(reference.forward(call, *wide))), "NumPy float64"
            inputs, _, cotangents = wide
            return dict(named(reference.backward(call, inputs, reference.forward(call, inputs), cotangents))), "NumPy float64"

    def check(self, results: Any) -> Check:
        """Compare results on the first arguments with what is expected; errors are in units of what is tolerated."""
        expected, reference = self.expected
        table = FORWARD if self.phase == "forward" else GRADIENT
        worst = 0.0
        for name, value in named(results):
            tolerance = table.get(str(value.dtype))
            if tolerance is None:
                worst = max(worst, 0.0 if np.array_equal(value, expected[name]) else np.inf)
                continue
            found = deviation(value, expected[name], _FLOOR)
            worst = max(worst, found.norm / tolerance.norm, found.element / tolerance.element)
        return Check(worst <= 1, float(min(worst, np.finfo(np.float64).max)), reference)

    def _portable(self) -> list[Candidate]:
        from ejkernel._registry import kernel_registry

        candidates = kernel_registry.candidates(self.request.operation.name, self.phase)
        return [candidate for candidate in candidates if candidate.platform == _PORTABLE]

    def _trusted(self, phase: Phase) -> Request:
        """The call on XLA, or on whatever runs it where XLA is not installed."""
        policy = dataclasses.replace(self.request.policy, overlay=())
        if self._portable():
            policy = dataclasses.replace(policy, platforms=(_PORTABLE,), forbid=frozenset(), source="autotune")
        return dataclasses.replace(self.request, policy=policy, config=None).saving_residuals()


def _widened(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else np.asarray(leaf)
