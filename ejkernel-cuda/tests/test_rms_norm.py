"""`rms_norm` in CUDA C++ on a machine without a GPU: the library, its checks, and lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel._arrays import ArraySpec
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import Target
from ejkernel_cuda import _library, _plugin
from ejkernel_cuda.rms_norm import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
CALL = RmsNormCall(x=ArraySpec((4, 64), "float32"), scale=ArraySpec((1, 64), "float32"), save_residuals=True)


@needs_library
def test_library_fits():
    assert _library.library_problem() is None
    assert _library.load().ejkernel_cuda_ffi_major() == 0


def test_versions_are_compared():
    assert _library.fit("0.1.0", "0.1.0", (0, 3), (0, 4)) is None
    assert "built as 0.0.9" in _library.fit("0.0.9", "0.1.0", (0, 3), (0, 4))
    assert "0.5" in _library.fit("0.1.0", "0.1.0", (0, 5), (0, 4))
    assert "1.0" in _library.fit("0.1.0", "0.1.0", (1, 0), (0, 4))
    assert "no header" in _library.fit("0.1.0", "0.1.0", (0, 3), None)


def test_missing_library_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "PATH", tmp_path / "libejkernel_cuda.so")
    problem = _library.library_problem.__wrapped__()
    assert "was not built" in problem and "\n" not in problem


def test_plugin_record():
    assert [(i.operation, i.phase) for i in _plugin.ejkernel_plugin().implementations] == [
        ("rms_norm", "forward"),
        ("rms_norm", "backward"),
    ]


def check_target(name):
    """The checks of a handler, on the CPU: they need no stream."""
    symbol = f"ejkernel_cuda_rms_norm_{name}_check"
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(_library.load(), symbol)), platform="cpu")
    return symbol


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def check_forward(x=((2, 3, 8), jnp.float32), scale=(1, 8), offset=(0, 8), out=None, rstd=(6,), threads=1):
    out = out or x
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target("forward"), (struct(*out), struct(rstd)))(
            jnp.zeros(*x), jnp.zeros(scale), jnp.zeros(offset),
            epsilon=np.float32(1e-6), scale_offset=np.float32(0), threads=np.int64(threads),
        )
    )  # fmt: skip


def check_backward(
    x=(2, 3, 8), scale=(1, 8), rstd=(6,), grad=(2, 3, 8), d_scale=None, d_offset=(0, 8), parts=((1, 2, 8), (0, 2, 8))
):
    results = (struct(x), struct(d_scale or scale), struct(d_offset), struct(parts[0]), struct(parts[1]))
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target("backward"), results)(
            jnp.zeros(x), jnp.zeros(scale), jnp.zeros(rstd), jnp.zeros(grad),
            scale_offset=np.float32(0), threads=np.int64(32), parts=np.int64(2),
        )
    )  # fmt: skip


@needs_library
def test_handlers_admit_the_contract():
    check_forward()
    check_forward(((2, 3, 8), jnp.bfloat16), scale=(2, 8), offset=(1, 8), rstd=(0,))
    check_backward()
    check_backward(scale=(2, 8), d_offset=(1, 8), parts=((2, 5, 8), (2, 5, 8)))


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": ((2, 3, 8), jnp.int32)}, "x must be float32, bfloat16 or float16"),
        ({"x": ((2, 8), jnp.float32)}, r"x must be \[batch, rows, width\], got \[2, 8\]"),
        ({"scale": (3, 8)}, r"scale must be .* got \[3, 8\]"),
        ({"offset": (1, 7)}, r"offset must be .* got \[1, 7\]"),
        ({"out": ((2, 3, 8), jnp.float16)}, "out must be like x"),
        ({"out": ((2, 3, 9), jnp.float32)}, "out must be like x"),
        ({"rstd": (5,)}, r"rstd must have one value per row or none, got \[5\]"),
        ({"threads": 24}, "threads must be a power of two"),
    ],
)
def test_forward_refuses(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check_forward(**arguments)


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad": (2, 3, 4)}, "grad must be like x"),
        ({"rstd": (0,)}, "rstd must have one value per row"),
        ({"d_scale": (2, 8)}, "d_scale must be like scale"),
        ({"parts": ((2, 2, 8), (0, 2, 8))}, "partial sums"),
        ({"d_offset": (1, 8), "parts": ((1, 2, 8), (1, 3, 8))}, "partial sums must be .* equal"),
    ],
)
def test_backward_refuses(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check_backward(**arguments)


def lowered(function, *arguments):
    with ejkernel.use(target=H200):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


def loss(x, scale, offset):
    return ejkernel.rms_norm(x, scale, offset, platform="cuda").astype(jnp.float32).sum()


ARGUMENTS = (struct((64, 256), jnp.bfloat16), struct((256,), jnp.bfloat16), struct((256,), jnp.float32))


@needs_library
def test_lowers_for_cuda():
    text = lowered(jax.grad(loss, (0, 1, 2)), *ARGUMENTS)
    assert text.count("@ejkernel_cuda_rms_norm_forward") == 1
    assert text.count("@ejkernel_cuda_rms_norm_backward") == 1
    assert "ejkernel.rms_norm[cuda]" in text


@needs_library
def test_vmap_folds_into_one_call():
    mapped = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, 0, None))
    text = lowered(mapped, struct((6, 8, 256)), struct((6, 256)), struct((256,)))
    assert text.count("@ejkernel_cuda_rms_norm_forward") == text.count("@ejkernel_cuda_rms_norm_backward") == 1


@needs_library
def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(x, scale, offset):
        return jax.grad(lambda *a: jax.lax.psum(loss(*a), "data"), (0, 1, 2))(x, scale, offset)

    specs = (spec("data"), spec(), spec())
    text = lowered(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs), *ARGUMENTS)
    assert text.count("@ejkernel_cuda_rms_norm_backward") == 1
    assert "all_reduce" in text


@needs_library
def test_exports_with_the_named_checks_off():
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"ejkernel_cuda_rms_norm_{name}") for name in ("forward", "backward")]
    with ejkernel.use(target=H200):
        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=("cuda",), disabled_checks=checks)(*ARGUMENTS)
    assert exported.platforms == ("cuda",)
    assert len(exported.serialize()) > 0


def test_supports_refuses_with_numbers():
    def ask(target, **changes):
        return capability.supports_forward(dataclasses.replace(CALL, **changes), target)

    assert "the target is tpu" in ask(Target("tpu", "TPU v5e"))
    assert "unknown" in ask(Target("gpu"))
    assert "has 7.0" in ask(Target("gpu", "Tesla V100", "7.0"))
    assert "x is float64" in ask(H200, x=ArraySpec((4, 64), "float64"))
    assert "scale is float64" in ask(H200, scale=ArraySpec((1, 64), "float64"))
    assert "2147483648" in ask(H200, x=ArraySpec((4, 1 << 31), "float32"))


@needs_library
@pytest.mark.parametrize("width", [1, 7, 128, 1000, 4096, 8192, 20000, 100000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_config_is_a_power_of_two_that_the_handler_admits(width, dtype):
    call = dataclasses.replace(CALL, x=ArraySpec((4, width), dtype), scale=None)
    assert capability.supports_backward(call, H200) is None
    space = [*config.forward_space(call, H200), *config.backward_space(call, H200)]
    for choice in (config.forward_heuristic(call, H200), config.backward_heuristic(call, H200), *space):
        assert choice.threads.bit_count() == 1 and choice.threads <= 512


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (4, 0)])
def test_no_rows_or_no_columns(shape):
    x, scale = jnp.zeros(shape), jnp.ones((1, shape[-1]))
    call = dataclasses.replace(CALL, x=ArraySpec.of(x), scale=ArraySpec.of(scale))
    outputs = kernel.forward(call, RmsNormInputs(x, scale), config.ForwardConfig(32))
    gradients = kernel.backward(call, RmsNormInputs(x, scale), outputs, RmsNormOutputs(x), config.BackwardConfig(32, 4))
    assert outputs.rstd.shape == shape[:-1]
    np.testing.assert_array_equal(gradients.scale, np.zeros((1, shape[-1])))
