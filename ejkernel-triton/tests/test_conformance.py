"""The conformance suite against this distribution; runs with `--ejkernel-platform=triton`.

Where there is no GPU, kernels run in Triton's interpreter, called from the program.
"""

from __future__ import annotations

import jax
import pytest

import ejkernel
from ejkernel.plugin import Target
from ejkernel.testing.suite import *
from ejkernel_triton._interpret import INTERPRET

H200 = Target("gpu", "NVIDIA H200", "9.0")
NOT_INTERPRETED = {
    "test_export": "the interpreter is called on the host, and such a program cannot be exported",
    "test_jit_over_sharded_inputs": "the interpreter is called on the host, which a custom partitioning cannot hold",
}


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """Numbers and transforms in the interpreter; lowering for a GPU is the compiler's own."""
    level = request.node.get_closest_marker("ejkernel_level")
    if level.args[0] == "packaging" or request.node.originalname.startswith("test_supports") or jax.default_backend() == "gpu":
        monkeypatch.delenv(INTERPRET, raising=False)
        yield
        return
    if request.node.originalname in NOT_INTERPRETED:
        pytest.skip(f"needs a GPU: {NOT_INTERPRETED[request.node.originalname]}")
    monkeypatch.setenv(INTERPRET, "1")
    with ejkernel.use(target=H200):
        yield
