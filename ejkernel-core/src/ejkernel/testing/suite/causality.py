"""Level 2: what comes later changes nothing before, not by rounding either, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._dispatch.execution import run_forward
from ejkernel.call.arrays import named, parse_dims
from ejkernel.testing.problem import Problem
from ejkernel.testing.report import Report
from ejkernel.utils.tolerance import FORWARD, Tolerance, check_close

__all__ = ["test_later_values_change_nothing_before"]

CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "a thousandfold": lambda array: array * jnp.asarray(1e3, array.dtype),
    "doubled": lambda array: array * 2,
    "NaN": lambda array: jnp.full_like(array, jnp.nan),
}
"""What is done to later values. Gradients are compared where outputs are finite, or infinite as before: a cotangent
of 0 times infinity is NaN. Doubling leaves them finite where a thousandfold does not, and is left out elsewhere."""


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value|overflow):RuntimeWarning")  # NumPy's, in interpreters
@pytest.mark.ejkernel_level("numbers")
def test_later_values_change_nothing_before(problem: Problem, conformance_report: Report) -> None:
    """Outputs are the same bit for bit, and so are gradients if only earlier outputs have cotangents; later values have none.

    If an output is not finite, a platform may compute those before it once more, in another order: to the tolerance. Gradients of
    extreme cases are not compared.
    """
    late = late_elements(problem)
    if late is None or problem.refusal() is not None:
        return
    request = problem.request().saving_residuals()
    forward = jax.jit(lambda inputs: dict(named(run_forward(request, inputs))))
    backward = None if problem.refusal("backward") is not None else _pullback(problem, late)
    outputs = forward(problem.bound.inputs)
    gradients = {} if backward is None else backward(problem.bound.inputs)
    compared = False
    for what, change in CHANGES.items():
        if what == "doubled" and compared:
            continue
        inputs = _changed(problem.bound.inputs, late, change)
        found = {name: value for name, value in forward(inputs).items() if name in late}
        finite = all(_finite(value).all() for value in found.values())
        for name, value in found.items():
            where = f"{name} before values that are {what}"
            if finite:
                _assert_same(where, value, outputs[name], ~late[name])
            else:
                _assert_close(where, value, outputs[name], ~late[name], FORWARD[problem.held_to])
        overflown = any(np.any(~np.isinf(outputs[name]) & ~_finite(value)) for name, value in found.items())
        if backward is None or overflown or what == "NaN" or "extreme" in problem.case.tags:
            continue
        compared = True
        for name, value in backward(inputs).items():
            kept = ~late[name] if name in late else np.True_
            _assert_same(f"gradient of {name} before values that are {what}", value, gradients[name], kept)
            assert not np.any(np.where(kept, 0, np.asarray(value, np.float64))), f"later {name} has a gradient"
    assert compared or backward is None or {"extreme", "nan"} & problem.case.tags, "no gradient was compared"
    conformance_report.note(problem.operation, "numbers", "causality", "pass")


def late_elements(problem: Problem) -> dict[str, Any] | None:
    """Which elements of inputs and outputs come late, bool arrays that broadcast to them; None if the call is not causal. Arrays
    without time are left out."""
    call, owner = problem.bound.call, problem.owner
    times = owner.time(call)
    if times is None:
        return None
    specs = {**dict(named(problem.bound.inputs)), **dict(named(owner.output_specs(call)))}
    found: dict[str, Any] = {}
    for name, text in owner.dimensions(call).items():
        if name not in specs:
            continue
        axes = [axis for axis, dim in enumerate(parse_dims(text)) if dim.factor in times and specs[name].shape[axis] > 1]
        if axes:
            dims, shape = parse_dims(text), specs[name].shape
            found[name] = np.any(
                np.broadcast_arrays(
                    *(_late(axis, len(shape), shape[axis], times[dims[axis].factor], problem) for axis in axes)
                ),
                axis=0,
            )
    return found


def _late(axis: int, rank: int, size: int, first: int, problem: Problem) -> Any:
    """Of an axis over time whose first index is at `first`: the last third of the case's times."""
    longest = max(
        spec.shape[1] for name, spec in named(problem.owner.output_specs(problem.bound.call)) if name in ("out", "tokens")
    )
    place = np.arange(size)
    if getattr(problem.bound.call, "reverse", False):
        place = place[::-1]
    return (place + first >= max(1, 2 * longest // 3)).reshape([-1 if one == axis else 1 for one in range(rank)])


def _changed(inputs: Any, late: Mapping[str, Any], change: Callable[[Any], Any]) -> Any:
    """The inputs with their late floats changed."""
    floats = {name: array for name, array in named(inputs) if name in late and jnp.issubdtype(array.dtype, jnp.floating)}
    return inputs._replace(**{name: jnp.where(late[name], change(array), array) for name, array in floats.items()})


def _pullback(problem: Problem, late: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Gradients as a function of the inputs, with cotangents of early outputs."""
    request = problem.request()
    cotangents = {
        name: jnp.where(late.get(name, True), jnp.zeros_like(array), array) for name, array in problem.cotangents.items()
    }

    def pull(inputs: Any) -> dict[str, Any]:
        def public(values: dict[str, Any]) -> dict[str, Any]:
            outputs = dict(named(problem.owner.run(request, inputs._replace(**values))))
            return {name: outputs[name] for name in cotangents}

        return jax.vjp(public, problem.owner.moving(inputs))[1](cotangents)[0]

    return jax.jit(pull)


def _finite(array: Any) -> Any:
    return np.isfinite(np.asarray(array, np.float64))


def _assert_same(what: str, got: Any, expected: Any, kept: Any) -> None:
    got, expected = (np.where(kept, np.asarray(value, np.float64), 0) for value in (got, expected))
    different = ~((got == expected) | (np.isnan(got) & np.isnan(expected)))
    assert not different.any(), f"{what}: {different.sum()} elements differ, the first at {np.argwhere(different)[0]}"


def _assert_close(what: str, got: Any, expected: Any, kept: Any, tolerance: Tolerance) -> None:
    expected = np.asarray(expected, np.float64)
    known = kept & np.isfinite(expected)
    check_close(what, np.where(known, np.asarray(got, np.float64), 0), np.where(known, expected, 0), tolerance)
