"""Caches without pages, and rows without channels."""

from __future__ import annotations

from typing import Any

import pytest

from ejkernel.call.case import Case
from ejkernel.operations.paged_cache_update import cases
from ejkernel.testing.problem import Problem
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

EMPTY: dict[str, Any] = {
    "values without channels": cases._arrays(((2, 3), (1, 6)), value_size=0),
    "no pages": cases._arrays(((1, 5), (1, 1)), cached=False),
}


@pytest.mark.parametrize("name", EMPTY)
def test_updates(name):
    problem = Problem("paged_cache_update", Case("empty", EMPTY[name]), "float32", "xla")
    for what, value in problem.outputs().items():
        check_close(what, value, getattr(problem.expected_outputs, what), FORWARD["float32"])
    for what, value in problem.gradients().items():
        check_close(what, value, problem.expected_gradients[what], GRADIENT["float32"])
