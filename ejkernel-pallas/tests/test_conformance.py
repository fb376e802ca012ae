"""The conformance suite against this distribution; runs with `--ejkernel-platform=pallas`.

Where there is no TPU, kernels run in Pallas's TPU interpreter, with NaN wherever a TPU's memory would be undefined.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel
from ejkernel.plugin import Target
from ejkernel.testing.suite import *

V6E = Target("tpu", "TPU v6 lite")
NOT_INTERPRETED = {
    "test_checkpoint": "rematerialisation refuses effects, and the interpreter calls the host in order",
    "test_export": "the interpreter calls the host, and such a program cannot be exported",
    "test_jit_over_sharded_inputs": "the interpreter calls the host, which a custom partitioning cannot hold",
}

NOT_INTERPRETED_ALIKE = {
    (
        "grouped_matmul",
        name,
    ): "the interpreter cannot compare prefetched numbers, which vary over a mesh, with places in the grid"
    for name in ("test_shard_map", "test_explicit_mesh")
}


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers and transforms in the interpreter; lowering for a TPU is the compiler's own."""
    level = request.node.get_closest_marker("ejkernel_level")
    if level.args[0] == "packaging" or request.node.originalname.startswith("test_supports") or jax.default_backend() == "tpu":
        yield
        return
    name = request.node.originalname
    operation = next((operation for operation, test in NOT_INTERPRETED_ALIKE if operation in request.node.name), "")
    if reason := NOT_INTERPRETED.get(name) or NOT_INTERPRETED_ALIKE.get((operation, name)):
        pytest.skip(f"needs a TPU: {reason}")
    with ejkernel.use(target=V6E), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        yield
