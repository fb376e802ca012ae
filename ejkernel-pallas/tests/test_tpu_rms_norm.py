"""`rms_norm` on TPU without one: numbers under Pallas's TPU interpreter through the public function, and lowering for `tpu`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.rms_norm import reference
from ejkernel.operations.rms_norm.interface import OPERATION, RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import Target
from ejkernel_pallas import _plugin
from ejkernel_pallas.tpu.rms_norm import capability, config, kernel

V6E = Target("tpu", "TPU v6 lite")
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-3}


def arrays(shape, dtype="float32", scale=True, offset=False, seed=0):
    rng = np.random.default_rng(seed)

    def make(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return make(*shape), make(shape[-1]) if scale else None, make(shape[-1]) if offset else None, make(*shape)


def run(x, scale, offset, grad, **options):
    def norm(*values):
        return ejkernel.rms_norm(*values, platform="pallas", **options)

    out, pullback = jax.vjp(norm, x, scale, offset)
    return out, *pullback(grad)


def interpreted(function, *values):
    with ejkernel.use(target=V6E), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        return jax.jit(function)(*values)


def exact(x, scale, offset, grad, **options):
    wide = [None if v is None else np.asarray(v, np.float64) for v in (x, scale, offset, grad)]
    call = dataclasses.replace(OPERATION.canonicalise(x, scale, offset, **options).call, save_residuals=True)
    inputs = RmsNormInputs(wide[0], *(None if v is None else v[None] for v in wide[1:3]))
    outputs = reference.forward(call, inputs)
    got = reference.backward(call, inputs, outputs, RmsNormOutputs(wide[3]))
    return outputs.out, got.x, *(None if v is None else v[0] for v in (got.scale, got.offset))


def assert_close(got, wanted, limit):
    for name, value, exact_value in zip(("out", "x", "scale", "offset"), got, wanted, strict=True):
        assert (value is None) == (exact_value is None), name
        if value is not None:
            error = np.linalg.norm(np.asarray(value, np.float64) - exact_value) / np.linalg.norm(exact_value)
            assert error < limit, (name, error)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "parameters"),
    [
        ((3, 5, 64), "float32", {}, {}),
        ((2, 33, 200), "float32", {"scale_offset": 1.0}, {"offset": True}),
        ((40, 128), "float32", {}, {"scale": False}),
        ((40, 128), "float32", {}, {"scale": False, "offset": True}),
        ((70, 1), "float32", {"epsilon": 0.5}, {}),
        ((2100, 130), "float32", {}, {"offset": True}),
        ((37, 256), "bfloat16", {}, {"offset": True}),
        ((20, 4099), "float32", {}, {}),
    ],
)
def test_numbers_in_the_interpreter(shape, dtype, options, parameters):
    values = arrays(shape, dtype, **parameters)
    got = interpreted(functools.partial(run, **options), *values)
    assert_close(got, exact(*values, **options), TOLERANCE[dtype])


@pytest.mark.parametrize("shared", [True, False])
def test_vmap_with_gradients(shared):
    x, _, _, grad = arrays((4, 21, 96))
    scales, offsets = (jnp.asarray(np.random.default_rng(seed).standard_normal((4, 96)), jnp.float32) for seed in (1, 2))
    scale = scales[0] if shared else scales
    got = interpreted(jax.vmap(run, (0, None if shared else 0, 0, 0)), x, scale, offsets, grad)
    members = [exact(x[i], scale if shared else scale[i], offsets[i], grad[i]) for i in range(4)]
    assert_close(got, [np.stack([member[k] for member in members]) for k in range(4)], 2e-5)


def test_every_config_gives_the_same_numbers():
    x, scale, _, grad = arrays((150, 300))
    inputs = RmsNormInputs(x, scale[None])
    call = dataclasses.replace(OPERATION.canonicalise(x, scale).call, save_residuals=True)
    wanted = exact(x, scale, None, grad)
    for rows in (16, 64, 1024):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
            outputs = kernel.forward(call, inputs, config.Config(rows))
            got = kernel.backward(call, inputs, outputs, RmsNormOutputs(grad), config.Config(rows))
        assert_close((outputs.out, got.x, got.scale[0], None), wanted, 2e-5)
        rstd = 1 / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, -1) + 1e-6)
        np.testing.assert_allclose(outputs.rstd, rstd, rtol=1e-5)


def lowered(function, *values):
    with ejkernel.use(target=V6E):
        return jax.jit(function).trace(*values).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4096, 1024), (7, 33), (100, 16384)])
def test_lowers_for_tpu(shape, dtype):
    x, parameter = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], dtype)
    text = lowered(run, x, parameter, parameter, x)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2
    assert "ejkernel.rms_norm[pallas.tpu]" in text


def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(x, scale, offset, grad):
        return run(x, scale, offset, grad)

    specs = (spec("data"), spec(), spec(), spec("data"))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(spec("data"), spec("data"), spec(), spec()))
    x, parameter = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    text = lowered(sharded, x, parameter, parameter, x)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2
    assert "all_reduce" in text


def test_supports_refuses_with_numbers():
    call = RmsNormCall(x=ArraySpec((4, 64), "float32"))

    def ask(target, **changes):
        return capability.supports(dataclasses.replace(call, **changes), target)

    assert ask(V6E) is None
    assert "the target is gpu" in ask(Target("gpu", "NVIDIA H200", "9.0"))
    assert "x is float16" in ask(V6E, x=ArraySpec((4, 64), "float16"))
    assert "offset is float64" in ask(V6E, offset=ArraySpec((1, 64), "float64"))
    assert ask(V6E, x=ArraySpec((4, 32768), "bfloat16")) is None
    assert "16384" in ask(V6E, x=ArraySpec((4, 32768), "float32"))
    assert "65536" in ask(V6E, x=ArraySpec((4, 65536), "float32"))


def test_plugin_record():
    plugin = _plugin.ejkernel_plugin()
    own = {(i.variant, i.phase) for i in plugin.implementations if i.operation == "rms_norm"}
    assert own == {("tpu", "forward"), ("tpu", "backward")}
