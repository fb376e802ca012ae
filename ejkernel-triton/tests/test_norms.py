"""`rms_norm` and `layer_norm` in Triton on a machine without a GPU: numbers in the interpreter, machine code, lowering."""

from __future__ import annotations

import dataclasses
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations import operation_module
from ejkernel.plugin import Target
from ejkernel.testing.checks import relative_error, widened
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close
from ejkernel_triton._ahead_of_time import TOLERATED
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._rows import capability, config
from ejkernel_triton._versions import version_problem

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
SINGLE_PASS = config.ForwardConfig(rows=4, num_warps=1), config.BackwardConfig(rows=2, num_warps=1, programs=5, num_stages=1)
LOOPED = (
    config.ForwardConfig(rows=1, num_warps=1, block=16),
    config.BackwardConfig(rows=2, num_warps=1, programs=3, num_stages=1, block=32),
)
COOPERATIVE = config.ForwardConfig(rows=1, num_warps=1, block=32, cooperative=True), SINGLE_PASS[1]
PERSISTENT_COOPERATIVE = (
    config.ForwardConfig(rows=1, num_warps=1, block=32, num_stages=2, cooperative=True, programs=4),
    SINGLE_PASS[1],
)
KINDS = {
    "single_pass": SINGLE_PASS,
    "looped": LOOPED,
    "cooperative": COOPERATIVE,
    "persistent_cooperative": PERSISTENT_COOPERATIVE,
}


class Norm:
    """One of the two operations: its contract, reference and kernels."""

    def __init__(self, name):
        self.name = name
        self.operation = operation_module(name, "interface").OPERATION
        self.reference = operation_module(name, "reference")
        self.kernel = importlib.import_module(f"ejkernel_triton.{name}.kernel")

    def problem(self, shape, dtype="float32", scale=1, offset=0, seed=0, scale_offset=0.0, epsilon=1e-6, shift=0.0):
        """A canonical call and its arrays; `scale` and `offset` are the parameter's batch size, 0 for none."""
        rng = np.random.default_rng(seed)

        def array(*shape, shift=0.0):
            return jnp.asarray(shift + rng.standard_normal(shape), dtype)

        inputs = self.operation.Inputs(
            array(*shape, shift=shift),
            array(scale, shape[-1]) if scale else None,
            array(offset, shape[-1]) if offset else None,
        )
        specs = {name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()}
        call = self.operation.Call(**specs, epsilon=epsilon, scale_offset=scale_offset, save_residuals=True)
        return call, inputs, self.operation.Outputs(array(*shape))

    def function(self):
        return getattr(ejkernel, self.name)


@pytest.fixture(params=["rms_norm", "layer_norm"])
def norm(request):
    return Norm(request.param)


PROBLEMS = [
    (((3, 5, 64),), {}),
    (((2, 33, 48),), {"offset": 1, "scale_offset": 1.0}),
    (((4, 9, 40),), {"scale": 4, "offset": 4}),
    (((4, 9, 40),), {"scale": 4, "offset": 1}),
    (((4, 9, 40),), {"scale": 1, "offset": 4}),
    (((5, 7),), {"scale": 0}),
    (((5, 7),), {"scale": 0, "offset": 1}),
    (((130, 3),), {"epsilon": 0.5}),
    (((2, 3, 4099),), {"offset": 1}),
    (((22, 128),), {"dtype": "bfloat16", "offset": 1}),
    (((3, 7, 96),), {"dtype": "float16", "scale": 3}),
]


TRIED = [(kind, *problem) for kind in ("single_pass", "looped") for problem in PROBLEMS]
TRIED += [(kind, *PROBLEMS[index]) for kind in ("cooperative", "persistent_cooperative") for index in (0, 2, 6)]
TRIED += [("persistent_cooperative", *PROBLEMS[index]) for index in (1, 5, 9)] + [("cooperative", *PROBLEMS[8])]


@pytest.mark.parametrize(("kind", "arguments", "options"), TRIED)
def test_numbers_in_the_interpreter(norm, interpreted, kind, arguments, options):
    configs = KINDS[kind]
    call, inputs, cotangents = norm.problem(*arguments, **options)
    if call.x.shape[-1] > 4000 and configs is not SINGLE_PASS:
        configs = tuple(dataclasses.replace(choice, block=choice.block and 1024) for choice in configs)
    outputs = norm.kernel.forward(call, inputs, configs[0])
    exact = norm.reference.forward(call, widened(inputs))
    limit = TOLERANCE[call.x.dtype]
    assert relative_error(outputs.out, exact.out) < limit
    assert outputs.out.dtype == inputs.x.dtype
    for name in norm.operation.statistics:
        assert relative_error(getattr(outputs, name), getattr(exact, name)) < 1e-5
        assert getattr(outputs, name).dtype == jnp.float32

    got = norm.kernel.backward(call, inputs, outputs, cotangents, configs[1])
    wanted = norm.reference.backward(call, widened(inputs), exact, widened(cotangents))
    for name, value, exact_value in zip(inputs._fields, got, wanted, strict=True):
        assert (value is None) == (exact_value is None), name
        if value is not None:
            assert relative_error(value, exact_value) < limit, name
            assert value.dtype == getattr(inputs, name).dtype


@pytest.mark.parametrize(("shift", "magnitude"), [(1449.5, 0.45), (-1e5, 3.0), (0.0, 3e19), (0.0, 1e-25)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_far_from_zero_and_large_squares(norm, interpreted, kind, shift, magnitude):
    call, inputs, cotangents = norm.problem((2, 3, 300), offset=1)
    x = np.random.default_rng(3).standard_normal((2, 3, 300))
    inputs = inputs._replace(x=jnp.asarray(shift + magnitude * x, "float32"))
    outputs = norm.kernel.forward(call, inputs, KINDS[kind][0])
    exact = norm.reference.forward(call, widened(inputs))
    check_close("out", outputs.out, exact.out, FORWARD["float32"])
    check_close("rstd", outputs.rstd, exact.rstd, FORWARD["float32"])
    wanted = norm.reference.backward(call, widened(inputs), exact, widened(cotangents))
    gradients = norm.kernel.backward(call, inputs, outputs, cotangents, KINDS[kind][1])
    for name, value in gradients._asdict().items():
        check_close(name, value, getattr(wanted, name), GRADIENT["float32"])


@pytest.mark.parametrize("shape", [(3, 24), (2, 2, 300)])
def test_every_config_gives_the_same_numbers(norm, interpreted, shape):
    call, inputs, cotangents = norm.problem(shape)
    exact = norm.reference.forward(call, widened(inputs))
    wanted = norm.reference.backward(call, widened(inputs), exact, widened(cotangents))
    looped = [config.ForwardConfig(1, 1, block, stages) for block in (8, 64, 512) for stages in (1, 2)]
    shared = [config.ForwardConfig(1, 1, block, 1, True, programs) for block in (32, 128, 512) for programs in (0, 2)]
    for choice in [*{choice.rows: choice for choice in config.forward_space(call, H200)}.values(), *looped, *shared]:
        outputs = norm.kernel.forward(call, inputs, choice)
        assert relative_error(outputs.out, exact.out) < 2e-5, choice
    split = [config.BackwardConfig(rows, 1, programs, 1, 64) for rows in (1, 4) for programs in (1, 7)]
    for choice in [*{(c.rows, c.programs): c for c in config.backward_space(call, H200)}.values(), *split]:
        got = norm.kernel.backward(call, inputs, outputs, cotangents, choice)
        assert relative_error(got.x, wanted.x) < 2e-5, choice
        assert relative_error(got.scale, wanted.scale) < 2e-5, choice


@pytest.mark.parametrize("choice", [kind[0] for kind in KINDS.values()], ids=KINDS)
def test_rows_far_from_zero_keep_their_variance(interpreted, choice):
    norm = Norm("layer_norm")
    call, inputs, _ = norm.problem((3, 333), shift=1000.0, seed=4)
    inputs = inputs._replace(x=inputs.x.at[1, 0].set(-50_000.0))
    exact = norm.reference.forward(call, widened(inputs))
    assert relative_error(norm.kernel.forward(call, inputs, choice).rstd, exact.rstd) < 1e-4


def test_forward_without_residuals_leaves_statistics_alone(norm, interpreted):
    call, inputs, _ = norm.problem((3, 16))
    call = dataclasses.replace(call, save_residuals=False)
    for choice in (config.forward_heuristic(call, H200), *(kind[0] for kind in KINDS.values())):
        outputs = norm.kernel.forward(call, inputs, choice)
        assert [getattr(outputs, name) for name in norm.operation.statistics] == [None] * len(norm.operation.statistics)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 8), (4, 0)])
def test_no_rows_or_no_columns(norm, shape):
    call, inputs, cotangents = norm.problem(shape)
    outputs = norm.kernel.forward(call, inputs, config.forward_heuristic(call, H200))
    gradients = norm.kernel.backward(call, inputs, outputs, cotangents, config.backward_heuristic(call, H200))
    assert outputs.out.shape == gradients.x.shape == shape
    for name in norm.operation.statistics:
        assert getattr(outputs, name).shape == shape[:-1]
    np.testing.assert_array_equal(gradients.scale, np.zeros((1, shape[-1])))


HELD_KERNELS = ["norm_forward_kernel", "norm_backward_kernel"]
SPLIT_KERNELS = ["norm_row_means_kernel", "norm_backward_kernel"]


COMPILED = [
    ((1024, 131072), "bfloat16", ["norm_forward_persistent_kernel", *SPLIT_KERNELS]),
    ((8192, 16384), "bfloat16", ["norm_forward_kernel", *SPLIT_KERNELS]),
    ((2048, 32768), "bfloat16", ["norm_forward_looped_kernel", *SPLIT_KERNELS]),
    ((16384, 4096), "bfloat16", HELD_KERNELS),
    ((131072, 128), "bfloat16", HELD_KERNELS),
    ((64, 8192), "float32", HELD_KERNELS),
    ((8, 7), "float16", HELD_KERNELS),
    ((1024, 131072), "float32", ["norm_forward_persistent_kernel", *SPLIT_KERNELS]),
    ((8, 131072), "bfloat16", ["norm_forward_cooperative_kernel", *SPLIT_KERNELS]),
    ((8, 1_000_000), "bfloat16", ["norm_forward_looped_kernel", *SPLIT_KERNELS]),
]
"""The first, which has the most in registers, is always compiled for every generation."""


def launches(norm, recorder, shape, dtype, target):
    """Of both phases with the heuristics' configs."""
    spec, parameter = ArraySpec(shape, dtype), ArraySpec((1, shape[-1]), dtype)
    call = norm.operation.Call(x=spec, scale=parameter, offset=parameter, save_residuals=True)
    inputs = norm.operation.Inputs(*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (spec, parameter, parameter)))

    def both(inputs):
        outputs = norm.kernel.forward(call, inputs, config.forward_heuristic(call, target))
        cotangents = norm.operation.Outputs(inputs.x)
        return norm.kernel.backward(call, inputs, outputs, cotangents, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    return recorder.compilations


@pytest.mark.parametrize(
    ("shape", "dtype", "kernels", "capability_number"),
    [
        pytest.param(*problem, number, marks=pytest.mark.slow if number != 90 and problem is not COMPILED[0] else ())
        for problem in COMPILED
        for number in (80, 90, 100)
    ],
)
def test_compiles_without_spills(norm, recorder, shape, dtype, kernels, capability_number):
    """Programs that stay hold all that registers can hold, and may spill a little."""
    target = Target("gpu", "", f"{capability_number // 10}.0")
    compilations = launches(norm, recorder, shape, dtype, target)
    assert [c.kernel.fn.__name__ for c in compilations] == kernels
    for compilation in compilations:
        compiled = compilation.compile(capability_number)
        assert f".target sm_{capability_number}" in compiled.asm["ptx"]
        taken = testing.resources(compiled)
        assert taken.shared <= shared_memory_limit(target)
        if "persistent" in compilation.kernel.fn.__name__:
            assert taken.spilling <= TOLERATED
        else:
            assert taken.stack <= testing.tolerated_stack()
        if shape[-1] % 8 == 0:
            wide = ("ld.global.v4.b32", "cp.async.cg.shared.global")  # the second moves 16 bytes by definition
            assert any(load in compiled.asm["ptx"] for load in wide), "loads are not 16 bytes wide"


def test_the_next_rows_are_asked_for_before_these_are_summed_up(norm, recorder):
    """Triton decides on that order, and knows nothing of what programs tell each other through memory."""
    ptx = launches(norm, recorder, (1024, 131072), "bfloat16", H200)[0].compile(90).asm["ptx"]
    assert ptx.index("cp.async.wait_group") < ptx.rindex("cp.async.cg") < ptx.index("shfl.sync")
    assert ptx.index("shfl.sync") < ptx.index("st.global") < ptx.index("atom.")


WIDE_SHAPES = ((8192, 16384), (2048, 32768), (1024, 65536), (1024, 131072), (512, 262144), (8, 1_000_000), (8, 32768))
FORWARD_WINNERS = {
    (16384, 4096): [(2, 4), (1, 8)],
    (131072, 128): [(16, 4), (16, 8)],
    (8192, 8192): [(1, 8)],
    (8192, 16384): [(1, 16)],
    (2048, 32768): [(1, 16, 8192), (1, 32)],
    (1024, 65536): [(1, 16, 8192)],
    (1024, 131072): [(1, 4, 8192, 2, True, 24)],
}
BACKWARD_WINNERS = {
    (16384, 4096): [(2, 8, 132, 3), (1, 4, 264, 3)],
    (131072, 128): [(16, 2, 1056, 3)],
    (8192, 8192): [(1, 8, 132, 3)],
    (8192, 16384): [(2, 8, 64, 1, 2048), (1, 32, 132, 3)],
    (2048, 32768): [(4, 4, 32, 3, 1024)],
    (1024, 65536): [(2, 8, 16, 1, 2048)],
    (1024, 131072): [(4, 4, 16, 3, 1024)],
}
"""What was fastest on an H200, in `benchmarks/results`."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_search_spaces_are_small_and_have_what_was_fastest(norm, dtype):
    cases = operation_module(norm.name, "cases").CASES
    drawn = (case.arrays(np.random.default_rng(0)) for case in cases if not any(tag.startswith("bench") for tag in case.tags))
    shapes = {*(arrays["x"].shape for arrays in drawn), *WIDE_SHAPES, *FORWARD_WINNERS}
    for shape in shapes:
        call = norm.operation.Call(x=ArraySpec(shape, dtype), scale=ArraySpec((1, shape[-1]), dtype))
        for target in (H200, Target("gpu", "", "8.0"), Target("gpu", "", "8.9"), Target("cpu")):
            for space in (config.FORWARD, config.BACKWARD):
                found = space.search_space(call, target)
                assert space.heuristic(call, target) in found
                assert len(found) == len(set(found)) <= 40, (shape, target, len(found))
        if dtype == "bfloat16" and shape in FORWARD_WINNERS:
            assert {config.ForwardConfig(*fields) for fields in FORWARD_WINNERS[shape]} <= {*config.forward_space(call, H200)}
            assert {config.BackwardConfig(*fields) for fields in BACKWARD_WINNERS[shape]} <= {
                *config.backward_space(call, H200)
            }


def loss_of(norm):
    def loss(x, scale, offset):
        return norm.function()(x, scale, offset, platform="triton").astype(jnp.float32).sum()

    return loss


def specs(shape, dtype="bfloat16"):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in (shape, shape[-1:], shape[-1:]))


@needs_jax_triton
def test_lowers_for_cuda_and_keeps_the_environment(norm, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/place")
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss_of(norm), (0, 1, 2))).trace(*specs((64, 256)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2
    assert f"ejkernel.{norm.name}[triton]" in text
    assert f"ejkernel.{norm.name}.backward[triton]" in text
    assert os.environ["TRITON_CACHE_DIR"] == "/a/place"


@needs_jax_triton
def test_vmap_folds_into_one_call(norm):
    x, scale, offset = specs((6, 8, 256))
    stacked = jax.ShapeDtypeStruct((6, *scale.shape), scale.dtype)

    def per_member(x, scale, offset):
        return jax.vmap(jax.grad(loss_of(norm), (0, 1, 2)), (0, 0, None))(x, scale, offset)

    with ejkernel.use(target=H200):
        text = jax.jit(per_member).trace(x, stacked, offset).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2


@needs_jax_triton
def test_shard_map_checks_varying_axes(norm):
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(x, scale, offset):
        return jax.grad(lambda *a: jax.lax.psum(loss_of(norm)(*a), "data"), (0, 1, 2))(x, scale, offset)

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(spec("data"), spec(), spec()), out_specs=(spec("data"), spec(), spec())
    )
    with ejkernel.use(target=H200):
        text = jax.jit(sharded).trace(*specs((64, 256))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2
    assert "all_reduce" in text


def test_supports_refuses_with_numbers(norm):
    call, _, _ = norm.problem((4, 64))

    def ask(target, **changes):
        return str(capability.supports_norm(dataclasses.replace(call, **changes), target))

    assert "the target is cpu" in ask(Target("cpu"))
    assert "unknown" in ask(Target("gpu"))
    assert "has 7.5" in ask(Target("gpu", "Tesla T4", "7.5"))
    assert "x is float64" in ask(H200, x=ArraySpec((4, 64), "float64"))
    assert "scale is float64" in ask(H200, scale=ArraySpec((1, 64), "float64"))
    assert "3000000000 rows" in ask(H200, x=ArraySpec((3_000_000_000, 2), "float32"))
    assert "width 3000000000" in ask(H200, x=ArraySpec((2, 3_000_000_000), "float32"))


@needs_jax_triton
def test_supports_admits_what_it_should(norm):
    call, _, _ = norm.problem((4, 64))
    wide_rows = dataclasses.replace(call, x=ArraySpec((4, 1_000_000), "float32"))
    for target in (H200, Target("gpu", "", "8.0"), Target("gpu", "", "10.0")):
        assert capability.supports_norm(call, target) is None
        assert capability.supports_norm(wide_rows, target) is None
