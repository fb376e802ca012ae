"""A kernel that ignores an option does not pass the conformance suite, at any extent.

For every option of every operation: XLA's kernel, which is never given the array, or always the same value, whatever the call says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from ejkernel import kernel_registry
from ejkernel.plugin import resolve
from ejkernel.testing import problem
from ejkernel.testing.report import Report
from ejkernel.testing.suite import contract

OPTIONS = [(operation, field) for operation in problem.operations_of("xla") for field in problem.toggles_of(operation)]


@pytest.fixture
def deaf(option: tuple[str, str]) -> Iterator[str]:
    """The platform."""
    operation, field = option
    base = problem.case_named(operation, problem.toggles_of(operation)[field].case)
    always = getattr(problem.Problem(operation, base, "float32", "xla").bound.call, field)
    (found,) = [one for one in kernel_registry.candidates(operation, "forward") if one.id == "xla"]
    forward = resolve(found.implementation.target)

    def ignoring(call: Any, inputs: Any, config: Any) -> Any:
        if field in inputs._fields:
            return forward(dataclasses.replace(call, **{field: None}), inputs._replace(**{field: None}), config)
        return forward(dataclasses.replace(call, **{field: always}), inputs, config)

    known = {name: getattr(found.implementation, name) for name in ("configs", "contract", "without", "supports")}
    kernel_registry.register(operation, "deaf", **known)(ignoring)
    yield "deaf"
    kernel_registry.unregister(operation, "deaf")


@pytest.mark.parametrize("option", OPTIONS, ids="-".join)
def test_a_kernel_that_ignores_an_option_is_found(option: tuple[str, str], deaf: str):
    with pytest.raises(Exception) as found:  # noqa: PT011 - wrong numbers, missing outputs, or what the kernel trips over
        contract.test_field_is_consumed(option, deaf, Report(deaf))
    assert "the toggle leaves" not in str(found.value)
