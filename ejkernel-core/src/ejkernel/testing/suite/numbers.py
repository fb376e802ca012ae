"""Level 2: forward and every gradient against the float64 reference; every config; determinism."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel._plugins.registry import kernel_registry
from ejkernel.errors import NoKernelError
from ejkernel.plugin import Target, resolve
from ejkernel.testing.extent import Extent
from ejkernel.testing.problem import Problem, admits, is_of
from ejkernel.testing.report import Report
from ejkernel.testing.spaces import check_space
from ejkernel.utils.tolerance import EXTREME, FORWARD, GRADIENT, check_close, deviation

__all__ = [
    "test_config_space",
    "test_every_config",
    "test_forward",
    "test_gradients",
    "test_repeats_bit_equal",
    "test_sums_over_time",
]

TARGETS = (Target("cpu"), Target("gpu"), Target("gpu", "NVIDIA H200", "9.0"), Target("tpu"))


def _refused(problem: Problem, report: Report) -> bool:
    """Whether the platform refuses the case; then calling it must say so, and the report shows why."""
    reason = problem.refusal()
    if reason is None:
        return False
    assert reason, "a refusal must have a reason"
    with pytest.raises(NoKernelError, match=re.escape(problem.platform)):
        problem.owner.invoke(problem.arrays, problem.case.options, platform=problem.platform)
    report.note(problem.operation, "numbers", f"{problem.case.name} {problem.dtype}", f"refused: {reason}")
    return True


def _note_stamp(problem: Problem, report: Report) -> None:
    """Find the platform's stamp in the lowered program: proof that it ran, and nothing else in its place."""
    request = problem.request()
    lowered = jax.jit(lambda values: problem.public(request, values)).lower(problem.differentiable)
    stamps = set(re.findall(rf"ejkernel\.{problem.operation}\[([^\]]+)\]", lowered.as_text(debug_info=True)))
    foreign = {stamp for stamp in stamps if problem.platform not in (stamp, stamp.partition(".")[0])}
    assert stamps and not foreign, f"asked for {problem.platform}, the program shows {sorted(stamps) or 'no stamp'}"
    report.ran(problem.operation)


def _where_finite(problem: Problem, got: Any, right: Any) -> tuple[Any, Any]:
    """Both, of a case tagged "nan" with 0 where the reference is NaN."""
    if "nan" not in problem.case.tags:
        return got, right
    unknown = np.isnan(right)
    return np.where(unknown, 0, np.asarray(got, np.float64)), np.where(unknown, 0, right)


def check_outputs(problem: Problem, outputs: Mapping[str, Any]) -> list[float]:
    """Hold the outputs of a forward phase to the reference; returns their errors in the norm."""
    errors: list[float] = []
    for name, value in outputs.items():
        right = getattr(problem.expected_outputs, name)
        if "nan" in problem.case.tags:
            np.testing.assert_array_equal(np.isnan(np.asarray(value, np.float64)), np.isnan(right), err_msg=f"NaN of {name}")
        dtypes = (problem.held_to, str(value.dtype) if str(value.dtype) in FORWARD else "float32")  # a half may be asked for
        coarsest = max((FORWARD[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.norm)
        errors.append(check_close(name, *_where_finite(problem, value, right), coarsest).norm)
    return errors


@pytest.mark.ejkernel_level("numbers")
def test_forward(problem: Problem, conformance_report: Report) -> None:
    if _refused(problem, conformance_report):
        return
    _note_stamp(problem, conformance_report)
    for error in check_outputs(problem, problem.outputs()):
        conformance_report.worst(problem.operation, problem.held_to, error)


@pytest.mark.ejkernel_level("numbers")
def test_gradients(problem: Problem, conformance_report: Report) -> None:
    if problem.refusal() is not None:
        return
    refusal = problem.refusal("backward")
    if refusal is not None:
        if problem.explain().backward.chosen is None:  # else another platform runs it
            with pytest.raises(NoKernelError, match=re.escape(problem.platform)):
                problem.gradients()
        conformance_report.note(
            problem.operation, "numbers", f"{problem.case.name} gradients {problem.dtype}", f"refused: {refusal}"
        )
        return
    gradients = problem.gradients()
    expected = problem.expected_gradients
    assert gradients.keys() == problem.differentiable.keys()
    extreme = "extreme" in problem.case.tags
    for name, value in gradients.items():
        tolerance, floor = (EXTREME, 1.0) if extreme else (GRADIENT[problem.held_to], 0.0)
        found = check_close(f"gradient of {name}", *_where_finite(problem, value, expected[name]), tolerance, floor)
        if not extreme:
            conformance_report.worst(problem.operation, f"{problem.held_to} gradient", found.norm)


@pytest.mark.ejkernel_level("numbers")
def test_sums_over_time(summed: Problem, extent: Extent) -> None:
    """Gradients of cases whose terms cancel over time, in bfloat16, over seeds of which the worst counts."""
    if summed.refusal() is not None or summed.refusal("backward") is not None:
        return
    for seed in range(2 if extent.tests > 1 else 6):
        case = dataclasses.replace(summed.case, name=f"{summed.case.name}-{seed}")
        problem = dataclasses.replace(summed, case=case)
        expected = problem.expected_gradients
        for name, value in problem.gradients().items():
            check_close(f"gradient of {name}, seed {seed}", value, expected[name], GRADIENT[problem.held_to])


@pytest.mark.ejkernel_level("numbers")
def test_every_config(transformed: Problem) -> None:
    """Every config of the search space, in both phases, gives the reference's numbers: not only the winner."""
    explanation = transformed.explain()
    for decision, run, expected, tolerance in (
        (explanation.forward, transformed.outputs, transformed.expected_outputs._asdict(), FORWARD),
        (explanation.backward, transformed.gradients, transformed.expected_gradients, GRADIENT),
    ):
        if decision.chosen is None or not is_of(decision.chosen, transformed.platform):
            continue
        if decision.chosen.implementation.configs is None:
            continue
        space = resolve(decision.chosen.implementation.configs)  # pyright: ignore[reportArgumentType]
        for config in check_space(space, decision.call, decision.target):
            _check_all(run(config), expected, tolerance[transformed.held_to], str(config))


@pytest.mark.ejkernel_level("numbers")
def test_config_space(problem: Problem) -> None:
    """On every case and for every target: nothing is computed."""
    own = [c for c in kernel_registry.list_implementations(problem.operation) if is_of(c, problem.platform)]
    call = dataclasses.replace(problem.bound.call, save_residuals=True)
    for candidate in own:
        if candidate.implementation.configs is None:
            continue
        space = resolve(candidate.implementation.configs)  # pyright: ignore[reportArgumentType]
        for target in (problem.request().target, *TARGETS):
            if admits(candidate, call, target):
                check_space(space, call, target)


def _check_all(got: dict[str, Any], expected: dict[str, Any], tolerance: Any, config: str) -> None:
    for name, value in got.items():
        check_close(f"{name} with {config}", value, expected[name], tolerance)


@pytest.mark.ejkernel_level("numbers")
def test_repeats_bit_equal(transformed: Problem) -> None:
    if transformed.refusal() is not None:
        return

    def once() -> dict[str, Any]:
        gradients = transformed.gradients() if transformed.refusal("backward") is None else {}
        return {**transformed.outputs(), **gradients}

    first = once()
    for _ in range(3):
        again = once()
        for name, value in first.items():
            assert np.array_equal(np.asarray(value), np.asarray(again[name]), equal_nan=True), (
                name,
                deviation(again[name], value),
            )
