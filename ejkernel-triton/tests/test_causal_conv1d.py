"""`causal_conv1d` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.arrays import named
from ejkernel.operations.causal_conv1d import reference
from ejkernel.operations.causal_conv1d.cases import CASES
from ejkernel.operations.causal_conv1d.interface import (
    OPERATION,
    CausalConv1dCall,
    CausalConv1dInputs,
    CausalConv1dOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.causal_conv1d import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.causal_conv1d import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not case.is_benchmark}


def check(arrays, options, choice, dtype="float32", limit=2e-6):
    arrays = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    bound = OPERATION.canonicalise(**arrays, **options)
    call, inputs = bound.call, bound.inputs
    got = kernel.forward(call, inputs, choice)
    exact = reference.forward(call, widened(inputs))
    for (name, value), wanted in zip(named(got), [value for value in exact if value is not None], strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float64), wanted, atol=limit, rtol=limit, err_msg=name)
    if capability.supports_backward(dataclasses.replace(call), Target("gpu", "NVIDIA H200", "9.0")):
        return
    grad = jnp.asarray(np.random.default_rng(1).standard_normal(inputs.x.shape), dtype)
    gradients = kernel.backward(call, inputs, got, CausalConv1dOutputs(grad), choice)
    expected = reference.backward(call, widened(inputs), exact, CausalConv1dOutputs(np.asarray(grad, np.float64)))
    for name, value in named(gradients):
        scale = limit * max(1, np.abs(getattr(expected, name)).max(initial=0))
        np.testing.assert_allclose(np.asarray(value, np.float64), getattr(expected, name), atol=scale, err_msg=name)
        assert value.dtype == getattr(inputs, name).dtype


def without_state(case):
    arrays = {name: value for name, value in case.arrays(np.random.default_rng(0)).items() if name != "initial_state"}
    return arrays, {**case.options, "return_state": False}


@pytest.mark.parametrize("name", SMALL)
@needs_jax_triton
def test_numbers_in_the_interpreter(interpreted, name):
    case = SMALL[name]
    if case.arrays(np.random.default_rng(0))["weight"].shape[1] > capability.MAX_WIDTH:
        pytest.skip("refused")
    choice = config.Config(64, 64, 1, 128) if name == "long" else config.Config(4, 4, 1, 8)
    check(case.arrays(np.random.default_rng(0)), case.options, choice)
    check(*without_state(case), choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@needs_jax_triton
def test_half_precision(interpreted, dtype):
    check(*without_state(SMALL["packed"]), config.Config(8, 8, 1), dtype, 3e-2)


@pytest.mark.parametrize("name", ["silu", "packed", "segments-padded"])
@needs_jax_triton
def test_every_config_gives_the_same_numbers(interpreted, name):
    for tokens, block in ((1, 8), (2, 2), (8, 4), (32, 16)):
        check(*without_state(SMALL[name]), config.Config(tokens, block, 1, 2 * tokens))


@needs_jax_triton
def test_each_member_of_the_batch_may_have_its_own_filters_and_sequences(interpreted):
    """What vmap folds to."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 9, 5)), rng.standard_normal((3, 5, 3))
    bias, bounds = rng.standard_normal((1, 5)), np.array([[0, 5, 9], [0, 0, 7], [0, 3, 3]], np.int32)
    x[1, 7:], x[2, 3:] = np.nan, np.nan
    inputs = CausalConv1dInputs(
        *(jnp.asarray(value, jnp.float32) for value in (x, weight, bias)), cu_seqlens=jnp.asarray(bounds)
    )
    call = CausalConv1dCall(**{name: ArraySpec.of(value) for name, value in named(inputs)}, activation="silu")
    got, exact = kernel.forward(call, inputs, config.Config(4, 4, 1)), reference.forward(call, widened(inputs))
    np.testing.assert_allclose(got.out, exact.out, atol=2e-6)
    grad = rng.standard_normal(x.shape)
    gradients = kernel.backward(call, inputs, got, CausalConv1dOutputs(jnp.asarray(grad, jnp.float32)), config.Config(2, 8, 1))
    expected = reference.backward(call, widened(inputs), exact, CausalConv1dOutputs(grad))
    for name, value in named(gradients):
        np.testing.assert_allclose(value, getattr(expected, name), atol=1e-5, err_msg=name)


def _call(shape, width=4, dtype="bfloat16", **rest):
    weight = ArraySpec((1, shape[2], width), dtype)
    return CausalConv1dCall(x=ArraySpec(shape, dtype), weight=weight, activation="silu", **rest)


@pytest.mark.parametrize("shape", [(2, 4096, 4096), (64, 1, 8192), (1, 5, 3)])
def test_search_spaces_are_small_and_hold_the_heuristic(shape):
    for space in (config.FORWARD, config.BACKWARD):
        found = space.search_space(_call(shape), H200)
        assert space.heuristic(_call(shape), H200) in found
        assert len(found) == len(set(found)) <= 40


@pytest.mark.parametrize("number", [80, 90, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_spills(recorder, packed, number):
    call = _call((1, 4096, 4096), cu_seqlens=ArraySpec((1, 5), "int32") if packed else None)
    inputs = CausalConv1dInputs(**{name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in _specs(call)})
    target = Target("gpu", "", f"{number // 10}.0")

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    names = [compilation.kernel.fn.__name__ for compilation in recorder.compilations]
    assert names == [f"causal_conv1d_{part}_kernel" for part in ("forward", "filters", "backward")]
    compiled = [compilation.compile(number) for compilation in recorder.compilations]
    assert max(testing.stack_bytes(program) for program in compiled) <= testing.tolerated_stack()
    for program in compiled:
        assert "ld.global.v4.b32" in program.asm["ptx"], "rows are not read by 16 bytes"


def _specs(call):
    return [(name, spec) for name, spec in vars(call).items() if isinstance(spec, ArraySpec)]


@needs_jax_triton
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_for_cuda(packed):
    def loss(x, weight, *cu_seqlens):
        bounds = cu_seqlens[0] if packed else None
        return ejkernel.causal_conv1d(x, weight, cu_seqlens=bounds, platform="triton").astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, 64, 32), "bfloat16"), jax.ShapeDtypeStruct((32, 4), "bfloat16")]
    arrays += [jax.ShapeDtypeStruct((5,), "int32")] if packed else []
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.causal_conv1d.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 3


@needs_jax_triton
def test_supports():
    call = _call((2, 64, 32))
    state = ArraySpec((2, 1, 3, 32), "bfloat16")
    assert capability.supports_forward(call, H200) is None
    assert "9 taps are more than 8" in str(capability.supports_forward(_call((2, 64, 32), width=9), H200))
    assert "the target is cpu" in str(capability.supports_forward(call, Target("cpu")))
    assert "x is float64" in str(capability.supports_forward(_call((2, 64, 32), dtype="float64"), H200))
    stateful = dataclasses.replace(call, initial_state=state)
    assert capability.supports_forward(stateful, H200) is None
    assert "initial state" in str(capability.supports_backward(stateful, H200))
    assert "returned state" in str(capability.supports_backward(dataclasses.replace(call, return_state=True), H200))
