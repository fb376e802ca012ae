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
NOT_INTERPRETED_OF = {
    ("cross_entropy", "test_arrays_not_on_the_mesh"): "a head gets an axis, which puts it on the mesh, and so as above",
    ("kl_divergence", "test_arrays_not_on_the_mesh"): "rows become one axis, which puts them on the mesh, and so as above",
    ("quantized_matmul", "test_arrays_not_on_the_mesh"): "its arrays get an axis, which puts them on the mesh, and so as above",
}


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """Numbers and transforms in the interpreter; lowering for a GPU is the compiler's own."""
    level = request.node.get_closest_marker("ejkernel_level")
    if level.args[0] == "packaging" or request.node.originalname.startswith("test_supports") or jax.default_backend() == "gpu":
        monkeypatch.delenv(INTERPRET, raising=False)
        yield
        return
    name = request.node.originalname
    operation = request.node.callspec.id.split("-")[0] if hasattr(request.node, "callspec") else ""
    reason = NOT_INTERPRETED.get(name) or NOT_INTERPRETED_OF.get((operation, name))
    if reason:
        pytest.skip(f"needs a GPU: {reason}")
    monkeypatch.setenv(INTERPRET, "1")
    with ejkernel.use(target=H200):
        yield
