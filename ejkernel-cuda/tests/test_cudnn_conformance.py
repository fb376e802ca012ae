"""The conformance suite against cuDNN's attention; runs with `--ejkernel-platform=cuda.cudnn`.

Where there is no GPU, what cuDNN documents is computed in NumPy, called from the program.
"""

from __future__ import annotations

import dataclasses

import cudnn_in_numpy
import jax
import pytest

import ejkernel
from ejkernel.plugin import Target
from ejkernel.testing.suite import *
from ejkernel_cuda.cudnn import _call
from ejkernel_cuda.cudnn.flash_attention.capability import ANY_ORDER

H200 = Target("gpu", "NVIDIA H200", "9.0")
NOT_IN_NUMPY = {
    "test_export": "NumPy is called on the host, and such a program cannot be exported",
    "test_jit_over_sharded_inputs": "NumPy is called on the host, which a custom partitioning cannot hold",
}


@pytest.fixture
def transformed(request):
    """A problem to try transforms on, which has gradients."""
    problem = request.param
    return dataclasses.replace(problem, case=cudnn_in_numpy.even(problem.case)).in_what_runs()


@pytest.fixture(autouse=True)
def in_numpy(request, monkeypatch):
    """Numbers and transforms in NumPy; lowering for a GPU is the real one."""
    level = request.node.get_closest_marker("ejkernel_level")
    if level.args[0] == "packaging" or jax.default_backend() == "gpu":
        yield
        return
    monkeypatch.setenv(ANY_ORDER, "1")
    if request.node.originalname.startswith("test_supports"):
        yield
        return
    if request.node.originalname in NOT_IN_NUMPY:
        pytest.skip(f"needs a GPU: {NOT_IN_NUMPY[request.node.originalname]}")
    monkeypatch.setattr(_call, "custom_call", cudnn_in_numpy.custom_call)
    with ejkernel.use(target=H200):
        yield
