"""XLA and Triton on the same inputs: every operation that both implement, outputs and gradients.

Each platform is held to the float64 reference elsewhere; here they are held to each other. Without a GPU, Triton's kernels run in
its interpreter, on few cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel.plugin import Target
from ejkernel.testing.problem import Problem, cases_of, operations_of, representative
from ejkernel.utils.tolerance import FORWARD, GRADIENT, Tolerance, check_close

if not operations_of("triton"):
    pytest.skip("ejkernel-triton is not installed: pip install -e ./ejkernel-triton", allow_module_level=True)

INTERPRET = "EJKERNEL_TRITON_INTERPRET"
H200 = Target("gpu", "NVIDIA H200", "9.0")
ON_GPU = jax.default_backend() == "gpu"
PROBLEMS = [
    Problem(operation, case, "float32", "triton")
    for operation in operations_of("triton")
    for case in (cases_of(operation) if ON_GPU else representative(operation)[:1])
    if "extreme" not in case.tags
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if ON_GPU:
        yield
        return
    monkeypatch.setenv(INTERPRET, "1")
    with ejkernel.use(target=H200):
        yield


def twice(tolerance: Tolerance) -> Tolerance:
    """Each of the two may be as far from the truth as the tolerance says."""
    return Tolerance(2 * tolerance.norm, 2 * tolerance.element)


@pytest.mark.unsampled
@pytest.mark.parametrize("triton", PROBLEMS, ids=lambda problem: f"{problem.operation}-{problem.case.name}")
def test_same_numbers(triton: Problem) -> None:
    triton = triton.in_what_runs()
    xla = dataclasses.replace(triton, platform="xla")
    refused = triton.refusal()
    if refused is not None:
        pytest.skip(f"Triton refuses this case: {refused}")
    found, expected = triton.outputs(), xla.outputs()
    for name in triton.owner.public(triton.bound.call):
        check_close(name, found[name], np.asarray(expected[name], np.float64), twice(FORWARD[triton.held_to]))
    if triton.refusal("backward") is None:
        slopes = xla.gradients()
        for name, value in triton.gradients().items():
            wanted = np.asarray(slopes[name], np.float64)
            check_close(f"gradient of {name}", value, wanted, twice(GRADIENT[triton.held_to]))
