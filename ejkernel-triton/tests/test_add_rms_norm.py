"""`add_rms_norm` in Triton without a GPU: cases are the conformance suite's; here, kinds of kernels and machine code."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.add_rms_norm.cases import CASES
from ejkernel.operations.add_rms_norm.interface import OPERATION, AddRmsNormCall
from ejkernel.plugin import Target
from ejkernel_triton._rows.config import BackwardConfig
from ejkernel_triton.add_rms_norm import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from both_phases import check_phases

from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.add_rms_norm import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
FORWARD = (config.ForwardConfig(4, 1), config.ForwardConfig(1, 1, 16))
BACKWARD = (BackwardConfig(2, 1, 5, 1), BackwardConfig(2, 1, 3, 1, 32))
NAMED = {case.name: case for case in CASES}


def problem(shape, dtype="float32", other="float32", scale=1, magnitude=1.0, **options):
    rng = np.random.default_rng(0)

    def array(*shape, dtype=dtype):
        return jnp.asarray(magnitude * rng.standard_normal(shape), dtype)

    inputs = OPERATION.Inputs(array(*shape), array(*shape, dtype=other), array(scale, shape[-1]) if scale else None)
    specs = {name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()}
    return AddRmsNormCall(**specs, **options, save_residuals=True), inputs


@pytest.mark.parametrize("choices", [*itertools.product(FORWARD, BACKWARD)], ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 5, 64), {}),
        ((4, 9, 40), {"scale": 4, "scale_offset": 1.0}),
        ((5, 7), {"scale": 0, "epsilon": 0.5}),
        ((2, 3, 300), {"magnitude": 3e19}),
    ],
)
def test_numbers_of_every_kind(interpreted, shape, options, choices):
    check_phases(OPERATION, kernel, *problem(shape, **options), choices)


@pytest.mark.parametrize("choices", [*zip(FORWARD, BACKWARD, strict=True)], ids=str)
@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_each_result_has_the_dtype_of_its_array(interpreted, dtype, other, choices):
    call, inputs = problem((3, 5, 64), dtype, other)
    outputs, _ = check_phases(OPERATION, kernel, call, inputs, choices, (1e-2, 2e-2))
    assert (outputs.out.dtype, outputs.sum.dtype) == (inputs.x.dtype, inputs.residual.dtype)
    wanted = (inputs.x.astype(jnp.float32) + inputs.residual.astype(jnp.float32)).astype(other)
    np.testing.assert_array_equal(outputs.sum, wanted)


def test_the_norm_is_of_the_rounded_sum(interpreted):
    call, inputs = problem((2, 64), "float32", "bfloat16", scale=0, epsilon=0.0)
    for choice in FORWARD:
        outputs = kernel.forward(call, inputs, choice)
        exact = np.asarray(outputs.sum, np.float64)
        np.testing.assert_allclose(outputs.out, exact / np.sqrt(np.mean(exact**2, -1, keepdims=True)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_search_spaces_are_small(dtype):
    for shape in ((3, 1), (131072, 128), (16384, 4096), (2048, 32768), (8, 1_000_000)):
        call = AddRmsNormCall(x=ArraySpec(shape, "bfloat16"), residual=ArraySpec(shape, dtype))
        for target, space in itertools.product(
            (H200, Target("gpu", "", "8.9"), Target("cpu")), (config.FORWARD, config.BACKWARD)
        ):
            found = space.search_space(call, target)
            assert space.heuristic(call, target) in found
            assert len(found) == len(set(found)) <= 40, (shape, target, len(found))


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", ["bench-16384x4096", "bench-131072x128", "wide"])
def test_machine_code(triton_cache, name, sm):
    launches = [launch for _, launch in recorded("add_rms_norm", NAMED[name], "bfloat16", target_of(sm))]
    assert {launch.kernel.fn.__name__ for launch in launches} == {"add_rms_norm_forward_kernel", "norm_backward_kernel"}
    for launch in {launch.identity: launch for launch in launches}.values():
        compiled = launch.compile(sm)
        taken = testing.resources(compiled)
        assert taken.stack <= testing.tolerated_stack() and taken.shared <= (227 if sm == 90 else 163) * 1024, launch.constants
        if name != "wide":
            wide = ("ld.global.v4.b32", "cp.async.cg.shared.global")
            assert any(load in compiled.asm["ptx"] for load in wide), "loads are not 16 bytes wide"


def test_machine_code_of_rows_that_are_read_twice(recorder):
    call, inputs = problem((8, 40960), "bfloat16", "bfloat16")
    kernel.forward(call, inputs, config.forward_heuristic(call, H200))
    (launch,) = recorder.compilations
    assert launch.kernel.fn.__name__ == "add_rms_norm_forward_looped_kernel"
    assert testing.stack_bytes(launch.compile(90)) <= testing.tolerated_stack()


def test_what_is_refused():
    call, _ = problem((4, 64))
    assert capability.supports_forward(call, H200) is None
    far = dataclasses.replace(call, x=ArraySpec((3_000_000_000, 2), "float32"))
    assert "3000000000 rows" in (capability.supports_forward(far, H200) or "")
    wide = dataclasses.replace(call, residual=ArraySpec((4, 64), "float64"))
    assert "residual is float64" in (capability.supports_backward(wide, H200) or "")
