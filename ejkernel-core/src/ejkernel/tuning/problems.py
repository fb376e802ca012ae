"""A recorded call as a concrete problem: random arguments of its shapes, and what results on them are held against."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._dispatch.decisions import willing
from ejkernel._dispatch.execution import run_backward, run_forward
from ejkernel._plugins.catalog import operation_module
from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import has_gradient, named
from ejkernel.call.random import normal
from ejkernel.call.request import Request
from ejkernel.configs.entry import Check
from ejkernel.plugin import FALLBACK, Phase
from ejkernel.utils.tolerance import FORWARD, GRADIENT, Deviation, Tolerance, deviation, deviation_on_device

_REFERENCE_FLOPS = 2e9
_REFERENCE_SIZE = 2**24
"""Above so much work, or so many numbers, the float64 reference takes too long, and XLA's implementation in float32, checked
against it at other sizes, stands in."""

_FLOOR = 1e-2
"""Size below which expected values do not shrink the scale of an error: sums of cancelling terms are as good as their terms."""


def pinned(request: Request, phase: Phase, candidate: Candidate, config: Any) -> Request:
    """The request as this implementation alone may run it, with this config."""
    policy = dataclasses.replace(request.policy, platforms=(candidate.id,), source="autotune", overlay=())
    request = dataclasses.replace(request, policy=policy, config=config)
    return request.saving_residuals() if phase == "backward" else request


@dataclasses.dataclass(frozen=True)
class Error:
    """A result's distance from what is expected, and as a share of what is tolerated."""

    found: Deviation
    share: float


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
        return willing(request, self.phase)

    def program(self, candidate: Candidate, config: Any) -> Any:
        """One implementation with one config, as a jitted function of the phase's arguments."""
        request = pinned(self.request, self.phase, candidate, config)
        run = run_forward if self.phase == "forward" else run_backward
        return jax.jit(lambda *arguments: run(request, *arguments))

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """Random arguments on the device: inputs, and for backward the outputs that belong to them and cotangents."""
        rng = np.random.default_rng(seed)
        inputs = jax.device_put(self.inputs(seed, rng), self.device)
        if self.phase == "forward":
            return (inputs,)
        outputs = jax.jit(lambda inputs: run_forward(self._trusted("forward"), inputs))(inputs)
        return inputs, outputs, jax.device_put(self.cotangents(outputs, rng), self.device)

    def inputs(self, seed: int, rng: np.random.Generator) -> Any:
        """Random inputs that the operation admits."""
        return self.request.operation.random_inputs(self.request.call, rng)

    def cotangents(self, outputs: Any, rng: np.random.Generator) -> Any:
        """Random cotangents of the public outputs."""
        operation = self.request.operation
        visible = operation.public(self.request.call)
        fields = {
            name: normal(rng, value.shape, value.dtype)
            for name, value in named(outputs)
            if name in visible and has_gradient(value)
        }
        return operation.Outputs(**{**dict.fromkeys(outputs._fields), **fields})

    @functools.cached_property
    def first(self) -> tuple[Any, ...]:
        """The arguments on which every config is checked."""
        return self.arguments(0)

    @functools.cached_property
    def expected(self) -> tuple[Mapping[str, Any], str]:
        """What the phase should give on the first arguments, and who says so."""
        operation, call = self.request.operation, self.request.call
        specs = [*(getattr(call, name) for name in operation.Inputs._fields), *operation.output_specs(call)]  # pyright: ignore
        size = max(spec.size for spec in specs if spec is not None)
        large = operation.cost(call, self.phase).flops > _REFERENCE_FLOPS or size > _REFERENCE_SIZE
        if large and self._portable():
            return self._in_float32(), "XLA in float32"
        reference = operation_module(operation.name, "reference")
        wide = jax.tree.map(_widened, self.first)
        call = dataclasses.replace(call, save_residuals=True)
        with np.errstate(all="ignore"):
            if self.phase == "forward":
                return dict(named(reference.forward(call, *wide))), "NumPy float64"
            inputs, _, cotangents = wide
            return dict(named(reference.backward(call, inputs, reference.forward(call, inputs), cotangents))), "NumPy float64"

    def _in_float32(self) -> Mapping[str, Any]:
        """What XLA's implementation gives on the first arguments in float32."""
        inputs = jax.tree.map(_in_float32, self.first[0])
        request = self._trusted(self.phase).reshaped(inputs)
        outputs = jax.jit(lambda inputs: run_forward(request, inputs))(inputs)
        if self.phase == "forward":
            return dict(named(outputs))
        given = {name: value.astype(getattr(outputs, name).dtype) for name, value in named(self.first[2])}
        cotangents = self.first[2]._replace(**given)
        return dict(named(jax.jit(lambda *arguments: run_backward(request, *arguments))(inputs, outputs, cotangents)))

    def check(self, results: Any) -> Check:
        """Compare results on the first arguments with what is expected; errors are in units of what is tolerated."""
        worst = max((found.share for found in self.errors(dict(named(results))).values()), default=0.0)
        return Check(worst <= 1, float(min(worst, np.finfo(np.float64).max)), self.expected[1])

    def errors(self, results: Mapping[str, Any]) -> dict[str, Error]:
        """How far each result on the first arguments is from what is expected."""
        expected = self.expected[0]
        table = FORWARD if self.phase == "forward" else GRADIENT
        coarse = self.request.call.tolerated_as

        def tolerance(value: Any) -> Tolerance | None:
            return table.get(coarse or str(value.dtype)) if str(value.dtype) in table else None

        return {name: _error(value, expected[name], tolerance(value)) for name, value in results.items()}

    def _portable(self) -> list[Candidate]:
        candidates = kernel_registry.candidates(self.request.operation.name, self.phase)
        return [candidate for candidate in candidates if candidate.platform == FALLBACK]

    def _trusted(self, phase: Phase) -> Request:
        """The call on XLA, or on whatever runs it where XLA is not installed."""
        policy = dataclasses.replace(self.request.policy, overlay=())
        if self._portable():
            policy = dataclasses.replace(policy, platforms=(FALLBACK,), forbid=frozenset(), source="autotune")
        return dataclasses.replace(self.request, policy=policy, config=None).saving_residuals()


def _error(value: Any, expected: Any, tolerance: Tolerance | None) -> Error:
    if tolerance is None:  # integers and stored numbers: equal or wrong
        same = np.array_equal(value, expected)
        return Error(Deviation(0.0, 0.0), 0.0) if same else Error(Deviation(np.inf, np.inf), np.inf)
    measure = deviation_on_device if isinstance(expected, jax.Array) else deviation
    found = measure(value, expected, _FLOOR)
    return Error(found, max(found.norm / tolerance.norm, found.element / tolerance.element))


def _in_float32(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if str(leaf.dtype) in ("bfloat16", "float16") else leaf


def _widened(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else np.asarray(leaf)
