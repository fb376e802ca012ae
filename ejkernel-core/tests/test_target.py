"""Saying for which device a program is built: `use(target=...)` and what implementations see of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call import vary_like
from ejkernel.operations.rms_norm.interface import RmsNormOutputs
from ejkernel.plugin import Target, current_target

H200 = Target("gpu", "NVIDIA H200", "9.0")


@pytest.fixture
def seen():
    """Targets that a registered GPU implementation was traced for."""
    targets = []

    @kernel_registry.register("rms_norm", "probe", "gpu", priority=10_000)
    def forward(call, inputs, config):
        targets.append(current_target())
        return RmsNormOutputs(inputs.x, None)

    yield targets
    kernel_registry.unregister("rms_norm", "probe")


def test_use_names_the_target_of_dispatch_and_of_the_implementation(seen):
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    function = jax.jit(lambda x: ejkernel.rms_norm(x))
    with ejkernel.use(target=H200):
        assert ejkernel.explain("rms_norm", x).forward.target == H200
        function.trace(x)
    assert seen == [H200]
    assert current_target().backend == jax.default_backend()


def test_another_target_retraces_a_compiled_program(seen):
    x = jnp.ones((2, 8))
    function = jax.jit(lambda x: ejkernel.rms_norm(x, platform="probe"))
    for target in (H200, Target("gpu", "NVIDIA A100", "8.0"), H200):
        with ejkernel.use(target=target):
            function(x)
    assert seen == [H200, Target("gpu", "NVIDIA A100", "8.0")]


def test_inner_target_wins_and_none_keeps_the_outer():
    with ejkernel.use(target=H200):
        with ejkernel.use(target="tpu") as inner:
            assert inner.target == Target("tpu")
        with ejkernel.use(custom_gradients=False) as kept:
            assert kept.target == H200


def test_unknown_target_is_refused():
    with pytest.raises(ValueError, match="target: got 'quantum'"), ejkernel.use(target="quantum"):
        raise AssertionError("not reached")


def test_results_vary_like_their_operands():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    found = []

    def local(x):
        constant = vary_like(jnp.zeros(3), (x,))
        found.append(jax.typeof(constant).manual_axis_type.varying)
        return constant

    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec("data"), out_specs=spec("data"))).trace(jnp.ones(4))
    assert found == [frozenset({"data"})]
