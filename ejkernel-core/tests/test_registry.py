"""`kernel_registry`: registering one's own code and looking things up."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ejkernel import Backend, NoKernelError, Platform, kernel_registry


@pytest.fixture
def my_kernel():
    @kernel_registry.register("my_kernel", Platform.TRITON, Backend.GPU, priority=100)
    def my_kernel_triton(x, y):
        return x + y

    @kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=50)
    def my_kernel_xla(x, y):
        return x + y + 1

    yield my_kernel_triton, my_kernel_xla
    kernel_registry.unregister("my_kernel", Platform.TRITON)
    kernel_registry.unregister("my_kernel", Platform.XLA)


def test_best_for_this_machine(my_kernel):
    assert kernel_registry.get("my_kernel") is my_kernel[1]
    assert kernel_registry.get("my_kernel")(1, 2) == 4


def test_by_platform_and_backend(my_kernel):
    assert kernel_registry.get("my_kernel", platform=Platform.TRITON, backend=Backend.GPU) is my_kernel[0]
    assert kernel_registry.get("my_kernel", backend="gpu") is my_kernel[0]
    with pytest.raises(NoKernelError, match="nothing for platform triton on backend tpu; registered: triton"):
        kernel_registry.get("my_kernel", Platform.TRITON, Backend.TPU)


def test_decorator_returns_the_function(my_kernel):
    assert my_kernel[0](2, 3) == 5


def test_core_operation_is_its_public_function():
    x = jnp.arange(8.0)[None]
    function = kernel_registry.get(algorithm="rms_norm", platform=Platform.XLA, backend=Backend.ANY)
    assert jnp.allclose(function(x), x / jnp.sqrt(jnp.mean(x**2) + 1e-6), atol=1e-6)


def test_same_id_twice_is_refused(my_kernel):
    with pytest.raises(ValueError, match="a second time"):
        kernel_registry.register("my_kernel", "xla")(lambda x, y: x)


def test_bad_words_are_refused():
    with pytest.raises(ValueError, match="backend: got 'gup', expected one of cpu, gpu, tpu, any"):
        kernel_registry.register("my_kernel", "xla", "gup")
    with pytest.raises(ValueError, match="phase: got 'sideways'"):
        kernel_registry.register("my_kernel", "xla", phase="sideways")
    with pytest.raises(ValueError, match="did you mean 'rms_norm'"):
        kernel_registry.get("rms_nrom")
    with pytest.raises(KeyError, match="not registered"):
        kernel_registry.unregister("rms_norm", "xla")


def test_lists(my_kernel):
    assert {"my_kernel", "rms_norm"} <= set(kernel_registry.list_operations())
    assert kernel_registry.list_platforms("my_kernel") == ["triton", "xla"]
    assert [c.id for c in kernel_registry.list_implementations("my_kernel")] == ["triton", "xla"]


def test_platform_and_backend_are_open_strings():
    assert f"{Platform.XLA}" == "xla" == Platform.XLA
    assert str(Backend.ANY) == "any"


def test_readers_keep_their_list_while_another_is_added(my_kernel):
    """A list that is sorted in place looks empty to other threads."""
    before = kernel_registry._candidates["my_kernel", "forward"]
    kernel_registry.register("my_kernel", "another")(lambda: None)
    try:
        assert [candidate.id for candidate in before] == ["triton", "xla"]
        assert [candidate.id for candidate in kernel_registry.candidates("my_kernel")] == ["another", "triton", "xla"]
    finally:
        kernel_registry.unregister("my_kernel", "another")
