"""One case of one operation in one dtype, run by the platform under test and by the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._dispatch.execution import run_forward
from ejkernel._dispatch.explanation import explain_request
from ejkernel._pipeline.operation import Operation, get_operation
from ejkernel._plugins.catalog import OPERATIONS, operation_module
from ejkernel._plugins.records import Candidate
from ejkernel.call.arrays import has_gradient, named
from ejkernel.call.case import Case, Toggle
from ejkernel.call.decision import Explanation
from ejkernel.call.policy import policy_for_call
from ejkernel.call.records import Bound, Call, given_fields
from ejkernel.call.request import Request
from ejkernel.plugin import Phase, Plugin, Target, resolve
from ejkernel.targets.target import resolve_target

DTYPES = ("float32", "bfloat16", "float16")


def cases_of(operation: str) -> tuple[Case, ...]:
    """The named problems of an operation, without those that are sized for benchmarks."""
    module = operation_module(operation, "cases")
    return tuple(case for case in module.CASES if not case.is_benchmark)


def toggles_of(operation: str) -> dict[str, Toggle]:
    """How each field of the operation's call is toggled."""
    return dict(operation_module(operation, "cases").TOGGLES)


def case_named(operation: str, name: str) -> Case:
    return next(case for case in cases_of(operation) if case.name == name)


def representative(operation: str) -> tuple[Case, ...]:
    """The cases on which transforms are tried: those tagged so, else the first."""
    cases = cases_of(operation)
    return tuple(case for case in cases if "transforms" in case.tags) or cases[:1]


def sample_of(operation: str, step: int) -> list[Case]:
    """One case in `step`, and those on which transforms are tried."""
    always = representative(operation)
    return [case for index, case in enumerate(cases_of(operation)) if index % step == 0 or case in always]


def with_empty_arrays(operation: str) -> tuple[Case, ...]:
    """The cases in which arrays have no elements, those first in which others have some."""

    def full(case: Case) -> list[bool]:
        arrays = case.arrays(np.random.default_rng(seed_of(operation, case.name)))
        return [np.size(leaf) > 0 for leaf in jax.tree.leaves(arrays)]

    found = {case.name: full(case) for case in cases_of(operation)}
    cases = (case for case in cases_of(operation) if not all(found[case.name]))
    return tuple(sorted(cases, key=lambda case: not any(found[case.name])))


def transformed_by(test: str, operation: str, step: int) -> tuple[Case, ...]:
    """The cases on which a test of a transform tries it: all of `representative`, or with a `step` above 1 one of them, which
    differs from test to test."""
    cases = representative(operation)
    return cases if step == 1 else (cases[seed_of(test, operation) % len(cases)],)


def is_of(candidate: Candidate, platform: str) -> bool:
    """Whether a candidate is of the platform under test, which may be one implementation's id (`cuda.cudnn`)."""
    return platform in (candidate.platform, candidate.id)


def fields_refused(plugin: Plugin, operation: str, call: Call, variant: str = "") -> set[str]:
    """The optional fields that a call gives and that a plugin's code for the operation does not honour."""
    code = next(one for one in plugin.implementations if (one.operation, one.variant) == (operation, variant))
    return {name for name in given_fields(call) if not get_operation(operation).accepts(code, name)}


def admits(candidate: Candidate, call: Call, target: Target) -> bool:
    """Whether a candidate says that it runs a call there: nothing is lowered."""
    operation, supports = get_operation(candidate.implementation.operation), candidate.implementation.supports
    return (
        bool({"any", target.backend} & {*candidate.implementation.backends})
        and all(operation.accepts(candidate.implementation, name) for name in given_fields(call))
        and (supports is None or resolve(supports)(call, target) is None)
    )


def operations_of(platform: str) -> list[str]:
    """Operations that a platform, or one implementation by its id, implements."""
    from ejkernel._plugins.registry import kernel_registry

    return [name for name in sorted(OPERATIONS) if any(is_of(c, platform) for c in kernel_registry.candidates(name, "forward"))]


def runs_on_this_machine(platform: str) -> bool:
    """Whether a platform, or one implementation by its id, has code for this machine's default device."""
    from ejkernel._plugins.registry import kernel_registry

    admitted = {"any", resolve_target(()).backend}
    return any(
        admitted & {*candidate.implementation.backends}
        for candidate in kernel_registry.list_implementations()
        if is_of(candidate, platform)
    )


def seed_of(*words: str) -> int:
    """A seed that depends on names only, so that a case has the same data in every run."""
    return zlib.crc32("/".join(words).encode())


def as_dtype(value: Any, dtype: str) -> Any:
    """A JAX array; float32 ones in the dtype asked for, others (integers, stored float8) as they are."""
    array = jnp.asarray(value)
    return array.astype(dtype) if array.dtype == jnp.float32 else array


def as_reference(values: Any) -> Any:
    """NumPy arrays, floating ones in float64, without changing a value."""

    def convert(value: Any) -> Any:
        array = np.asarray(value)
        return array.astype(np.float64) if jnp.issubdtype(value.dtype, jnp.floating) else array

    return jax.tree.map(convert, values)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case in a dtype, for a platform. Arrays and references are computed once."""

    operation: str
    case: Case
    dtype: str
    platform: str

    @property
    def owner(self) -> Operation:
        return get_operation(self.operation)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        generated = self.case.arrays(np.random.default_rng(seed_of(self.operation, self.case.name)))
        return {name: jax.tree.map(lambda leaf: as_dtype(leaf, self.dtype), value) for name, value in generated.items()}

    @functools.cached_property
    def bound(self) -> Bound:
        return self.owner.canonicalise(**self.arrays, **self.case.options)

    def request(self, config: Any = None) -> Request:
        policy = policy_for_call(self.operation, self.platform)
        target = resolve_target(jax.tree.leaves(self.arrays), policy.target)
        return Request(self.owner, self.bound.call, target, policy, config)

    def explain(self) -> Explanation:
        return explain_request(self.request())

    def refusal(self, phase: Phase = "forward") -> str | None:
        """Why the platform under test does not run a phase; None if it does, or leaves it to others for having no code for it, or
        if there is nothing to run, as in the backward phase of an operation without gradients."""
        if phase == "backward" and not self.owner.differentiable:
            return None
        explanation = self.explain()
        decision = explanation.forward if phase == "forward" else explanation.backward
        own = [verdict for verdict in decision.verdicts if is_of(verdict.candidate, self.platform)]
        if decision.chosen is not None and (not own or is_of(decision.chosen, self.platform)):
            return None
        return "; ".join(reason for verdict in own for reason in verdict.reasons)

    # What the platform under test computes

    def in_what_runs(self) -> Problem:
        """This problem in the first dtype in which the platform runs it, float32 before the halves; itself if there is none."""
        tried = (dataclasses.replace(self, dtype=dtype) for dtype in DTYPES)
        return next((problem for problem in tried if problem.refusal() is None), self)

    @property
    def held_to(self) -> str:
        """The dtype whose tolerances hold."""
        return self.bound.call.tolerated_as or self.dtype

    @property
    def differentiable(self) -> dict[str, Any]:
        return self.owner.moving(self.bound.inputs)

    def public(self, request: Request, values: dict[str, Any]) -> dict[str, Any]:
        """The public outputs as a function of the differentiable inputs."""
        return dict(named(self.owner.run(request, self.bound.inputs._replace(**values))))

    def outputs(self, config: Any = None) -> dict[str, Any]:
        """Every output of the forward phase, residuals included."""
        request = self.request(config).saving_residuals()
        return dict(named(jax.jit(lambda inputs: run_forward(request, inputs))(self.bound.inputs)))

    @functools.cached_property
    def cotangents(self) -> dict[str, Any]:
        rng = np.random.default_rng(seed_of(self.operation, self.case.name, "cotangents"))
        specs = dict(named(self.owner.output_specs(self.bound.call)))
        visible = self.owner.public(self.bound.call)
        return {
            name: jnp.asarray(rng.standard_normal(spec.shape), spec.dtype)
            for name, spec in specs.items()
            if name in visible and has_gradient(spec)
        }

    def gradients(self, config: Any = None) -> dict[str, Any]:
        request = self.request(config)

        def pull(values: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any]:
            _, pullback = jax.vjp(
                lambda values: {n: a for n, a in self.public(request, values).items() if n in cotangents}, values
            )
            return pullback(cotangents)[0]

        return jax.jit(pull)(self.differentiable, self.cotangents)

    # What is right

    @functools.cached_property
    def _reference(self) -> Any:
        return operation_module(self.operation, "reference")

    @functools.cached_property
    def expected_outputs(self) -> Any:
        call = dataclasses.replace(self.bound.call, save_residuals=True)
        with np.errstate(all="ignore"):
            return self._reference.forward(call, as_reference(self.bound.inputs))

    @functools.cached_property
    def expected_gradients(self) -> dict[str, Any]:
        if not self.owner.differentiable:
            return {}
        outputs = self.expected_outputs
        cotangents = self.owner.Outputs(**{**dict.fromkeys(outputs._fields), **as_reference(self.cotangents)})
        call = dataclasses.replace(self.bound.call, save_residuals=True)
        with np.errstate(all="ignore"):
            found = self._reference.backward(call, as_reference(self.bound.inputs), outputs, cotangents)
        return dict(named(found))
