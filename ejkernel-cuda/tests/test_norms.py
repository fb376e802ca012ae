"""`rms_norm`, `layer_norm` and `add_rms_norm` in CUDA C++ without a GPU: the handlers' checks, configs, lowering."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall, AddRmsNormInputs
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda._rows import config, kernel
from ejkernel_cuda.add_rms_norm import capability as added_capability, config as added_config, kernel as added_kernel
from ejkernel_cuda.rms_norm import capability

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
NAMES = ("rms_norm", "layer_norm", "add_rms_norm")
ADDED = AddRmsNormCall(
    x=ArraySpec((4, 64), "float32"),
    residual=ArraySpec((4, 64), "float32"),
    scale=ArraySpec((1, 64), "float32"),
    save_residuals=True,
)
CALL = RmsNormCall(x=ArraySpec((4, 64), "float32"), scale=ArraySpec((1, 64), "float32"), save_residuals=True)


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def check_forward(
    name="rms_norm",
    x=((2, 3, 8), jnp.float32),
    scale=(1, 8),
    offset=(0, 8),
    out=None,
    rstd=(6,),
    mean=None,
    threads=1,
    cluster=1,
    stages=2,
    residual=None,
    total=None,
):
    mean = mean or (rstd if name == "layer_norm" else (0,))
    added = x if name == "add_rms_norm" else ((0,), jnp.float32)
    results = (struct(*(out or x)), struct(*(total or added)), struct(mean), struct(rstd))
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target(f"{name}_forward"), results)(
            jnp.zeros(*x), jnp.zeros(*(residual or added)), jnp.zeros(scale), jnp.zeros(offset), epsilon=np.float32(1e-6),
            scale_offset=np.float32(0), threads=np.int64(threads), cluster=np.int64(cluster), stages=np.int64(stages),
        )
    )  # fmt: skip


def check_backward(
    name="rms_norm", x=(2, 3, 8), scale=(1, 8), rstd=(6,), mean=None, grad=(2, 3, 8), d_scale=None, d_offset=(0, 8), partials=2,
    partial_shapes=((1, 2, 8), (0, 2, 8)), cluster=1, stages=1, grad_sum=None, stored=jnp.float32,
):  # fmt: skip
    mean = mean or (rstd if name == "layer_norm" else (0,))
    grad_sum = grad_sum or (x if name == "add_rms_norm" else (0,))
    totals = struct(d_scale or scale, stored), struct(d_offset, stored)
    results = (struct(x), *totals, struct(partial_shapes[0]), struct(partial_shapes[1]))
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target(f"{name}_backward"), results)(
            jnp.zeros(x), jnp.zeros(scale), jnp.zeros(mean), jnp.zeros(rstd), jnp.zeros(grad), jnp.zeros(grad_sum),
            scale_offset=np.float32(0), threads=np.int64(32), cluster=np.int64(cluster), stages=np.int64(stages),
            partials=np.int64(partials),
        )
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_handlers_admit_the_contract(name):
    check_forward(name)
    check_forward(name, ((2, 3, 8), jnp.bfloat16), scale=(2, 8), offset=(1, 8), rstd=(0,), cluster=16)
    check_backward(name)
    check_backward(name, scale=(2, 8), d_offset=(1, 8), partials=5, partial_shapes=((2, 5, 8), (2, 5, 8)), stored=jnp.bfloat16)


@needs_library
@pytest.mark.parametrize("name", NAMES)
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
        ({"mean": (3,)}, r"mean must .*got \[3\]"),
        ({"threads": 24}, "threads must be a power of two up to 512, got 24"),
        ({"cluster": 32}, "cluster must be a power of two up to 16, got 32"),
        ({"stages": 9}, "stages must be 0 ... 8, got 9"),
        ({"stages": -1}, "stages must be 0 ... 8, got -1"),
    ],
)
def test_forward_refuses(name, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ejkernel_cuda {name}: {message}"):
        check_forward(name, **arguments)


@needs_library
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad": (2, 3, 4)}, "grad must be like x"),
        ({"rstd": (0,)}, "rstd must have one value per row"),
        ({"mean": (7,)}, r"mean must .*got \[7\]"),
        ({"d_scale": (2, 8)}, "d_scale must be like scale"),
        ({"stored": jnp.int32}, "d_scale must be float32, bfloat16 or float16"),
        ({"partial_shapes": ((2, 2, 8), (0, 2, 8))}, r"partial sums must be \[1, 2 partials, 8\], got \[2, 2, 8\]"),
        ({"d_offset": (1, 8), "partial_shapes": ((1, 2, 8), (1, 3, 8))}, "partial sums must be"),
        ({"partials": 0}, "partials must be positive, got 0"),
        ({"cluster": 3}, "cluster must be a power of two"),
        ({"stages": 0}, "stages must be 1 ... 8, got 0"),
    ],
)
def test_backward_refuses(name, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ejkernel_cuda {name}: {message}"):
        check_backward(name, **arguments)


@needs_library
@pytest.mark.parametrize(
    ("check", "name", "arguments", "message"),
    [
        (check_forward, "add_rms_norm", {"residual": ((2, 3, 4), jnp.float32)}, r"residual must be like x .* got \[2, 3, 4\]"),
        (check_forward, "add_rms_norm", {"residual": ((2, 3, 8), jnp.bfloat16)}, "residual must be like x"),
        (check_forward, "add_rms_norm", {"total": ((2, 3, 8), jnp.bfloat16)}, "sum must be like x"),
        (check_forward, "rms_norm", {"residual": ((2, 3, 8), jnp.float32)}, r"residual must be empty, got \[2, 3, 8\]"),
        (check_forward, "layer_norm", {"total": ((2, 3, 8), jnp.float32)}, "sum must be empty"),
        (check_backward, "add_rms_norm", {"grad_sum": (0,)}, r"grad_sum must be like x .* got \[0\]"),
        (check_backward, "layer_norm", {"grad_sum": (2, 3, 8)}, "grad_sum must be empty"),
    ],
)
def test_what_is_added_is_there_or_empty(check, name, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ejkernel_cuda {name}: {message}"):
        check(name, **arguments)


def lowered(function, *arguments):
    with ejkernel.use(target=H200):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


def loss(x, scale, offset, name="rms_norm"):
    return getattr(ejkernel, name)(x, scale, offset, platform="cuda").astype(jnp.float32).sum()


ARGUMENTS = (struct((64, 256), jnp.bfloat16), struct((256,), jnp.bfloat16), struct((256,), jnp.float32))


@needs_library
def test_add_rms_norm_lowers_for_cuda():
    """Backward reads the sum alone: neither x nor residual is an operand of a second call."""

    def loss(x, residual, scale):
        return sum(one.astype(jnp.float32).sum() for one in ejkernel.fused_add_rms_norm(x, residual, scale, platform="cuda"))

    x = struct((64, 256), jnp.bfloat16)
    text = lowered(jax.grad(loss, (0, 1, 2)), x, x, struct((256,), jnp.bfloat16))
    assert text.count("@ejkernel_cuda_add_rms_norm_forward") == text.count("@ejkernel_cuda_add_rms_norm_backward") == 1
    assert "ejkernel.add_rms_norm[cuda]" in text


@needs_library
@pytest.mark.parametrize("name", NAMES[:2])
def test_lowers_for_cuda(name):
    text = lowered(jax.grad(functools.partial(loss, name=name), (0, 1, 2)), *ARGUMENTS)
    assert text.count(f"@ejkernel_cuda_{name}_forward") == 1
    assert text.count(f"@ejkernel_cuda_{name}_backward") == 1
    assert f"ejkernel.{name}[cuda]" in text


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
    many, scale = ArraySpec((1 << 28, 1, 64), "float32"), ArraySpec((1 << 28, 64), "float32")
    assert "268435456 batch members" in ask(H200, x=many, scale=scale)


@needs_library
def test_add_rms_norm_takes_one_dtype():
    def ask(**changes):
        return added_capability.supports_backward(dataclasses.replace(ADDED, **changes), H200)

    assert ask() is None
    assert ask(residual=ArraySpec((4, 64), "bfloat16")) == "x is float32 and residual bfloat16; both must have one dtype"
    assert "scale is float64" in ask(scale=ArraySpec((1, 64), "float64"))
    wide = ArraySpec((4, 1 << 31), "float32")
    assert "2147483648" in ask(x=wide, residual=wide)


@needs_library
@pytest.mark.parametrize("width", [1, 7, 128, 1000, 4096, 8192, 20000, 65536, 131072, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", [H200, Target("gpu", "NVIDIA A100", "8.0")], ids=str)
def test_configs_are_legal_and_few(width, dtype, target):
    x = ArraySpec((4, width), dtype)
    call, added = dataclasses.replace(CALL, x=x, scale=None), dataclasses.replace(ADDED, x=x, residual=x, scale=None)
    assert capability.supports_backward(call, target) is None
    assert added_capability.supports_backward(added, target) is None
    own = (config.FORWARD, config.BACKWARD, config.CENTRED_BACKWARD)
    for call, knobs in [*((call, knobs) for knobs in own), (added, added_config.FORWARD), (added, added_config.BACKWARD)]:
        space, chosen = knobs.search_space(call, target), knobs.heuristic(call, target)
        assert len(space) <= 40 and len(set(space)) == len(space)
        for choice in (chosen, *space):
            assert choice.threads.bit_count() == 1 and choice.threads <= 512
            assert choice.cluster.bit_count() == 1 and choice.cluster <= (16 if target is H200 else 1)
            assert (0 if isinstance(choice, config.ForwardConfig) else 1) <= choice.num_stages <= 8


@pytest.mark.parametrize(
    ("width", "dtype", "forward", "backward", "centred", "added"),
    [
        (131072, "bfloat16", 8, 16, 16, 8),
        (32768, "bfloat16", 2, 8, 8, 2),
        (16384, "bfloat16", 1, 4, 1, 1),
        (8192, "bfloat16", 1, 1, 1, 1),
        (131072, "float32", 16, 16, 16, 16),
        (1 << 18, "float32", 1, 1, 1, 1),
    ],
)
def test_wide_rows_are_shared_by_a_cluster_that_holds_them(width, dtype, forward, backward, centred, added):
    x = ArraySpec((4, width), dtype)
    call, with_residual = (dataclasses.replace(of, x=x, scale=None) for of in (CALL, ADDED))
    chosen = [knobs.heuristic(call, H200) for knobs in (config.FORWARD, config.BACKWARD, config.CENTRED_BACKWARD)]
    chosen += [knobs.heuristic(with_residual, H200) for knobs in (added_config.FORWARD, added_config.BACKWARD)]
    assert [choice.cluster for choice in chosen] == [forward, backward, centred, added, added]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (4, 0)])
@pytest.mark.parametrize("name", NAMES[:2])
def test_no_rows_or_no_columns(name, shape):
    x, scale = jnp.zeros(shape), jnp.ones((1, shape[-1]))
    call = dataclasses.replace(CALL, x=ArraySpec.of(x), scale=ArraySpec.of(scale))
    inputs = RmsNormInputs(x, scale)
    found = kernel.norm_forward(name, call, inputs, config.ForwardConfig(32), centred=name == "layer_norm")
    gradients = kernel.norm_backward(name, call, inputs, found.mean, found.rstd, x, config.BackwardConfig(32, 4))
    assert found.rstd.shape == shape[:-1] and found.sum is None
    np.testing.assert_array_equal(found.rstd, np.full(shape[:-1], 1e3, np.float32))
    np.testing.assert_array_equal(gradients.scale, np.zeros((1, shape[-1])))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (4, 0)])
def test_nothing_to_add(shape):
    x, scale = jnp.zeros(shape), jnp.ones((1, shape[-1]))
    call = dataclasses.replace(ADDED, x=ArraySpec.of(x), residual=ArraySpec.of(x), scale=ArraySpec.of(scale))
    inputs = AddRmsNormInputs(x, x, scale)
    outputs = added_kernel.forward(call, inputs, config.ForwardConfig(32))
    gradients = added_kernel.backward(call, inputs, outputs, outputs, config.BackwardConfig(32, 4))
    assert outputs.out.shape == outputs.sum.shape == gradients.x.shape == gradients.residual.shape == shape
    np.testing.assert_array_equal(outputs.rstd, np.full(shape[:-1], 1e3, np.float32))
    np.testing.assert_array_equal(gradients.scale, np.zeros((1, shape[-1])))
