"""The first cases of every operation against its reference, forward and gradients: quick enough for every supported pair."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel import operations
from ejkernel._dispatch.execution import run_backward, run_forward
from ejkernel.call import Request, has_gradient
from ejkernel.call.policy import policy_for_call
from ejkernel.operations import get_operation, operation_module
from ejkernel.targets import resolve_target

TOLERANCE = 5e-5


def cases():
    written = {file.parent.name for file in Path(operations.__file__).parent.glob("*/cases.py")}
    for name in sorted(written & set(operations.OPERATIONS)):
        known = operation_module(name, "cases").CASES
        ordinary = (case for case in known if not case.is_benchmark and "extreme" not in case.tags)
        for case in itertools.islice(ordinary, 2):
            yield pytest.param(name, case, id=f"{name}-{case.name}")


def as_float64(values):
    """NumPy arrays, which the references compute with."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64 if np.issubdtype(leaf.dtype, np.floating) else None), values)


def check(required, got, expected):
    """Compare the required fields and whatever else both have, relative to the largest finite magnitude."""
    for field, value, wanted in zip(got._fields, got, expected, strict=True):
        assert field not in required or (value is None) == (wanted is None), field
        if value is not None and wanted is not None:
            wanted = np.asarray(wanted, np.float64)
            magnitude = np.max(np.abs(wanted), initial=1.0, where=np.isfinite(wanted))
            np.testing.assert_allclose(np.asarray(value), wanted, rtol=TOLERANCE, atol=TOLERANCE * magnitude, err_msg=field)


@pytest.mark.tree
def test_every_operation_is_covered():
    assert {parameter.values[0] for parameter in cases()} == set(operations.OPERATIONS)


@pytest.mark.parametrize(("name", "case"), [*cases()])
def test_first_cases(name, case):
    operation = get_operation(name)
    reference = operation_module(name, "reference")
    bound = operation.canonicalise(**jax.tree.map(jax.numpy.asarray, case.arrays(np.random.default_rng(0))), **case.options)
    request = Request(operation, bound.call, resolve_target(()), policy_for_call(name, None)).saving_residuals()
    public = operation.public(request.call)

    outputs = jax.jit(lambda inputs: run_forward(request, inputs))(bound.inputs)
    inputs = as_float64(bound.inputs)
    expected = reference.forward(request.call, inputs)
    check(public, outputs, expected)
    if not operation.differentiable:
        return

    rng = np.random.default_rng(1)
    public = [field for field in public if has_gradient(getattr(outputs, field))]
    fields = {field: rng.standard_normal(np.shape(getattr(expected, field))).astype(np.float32) for field in public}
    cotangents = operation.Outputs(**{**dict.fromkeys(operation.Outputs._fields), **fields})
    gradients = jax.jit(lambda *values: run_backward(request, *values))(bound.inputs, outputs, cotangents)
    check(operation.moving(bound.inputs), gradients, reference.backward(request.call, inputs, expected, as_float64(cotangents)))
