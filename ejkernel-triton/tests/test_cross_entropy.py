"""`cross_entropy` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.cross_entropy import reference
from ejkernel.operations.cross_entropy.cases import CASES
from ejkernel.operations.cross_entropy.interface import (
    OPERATION,
    CrossEntropyCall,
    CrossEntropyInputs,
    CrossEntropyOutputs,
)
from ejkernel.plugin import Target
from ejkernel_triton._versions import version_problem
from ejkernel_triton.cross_entropy import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.cross_entropy import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
LOGITS = {case.name: case for case in CASES if case.name.startswith("logits")}


def check(case, choice, dtype="float32", limit=1e-6):
    arrays = {name: jnp.asarray(value) for name, value in case.arrays(np.random.default_rng(0)).items()}
    bound = OPERATION.canonicalise(**{**arrays, "x": arrays["x"].astype(dtype)}, **case.options)
    call, inputs = bound.call, bound.inputs
    got = kernel.forward(call, inputs, choice)
    wide = CrossEntropyInputs(np.asarray(inputs.x, np.float64), np.asarray(inputs.targets))
    exact = reference.forward(call, wide)
    names = OPERATION.public(call)
    for name in names:
        wanted = getattr(exact, name)
        np.testing.assert_allclose(
            getattr(got, name), wanted, rtol=1e-6, atol=1e-6 * max(1, np.abs(wanted).max()), err_msg=name
        )
    rng = np.random.default_rng(1)
    given = CrossEntropyOutputs(**{name: rng.standard_normal(inputs.targets.shape) for name in names})
    d_x = kernel.backward(call, inputs, got, jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), given), choice).x
    assert d_x.dtype == inputs.x.dtype
    np.testing.assert_allclose(np.asarray(d_x, np.float64), reference.backward(call, wide, exact, given).x, atol=limit)


@pytest.mark.parametrize("name", [name for name in LOGITS if name != "logits-extreme"])
@needs_jax_triton
def test_numbers_in_the_interpreter(interpreted, name):
    for block in (4, 16, 64):
        check(LOGITS[name], config.Config(block, 1))


@needs_jax_triton
def test_half_precision(interpreted):
    check(LOGITS["logits"], config.Config(16, 1), "bfloat16", 8e-3)


@needs_jax_triton
def test_rows_of_minus_infinity_and_ignored_rows_of_nan(interpreted):
    x = jnp.array([[-jnp.inf, 1.0, 2.0], [jnp.nan, jnp.nan, jnp.nan], [-jnp.inf, -jnp.inf, 0.0]])
    bound = OPERATION.canonicalise(x, jnp.array([1, -1, 2]))
    got = kernel.forward(bound.call, bound.inputs, config.Config(2, 1))
    np.testing.assert_allclose(got.loss[0], [np.log(1 + np.e), 0, 0], atol=1e-6)
    d_x = kernel.backward(bound.call, bound.inputs, got, CrossEntropyOutputs(jnp.ones((1, 3)), None), config.Config(2, 1)).x
    np.testing.assert_allclose(d_x[0], [[0, -0.7310586, 0.7310586], [0, 0, 0], [0, 0, 0]], atol=1e-6)


def _call(shape, dtype="bfloat16", **rest):
    return CrossEntropyCall(x=ArraySpec(shape, dtype), targets=ArraySpec(shape[:-1], "int32"), **rest)


@pytest.mark.parametrize("shape", [(1, 8192, 128256), (1, 3, 7)])
def test_search_spaces_are_small_and_hold_the_heuristic(shape):
    for space in (config.FORWARD, config.BACKWARD):
        found = space.search_space(_call(shape), H200)
        assert space.heuristic(_call(shape), H200) in found
        assert len(found) == len(set(found)) <= 16


@pytest.mark.parametrize("number", [80, 90, 100])
def test_compiles_without_spills(recorder, number):
    call, target = _call((1, 4096, 128256), logit_softcap=30.0), Target("gpu", "", f"{number // 10}.0")
    inputs = CrossEntropyInputs(*(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in (call.x, call.targets)))

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    compiled = [compilation.compile(number) for compilation in recorder.compilations]
    assert max(testing.stack_bytes(program) for program in compiled) <= testing.tolerated_stack()
    for program in compiled:
        assert "ld.global.v4.b32" in program.asm["ptx"], "rows are not read by 16 bytes"


@needs_jax_triton
def test_lowers_for_cuda():
    def loss(logits, targets):
        return ejkernel.fused_cross_entropy(logits, targets, platform="triton").loss

    arrays = jax.ShapeDtypeStruct((8, 128), "bfloat16"), jax.ShapeDtypeStruct((8,), "int32")
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.cross_entropy.backward[triton]" in text


@needs_jax_triton
def test_supports():
    assert capability.supports_forward(_call((1, 64, 32)), H200) is None
    assert "the target is cpu" in str(capability.supports_forward(_call((1, 64, 32)), Target("cpu")))
    assert "x is float64" in str(capability.supports_forward(_call((1, 64, 32), "float64"), H200))
    headed = _call((1, 64, 32), head=ArraySpec((1, 32, 100), "bfloat16"))
    assert capability.supports_forward(headed, H200) is None
    assert "head is float64" in str(
        capability.supports_forward(dataclasses.replace(headed, head=ArraySpec((1, 32, 100), "float64")), H200)
    )
    vast = dataclasses.replace(headed, head=ArraySpec((1, 32, 2**31), "bfloat16"))
    assert "2147483648 entries" in str(capability.supports_forward(vast, H200))
