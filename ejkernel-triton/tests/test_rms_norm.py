"""`rms_norm` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel._arrays import ArraySpec
from ejkernel.operations.rms_norm import reference
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import Target
from ejkernel_triton._versions import version_problem
from ejkernel_triton.rms_norm import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.rms_norm import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def problem(shape, dtype="float32", scale=1, offset=0, seed=0, scale_offset=0.0, epsilon=1e-6):
    """A canonical call and its arrays; `scale` and `offset` are the parameter's batch size, 0 for none."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    inputs = RmsNormInputs(
        array(*shape), array(scale, shape[-1]) if scale else None, array(offset, shape[-1]) if offset else None
    )
    specs = {name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()}
    call = RmsNormCall(**specs, epsilon=epsilon, scale_offset=scale_offset, save_residuals=True)
    return call, inputs, RmsNormOutputs(array(*shape))


def wide(values):
    return type(values)(*(None if value is None else np.asarray(value, np.float64) for value in values))


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    return np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30)


PROBLEMS = [
    (((3, 5, 64),), {}),
    (((2, 33, 48),), {"offset": 1, "scale_offset": 1.0}),
    (((4, 9, 40),), {"scale": 4, "offset": 4}),
    (((4, 9, 40),), {"scale": 4, "offset": 1}),
    (((4, 9, 40),), {"scale": 1, "offset": 4}),
    (((5, 7),), {"scale": 0}),
    (((5, 7),), {"scale": 0, "offset": 1}),
    (((130, 1),), {"epsilon": 0.5}),
    (((1, 1, 1),), {"epsilon": 0.1}),
    (((2, 3, 4099),), {"offset": 1}),
    (((70, 128),), {"dtype": "bfloat16", "offset": 1}),
    (((3, 20, 96),), {"dtype": "float16", "scale": 3}),
]


@pytest.mark.parametrize(("arguments", "options"), PROBLEMS)
def test_numbers_in_the_interpreter(monkeypatch, arguments, options):
    monkeypatch.setattr(kernel, "call_kernel", testing.interpreted_call)
    call, inputs, cotangents = problem(*arguments, **options)
    small = config.BackwardConfig(rows=2, num_warps=1, programs=5, num_stages=1)
    outputs = kernel.forward(call, inputs, config.ForwardConfig(rows=4, num_warps=1))
    exact = reference.forward(call, wide(inputs))
    limit = TOLERANCE[call.x.dtype]
    assert relative_error(outputs.out, exact.out) < limit
    assert relative_error(outputs.rstd, exact.rstd) < 1e-5
    assert (outputs.out.dtype, outputs.rstd.dtype) == (inputs.x.dtype, jnp.float32)

    got = kernel.backward(call, inputs, outputs, cotangents, small)
    wanted = reference.backward(call, wide(inputs), exact, wide(cotangents))
    for name, value, exact_value in zip(inputs._fields, got, wanted, strict=True):
        assert (value is None) == (exact_value is None), name
        if value is not None:
            assert relative_error(value, exact_value) < limit, name
            assert value.dtype == getattr(inputs, name).dtype


@pytest.mark.parametrize("shape", [(3, 24), (2, 2, 300)])
def test_every_config_gives_the_same_numbers(monkeypatch, shape):
    monkeypatch.setattr(kernel, "call_kernel", testing.interpreted_call)
    call, inputs, cotangents = problem(shape)
    exact = reference.forward(call, wide(inputs))
    wanted = reference.backward(call, wide(inputs), exact, wide(cotangents))
    distinct_rows = {choice.rows: choice for choice in config.forward_space(call, H200)}
    for choice in distinct_rows.values():
        outputs = kernel.forward(call, inputs, choice)
        assert relative_error(outputs.out, exact.out) < 2e-5, choice
    for choice in {(c.rows, c.programs): c for c in config.backward_space(call, H200)}.values():
        got = kernel.backward(call, inputs, outputs, cotangents, choice)
        assert relative_error(got.x, wanted.x) < 2e-5, choice
        assert relative_error(got.scale, wanted.scale) < 2e-5, choice


def test_forward_without_residuals_leaves_rstd_alone(monkeypatch):
    monkeypatch.setattr(kernel, "call_kernel", testing.interpreted_call)
    call, inputs, _ = problem((3, 16))
    call = dataclasses.replace(call, save_residuals=False)
    assert kernel.forward(call, inputs, config.forward_heuristic(call, H200)).rstd is None


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (4, 0)])
def test_no_rows_or_no_columns(shape):
    call, inputs, cotangents = problem(shape)
    outputs = kernel.forward(call, inputs, config.forward_heuristic(call, H200))
    gradients = kernel.backward(call, inputs, outputs, cotangents, config.backward_heuristic(call, H200))
    assert outputs.out.shape == gradients.x.shape == shape
    assert outputs.rstd.shape == shape[:-1]
    np.testing.assert_array_equal(gradients.scale, np.zeros((1, shape[-1])))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((16384, 4096), "bfloat16"), ((131072, 128), "bfloat16"), ((64, 8192), "float32"), ((8, 7), "float16")]
)
@pytest.mark.parametrize("capability_number", [80, 90, 100])
def test_compiles_without_spills(monkeypatch, tmp_path, shape, dtype, capability_number):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorder = testing.Recorder()
    monkeypatch.setattr(kernel, "call_kernel", recorder)
    spec, parameter = ArraySpec(shape, dtype), ArraySpec((1, shape[-1]), dtype)
    call = RmsNormCall(x=spec, scale=parameter, offset=parameter, save_residuals=True)
    inputs = RmsNormInputs(*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (spec, parameter, parameter)))
    target = Target("gpu", "", f"{capability_number // 10}.0")

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, RmsNormOutputs(inputs.x), config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    assert [c.kernel.fn.__name__ for c in recorder.compilations] == ["rms_norm_forward_kernel", "rms_norm_backward_kernel"]
    for compilation in recorder.compilations:
        compiled = compilation.compile(capability_number)
        assert f".target sm_{capability_number}" in compiled.asm["ptx"]
        assert ".local" not in compiled.asm["ptx"]
        if shape[-1] % 8 == 0:
            wide = ("ld.global.v4.b32", "cp.async.cg.shared.global")  # the second moves 16 bytes by definition
            assert any(load in compiled.asm["ptx"] for load in wide), "loads are not 16 bytes wide"


def loss(x, scale, offset):
    return ejkernel.rms_norm(x, scale, offset, platform="triton").astype(jnp.float32).sum()


def specs(shape, dtype="bfloat16"):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in (shape, shape[-1:], shape[-1:]))


@needs_jax_triton
def test_lowers_for_cuda_and_keeps_the_environment(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/place")
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*specs((64, 256)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2
    assert "ejkernel.rms_norm[triton]" in text
    assert "ejkernel.rms_norm.backward[triton]" in text
    assert os.environ["TRITON_CACHE_DIR"] == "/a/place"


@needs_jax_triton
def test_vmap_folds_into_one_call():
    x, scale, offset = specs((6, 8, 256))
    stacked = jax.ShapeDtypeStruct((6, *scale.shape), scale.dtype)

    def per_member(x, scale, offset):
        return jax.vmap(jax.grad(loss, (0, 1, 2)), (0, 0, None))(x, scale, offset)

    with ejkernel.use(target=H200):
        text = jax.jit(per_member).trace(x, stacked, offset).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2


@needs_jax_triton
def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(x, scale, offset):
        return jax.grad(lambda *a: jax.lax.psum(loss(*a), "data"), (0, 1, 2))(x, scale, offset)

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(spec("data"), spec(), spec()), out_specs=(spec("data"), spec(), spec())
    )
    with ejkernel.use(target=H200):
        text = jax.jit(sharded).trace(*specs((64, 256))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2
    assert "all_reduce" in text


def test_supports_refuses_with_numbers():
    call, _, _ = problem((4, 64))

    def ask(target, supports=capability.supports_forward, **changes):
        return supports(dataclasses.replace(call, **changes), target)

    assert "the target is cpu" in ask(Target("cpu"))
    assert "unknown" in ask(Target("gpu"))
    assert "has 7.5" in ask(Target("gpu", "Tesla T4", "7.5"))
    assert "x is float64" in ask(H200, x=ArraySpec((4, 64), "float64"))
    assert "scale is float64" in ask(H200, scale=ArraySpec((1, 64), "float64"))
    assert "131072" in ask(H200, x=ArraySpec((4, 131072), "float32"))
    assert "32768" in ask(H200, capability.supports_backward, x=ArraySpec((4, 32768), "float32"))
    assert "3000000000 rows" in ask(H200, x=ArraySpec((3_000_000_000, 2), "float32"))


@needs_jax_triton
def test_supports_admits_what_it_should():
    call, _, _ = problem((4, 64))
    for target in (H200, Target("gpu", "", "8.0"), Target("gpu", "", "10.0")):
        assert capability.supports_forward(call, target) is None
        assert capability.supports_backward(call, target) is None
