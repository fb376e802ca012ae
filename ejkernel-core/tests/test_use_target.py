"""`use(target=...)`: dispatching for a device that this machine does not have."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.errors import FallbackWarning
from ejkernel.targets import Target, as_target


def target_of_rms_norm() -> Target:
    return ejkernel.explain("rms_norm", jax.ShapeDtypeStruct((4, 8), jnp.float32)).forward.target


def test_target_holds_inside_and_nests():
    outside = target_of_rms_norm()
    with ejkernel.use(target="gpu:9.0"):
        assert target_of_rms_norm() == Target("gpu", "", "9.0")
        with ejkernel.use("xla"):
            assert target_of_rms_norm().capability == (9, 0)
        with ejkernel.use(target="tpu"):
            assert target_of_rms_norm() == Target("tpu")
    assert target_of_rms_norm() == outside


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """The backends for which a registered implementation, which always refuses, was asked."""
    backends: list[str] = []

    def supports(call: object, target: Target) -> str:
        backends.append(target.backend)
        return "only asked"

    ejkernel.kernel_registry.register("rms_norm", "acme", priority=9, supports=supports)(print)
    yield backends
    ejkernel.kernel_registry.unregister("rms_norm", "acme")


def test_a_compiled_function_is_traced_again_for_another_target(asked: list[str]):
    program = jax.jit(lambda x: ejkernel.rms_norm(x))
    with ejkernel.use(target="cpu"):
        program(jnp.ones((2, 4)))
    assert {*asked} == {"cpu"}
    with ejkernel.use(target="tpu"), pytest.warns(FallbackWarning, match="acme: only asked"):
        program.lower(jnp.ones((2, 4)))
    assert {*asked} == {"cpu", "tpu"}


@pytest.mark.parametrize(
    ("value", "target"),
    [
        ("rocm:gfx942", Target("gpu", "", "gfx942")),
        ("gpu:gfx90a", Target("gpu", "", "gfx90a")),
        ("rocm", Target("gpu", "AMD")),
        ("cuda:9.0", Target("gpu", "", "9.0")),
    ],
)
def test_targets_by_name(value: str, target: Target):
    assert as_target(value) == target
    assert target.is_amd == value.startswith(("rocm", "gpu:gfx"))
    assert (target.capability is None) == target.is_amd


def test_no_plugin_is_broken_on_an_amd_gpu():
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    with ejkernel.use(target=Target("gpu", "AMD Instinct MI300X", "gfx942")):
        found = ejkernel.explain("rms_norm", x)
    assert found.chosen == found.backward.chosen.id == "xla"
    assert {v.verdict for d in (found.forward, found.backward) for v in d.verdicts} <= {"chosen", "refused", "available"}


@pytest.mark.parametrize(
    "value", ["gpuu", "gpu:", "gpu:nine", "gpu:9", "gpu:9.0.1", "cuda:gfx942", "rocm:9.0", "cpu:9.0", "tpu:gfx942", "gfx942"]
)
def test_other_texts_are_refused(value: str):
    with pytest.raises(ValueError, match=f"target: got '{value}'"):
        as_target(value)
