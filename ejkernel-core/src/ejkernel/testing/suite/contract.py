"""Level 1: `supports` predicts, every field of a call is consumed or refused, refusals are refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel._dispatch.execution import run_forward
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.case import Case
from ejkernel.call.policy import use
from ejkernel.plugin import Target, resolve
from ejkernel.testing.extent import Extent
from ejkernel.testing.problem import DTYPES, Problem, admits, case_named, cases_of, is_of, toggles_of
from ejkernel.testing.report import Report
from ejkernel.testing.shapes import bound_shapes
from ejkernel.testing.suite.numbers import check_outputs

__all__ = [
    "test_every_field_is_toggled",
    "test_field_is_consumed",
    "test_supports_is_pure_and_total",
    "test_supports_predicts_lowering",
]

TARGETS = (
    Target("cpu", "cpu"),
    Target("gpu"),
    Target("gpu", "NVIDIA A100-SXM4-80GB", "8.0"),
    Target("gpu", "NVIDIA H200", "9.0"),
    Target("gpu", "NVIDIA B200", "10.0"),
    Target("gpu", "AMD Instinct MI300X", "gfx942"),
    Target("tpu", "TPU v5 lite"),
    Target("tpu", "TPU v6 lite"),
)
_LOWERING_PLATFORM = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@pytest.mark.ejkernel_level("contract")
def test_supports_is_pure_and_total(operation_name: str, platform_name: str) -> None:
    """For every case, dtype and target, `supports` answers None or a reason, the same one twice."""
    own = [c for p in ("forward", "backward") for c in kernel_registry.candidates(operation_name, p) if is_of(c, platform_name)]
    for case in cases_of(operation_name):
        for dtype in DTYPES:
            _, call = bound_shapes(operation_name, case, dtype)
            for target in TARGETS:
                for candidate in own:
                    if candidate.implementation.supports is not None:
                        answer = resolve(candidate.implementation.supports)(call, target)
                        assert answer is None or (isinstance(answer, str) and answer), (case.name, target, answer)
                        assert answer == resolve(candidate.implementation.supports)(call, target)


@pytest.mark.ejkernel_level("contract")
def test_supports_predicts_lowering(operation_name: str, platform_name: str, extent: Extent) -> None:
    """A target that `supports` admits can be lowered for, each phase that it admits, from whatever machine this is.

    In float32, or in a half where only those are admitted.
    """
    cases = cases_of(operation_name)
    lowered: set[str] = set()
    for case in (one for one in cases if _is_admitted(operation_name, platform_name, one)):
        for target in TARGETS:
            with use(target=target):
                problem = Problem(operation_name, case, "float32", platform_name).in_what_runs()
                if problem.refusal() is None:
                    _lower(problem, "rocm" if target.is_amd else _LOWERING_PLATFORM[target.backend])
                    lowered.add(case.name)
        if len(lowered) == extent.lowered:
            break
    assert lowered, f"{platform_name} admits none of {len(cases)} cases of {operation_name} on any target"


def _is_admitted(operation: str, platform: str, case: Case) -> bool:
    """Whether the forward phase takes the case in some dtype on some target, without making its arrays."""
    own = [one for one in kernel_registry.candidates(operation, "forward") if is_of(one, platform)]
    calls = (bound_shapes(operation, case, dtype)[1] for dtype in DTYPES)
    return any(admits(one, call, target) for call in calls for one in own for target in TARGETS)


def _lower(problem: Problem, platform: str) -> None:
    request = problem.request()
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (problem.differentiable, problem.cotangents))

    def both(values: dict[str, Any], cotangents: dict[str, Any]) -> Any:
        def pulled(values: dict[str, Any]) -> Any:
            outputs = problem.public(request, values)
            return {name: outputs[name] for name in cotangents}, outputs

        _, pullback, outputs = jax.vjp(pulled, values, has_aux=True)
        return outputs, pullback(cotangents)

    def forward(values: dict[str, Any], cotangents: dict[str, Any]) -> Any:
        return problem.public(request, values)

    program = both if problem.refusal("backward") is None else forward
    jax.jit(program).trace(*specs).lower(lowering_platforms=(platform,))


@pytest.mark.ejkernel_level("contract")
def test_every_field_is_toggled(operation_name: str, platform_name: str) -> None:
    """The shared toggles cover every field of the call, so that none can be ignored unnoticed."""
    case = cases_of(operation_name)[0]
    problem = Problem(operation_name, case, "float32", platform_name)
    fields = {field.name: field.default for field in dataclasses.fields(problem.bound.call)}
    arrays = problem.owner.Inputs._fields  # pyright: ignore[reportAttributeAccessIssue]
    required = {name for name in arrays if fields[name] is dataclasses.MISSING}
    assert {*toggles_of(operation_name)} == fields.keys() - required - {"save_residuals"}


@pytest.mark.ejkernel_level("contract")
@pytest.mark.unsampled  # the only test of many options
def test_field_is_consumed(toggled: tuple[str, str], platform_name: str, conformance_report: Report) -> None:
    """Changing one field changes the result (or at least the program), or the platform refuses it, and both results are right: a
    difference may be one of rounding, or another field's. In the first dtype that the platform runs, or in the toggle's own."""
    operation, field = toggled
    toggle = toggles_of(operation)[field]
    base = case_named(operation, toggle.case)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        left = {name: value for name, value in base.arrays(rng).items() if name != toggle.drop}
        return left if toggle.change is None else toggle.change(left)

    changed = dataclasses.replace(base, arrays=arrays, options={**base.options, **toggle.options})
    dtypes = DTYPES if toggle.dtype is None else (toggle.dtype,)
    pairs = ([Problem(operation, case, dtype, platform_name) for case in (base, changed)] for dtype in dtypes)
    toggling = (pair for pair in pairs if getattr(pair[0].bound.call, field) != getattr(pair[1].bound.call, field))
    problems = next(toggling, None)
    assert problems, f"the toggle leaves {field} as it is"
    if problems[0].refusal() is not None:
        problems = next((pair for pair in toggling if pair[0].refusal() is None), problems)
    refusals = [reason for reason in (problem.refusal() for problem in problems) if reason is not None]
    if refusals:
        conformance_report.note(operation, "contract", f"field {field}", f"refused: {refusals[0]}")
        return
    first, second = (problem.outputs() for problem in problems)
    differ = first.keys() != second.keys() or any(not _equal(first[name], second[name]) for name in first)
    if not differ and toggle.program:
        differ = _program(problems[0]) != _program(problems[1])
    assert differ, f"{platform_name} ignores {field} of {operation}: {toggle}"
    if not toggle.program:  # else the field makes results less exact
        check_outputs(problems[0], first)
        if not _has_nan(problems[1]):  # left from what the field had hidden
            check_outputs(problems[1], second)


def _has_nan(problem: Problem) -> bool:
    return any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in jax.tree.leaves(problem.bound.inputs))


def _equal(first: Any, second: Any) -> bool:
    return np.array_equal(np.asarray(first, np.float64), np.asarray(second, np.float64), equal_nan=True)


def _program(problem: Problem) -> str:
    request = problem.request()
    return jax.jit(lambda inputs: run_forward(request, inputs)).lower(problem.bound.inputs).as_text()
