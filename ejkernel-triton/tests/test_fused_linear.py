"""`fused_linear` in Triton on a machine without a GPU: every kind of config in the interpreter, and machine code."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.fused_linear import reference
from ejkernel.operations.fused_linear.cases import CASES
from ejkernel.operations.fused_linear.interface import OPERATION, FusedLinearOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton.fused_linear import capability, config
from ejkernel_triton.fused_linear.config import Config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.fused_linear import kernel

NAMED = {case.name: case for case in CASES}
H200 = Target("gpu", "NVIDIA H200", "9.0")
VECTOR = (Config(False, 1, 32, 1), Config(False, 4, 256, 2), Config(False, 16, 1024, 4))
MMA = (Config(True, 16, 16, 4, 1), Config(True, 32, 64, 4, 3), Config(True, 64, 256, 4, 2))


def check(bound, choice, dtype, limit):
    with np.errstate(all="ignore"):
        wanted = np.asarray(reference.forward(bound.call, widened(bound.inputs)).out)
        found = kernel.forward(bound.call, bound.inputs, choice).out
    assert found.dtype == dtype
    scale = np.max(np.abs(wanted), initial=0, where=np.isfinite(wanted))
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=limit, atol=limit * scale)


def bound_of(name, dtype="float32"):
    case = NAMED[name]
    arrays = {name: jnp.asarray(value, dtype) for name, value in case.arrays(np.random.default_rng(0)).items()}
    return OPERATION.canonicalise(**arrays, **case.options)


@pytest.mark.parametrize("choice", VECTOR, ids=str)
@pytest.mark.parametrize("name", ["tails", "all-gated", "two-rows-gated", "gemma", "tails-of-one-row", "norm-not-finite"])
def test_fmas(interpreted, name, choice):
    check(bound_of(name), choice, "float32", 2e-6)
    check(bound_of(name, "bfloat16"), choice, "bfloat16", 2**-8)


@pytest.mark.parametrize("choice", MMA, ids=str)
@pytest.mark.parametrize("name", ["tails-gated", "all", "sixteen-rows", "gemma", "gated-not-finite"])
def test_tensor_cores(interpreted, name, choice):
    check(bound_of(name), choice, "float32", 2e-6)
    check(bound_of(name, "bfloat16"), choice, "bfloat16", 2**-6)


@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows_without_tensor_cores(interpreted, rows):
    rng = np.random.default_rng(rows)
    x, weight, up = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, 40), (12, 40), (rows, 6)))
    bound = OPERATION.canonicalise(x, weight, jnp.ones(40), None, up, activation="silu")
    check(bound, Config(False, 4, 32, 1), "float32", 2e-6)


@pytest.mark.parametrize("choice", [VECTOR[1], MMA[1]], ids=str)
def test_members_of_a_batch_have_weights_scales_and_biases_of_their_own(interpreted, choice):
    """As of `jax.vmap`; each alone, and all."""
    rng = np.random.default_rng(0)
    full = {"x": (3, 2, 24), "weight": (3, 10, 24), "norm_scale": (3, 24), "bias": (3, 10), "residual": (3, 2, 10)}
    for own in ({"weight"}, {"norm_scale"}, {"bias"}, {"weight", "norm_scale", "bias"}):
        shapes = {name: shape if name in {"x", "residual", *own} else (1, *shape[1:]) for name, shape in full.items()}
        inputs = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
        bound = OPERATION.canonicalise(
            inputs["x"], inputs["weight"][0], inputs["norm_scale"][0], inputs["bias"][0], inputs["residual"]
        )
        given = bound.inputs._replace(**inputs)
        specs = {name: dataclasses.replace(getattr(bound.call, name), shape=shape) for name, shape in shapes.items()}
        bound = dataclasses.replace(bound, call=dataclasses.replace(bound.call, **specs), inputs=given)
        check(bound, choice, "float32", 2e-6)


def test_norms_of_large_float16_do_not_overflow(interpreted):
    x = jnp.full((5, 32), 3e4, jnp.float16)
    bound = OPERATION.canonicalise(x, jnp.ones((16, 32), jnp.float16) / 32, jnp.full(32, 8.0))
    check(bound, MMA[1], "float16", 2**-9)
    check(bound, VECTOR[1], "float16", 2**-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["all-gated", "gemma", "tails-gated", "sixteen-rows"])
def test_gradients(interpreted, name, dtype):
    bound = bound_of(name, dtype)
    grad = jnp.asarray(np.random.default_rng(1).standard_normal((*bound.call.x.shape[:2], bound.call.columns)), dtype)
    outputs = FusedLinearOutputs(grad)
    inputs, (wide_grad,) = widened(bound.inputs), widened(outputs)
    wanted = reference.backward(bound.call, inputs, outputs, FusedLinearOutputs(wide_grad))
    found = kernel.backward(bound.call, bound.inputs, outputs, outputs, None)
    for got, exact in zip(found, wanted, strict=True):
        assert (got is None) == (exact is None)
        if got is not None:
            limit = 2e-6 if dtype == "float32" else 2**-6
            np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=limit, atol=limit * np.max(np.abs(exact)))


@pytest.mark.parametrize("name", ["hundred-rows", "inner-0"])
def test_more_rows_than_one_kernel_multiplies_and_no_inputs(interpreted, name):
    check(bound_of(name), config.heuristic(bound_of(name).call, H200), "float32", 2e-6)
    assert len(config.search_space(bound_of(name).call, H200)) == 1


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("name", ["bench-1x2048x11008-norm-silu", "bench-16x5504x2048-residual", "tails", "tails-gated"])
def test_machine_code(triton_cache, name, sm):
    launches = {one.identity: one for _, one in recorded("fused_linear", NAMED[name], "bfloat16", target_of(sm))}
    for launch in [one for one in launches.values() if "BLOCK_N" in one.constants]:  # not those of norm and gate
        compiled = launch.compile(sm)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack(), launch.constants
        if name.startswith("bench"):
            wide = r"cp\.async\.cg\.shared\.global [^;]*, 0x10" if "STAGES" in launch.constants else r"ld\.global\.cg\.v4\.b32"
            assert len(re.findall(wide, compiled.asm["ptx"])) >= 8, launch.constants


@pytest.mark.parametrize("name", ["bench-1x2048x11008-norm-silu", "bench-16x5504x2048-residual"])
def test_every_config_fits(triton_cache, name):
    found = {one.identity: one for _, one in recorded("fused_linear", NAMED[name], "bfloat16", target_of(90), space=True)}
    assert len(found) > 5
    for launch in [one for one in found.values() if "BLOCK_N" in one.constants]:
        used = testing.resources(launch.compile(90))
        assert used.shared <= 227 * 1024 and used.stack <= testing.tolerated_stack(), launch.constants


def test_the_heuristic_follows_the_sizes():
    small = OPERATION.canonicalise(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 8), jnp.bfloat16)).call

    def chosen(rows: int, inner: int, columns: int, activation: str | None = None) -> Config:
        x, weight = (dataclasses.replace(small.x, shape=(1, *shape)) for shape in ((rows, inner), (columns, inner)))
        return config.heuristic(dataclasses.replace(small, x=x, weight=weight, activation=activation), H200)

    assert chosen(1, 2048, 4096) == Config(False, 4, 2048, 4)
    assert chosen(1, 2048, 11008, "silu") == Config(False, 2, 2048, 4)
    assert chosen(2, 2048, 128256) == Config(False, 8, 1024, 4)
    assert chosen(16, 2048, 4096) == Config(True, 64, 128, 4, 4)
    assert chosen(16, 2048, 11008, "silu") == Config(True, 64, 128, 4, 4)
    assert chosen(1, 64, 100) == Config(False, 1, 64, 1)
    assert chosen(8, 2048, 2048) == Config(True, 16, 512, 4, 4)
    assert chosen(64, 5504, 2048) == Config(True, 16, 256, 4, 4)


def test_what_is_refused():
    def problem(x: tuple[int, ...], columns: int = 8, target: Target = H200, dtype: str = "bfloat16", batch: int = 1):
        spec = dataclasses.replace(small.x, dtype=dtype)
        specs = {"x": dataclasses.replace(spec, shape=x), "weight": dataclasses.replace(spec, shape=(batch, columns, x[-1]))}
        return capability.supports_forward(dataclasses.replace(small, **specs), target)

    small = OPERATION.canonicalise(jnp.zeros((4, 8)), jnp.zeros((8, 8))).call
    assert problem((1, 64, 8)) is None and problem((8, 8, 8)) is None and problem((8, 64, 8), batch=8) is None
    assert problem((5, 13, 8)) is None and problem((1, 4, 0)) is None
    assert "K = 16777216" in (problem((1, 4, 2**24)) or "")
    assert "results" in (problem((1, 64, 8), columns=2**26) or "")
    assert "float64" in (problem((1, 4, 8), dtype="float64") or "")
    assert problem((1, 4, 8), target=Target("gpu", "Tesla T4", "7.5"))
    with pytest.raises(ValueError, match="block_n: got 8 x 64, expected at least 16 each with mma"):
        Config(True, 8, 64, 4)
