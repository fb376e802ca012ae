"""The conformance suite against this distribution; runs with `--ejkernel-platform=pallas`.

Where there is neither a TPU nor a GPU, kernels run in Pallas's interpreter, with NaN wherever memory would be undefined: those for
TPU, or with `--ejkernel-mosaic=gpu` those for Hopper GPUs.
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
HOPPER = Target("gpu", "NVIDIA H200", "9.0")
NOT_INTERPRETED = {
    "test_checkpoint": "rematerialisation refuses effects, and the interpreter calls the host in order",
    "test_export": "the interpreter calls the host, and such a program cannot be exported",
}
if jax.__version_info__ < (0, 11):
    NOT_INTERPRETED["test_vmap_over_a_split_axis"] = "the interpreter's calls of the host wait for each other, for ever"

NOT_INTERPRETED_ALIKE = {
    (operation, name): "the interpreter cannot compare prefetched numbers, which vary over a mesh, with places in the grid"
    for operation in ("grouped_matmul", "paged_attention")
    for name in ("test_shard_map", "test_explicit_mesh")
}


pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""The interpreter for GPUs multiplies with NumPy, which warns of the NaN in rows of no group."""


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers and transforms in the interpreter; lowering for a TPU is the compiler's own."""
    level = request.node.get_closest_marker("ejkernel_level")
    own = level.args[0] == "packaging" or request.node.originalname.startswith("test_supports")
    if own or jax.default_backend() in ("tpu", "gpu"):
        yield
        return
    name = request.node.originalname
    operation = next((operation for operation, test in NOT_INTERPRETED_ALIKE if operation in request.node.name), "")
    if reason := NOT_INTERPRETED.get(name) or NOT_INTERPRETED_ALIKE.get((operation, name)):
        pytest.skip(f"needs a device: {reason}")
    if request.config.getoption("--ejkernel-mosaic", "tpu") == "gpu":
        from jax.experimental.pallas import mosaic_gpu

        with ejkernel.use(target=HOPPER), mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
            yield
        return
    with ejkernel.use(target=V6E), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        yield
