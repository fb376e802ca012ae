"""`mean_pooling` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.mean_pooling import reference
from ejkernel.operations.mean_pooling.cases import CASES
from ejkernel.operations.mean_pooling.interface import (
    OPERATION,
    MeanPoolingCall,
    MeanPoolingInputs,
    MeanPoolingOutputs,
)
from ejkernel.plugin import Target
from ejkernel_triton._versions import version_problem
from ejkernel_triton.mean_pooling import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.mean_pooling import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)}


def problem(x, cu_seqlens=None, dtype="float32"):
    x = jnp.asarray(x, dtype)
    bound = OPERATION.canonicalise(x, None if cu_seqlens is None else jnp.asarray(cu_seqlens))
    shape = OPERATION.output_specs(bound.call).out.shape
    return bound.call, bound.inputs, jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def check(call, inputs, grad, choice, limit=1e-6):
    got = kernel.forward(call, inputs, choice)
    bounds = inputs.cu_seqlens
    wide = MeanPoolingInputs(np.asarray(inputs.x, np.float64), None if bounds is None else np.asarray(bounds))
    exact = reference.forward(call, wide)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), exact.out, atol=limit)
    gradients = kernel.backward(call, inputs, got, MeanPoolingOutputs(grad), choice)
    wanted = reference.backward(call, wide, exact, MeanPoolingOutputs(np.asarray(grad, np.float64)))
    np.testing.assert_allclose(np.asarray(gradients.x, np.float64), wanted.x, atol=limit)
    assert got.out.dtype == gradients.x.dtype == inputs.x.dtype
    assert gradients.cu_seqlens is None


@pytest.mark.parametrize("name", SMALL)
def test_numbers_in_the_interpreter(interpreted, name):
    choice = config.Config(100, 8, 64, 1) if name == "packed-long" else config.Config(5, 2, 16, 1)
    check(*problem(**SMALL[name].arrays(np.random.default_rng(0))), choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(interpreted, dtype):
    arrays = SMALL["packed"].arrays(np.random.default_rng(0))
    check(*problem(**arrays, dtype=dtype), config.Config(8, 4, 32, 1), 8e-3)


@pytest.mark.parametrize("name", ["heads", "packed-empty-sequences"])
def test_every_config_gives_the_same_numbers(interpreted, name):
    values = problem(**SMALL[name].arrays(np.random.default_rng(0)))
    for chunk, tokens, block in ((1, 1, 8), (3, 1, 64), (4, 8, 16), (7, 2, 32), (64, 16, 16)):
        check(*values, config.Config(chunk, tokens, block, 1))


def test_each_member_of_the_batch_may_have_its_own_sequences(interpreted):
    """What vmap over `cu_seqlens` folds to; tokens before the first sequence and after the last one hold NaN."""
    x = np.random.default_rng(0).standard_normal((3, 12, 2, 8)).astype(np.float32)
    bounds = np.array([[0, 5, 12], [0, 0, 7], [2, 3, 3]], np.int32)
    x[1, 7:], x[2, :2], x[2, 3:] = np.nan, np.nan, np.nan
    call = MeanPoolingCall(x=ArraySpec.of(x), cu_seqlens=ArraySpec.of(bounds))
    grad = jnp.asarray(np.random.default_rng(1).standard_normal((3, 2, 2, 8)), jnp.float32)
    for chunk in (2, 5):
        check(call, MeanPoolingInputs(jnp.asarray(x), jnp.asarray(bounds)), grad, config.Config(chunk, 2, 8, 1))


def test_table_of_chunks():
    chunks = kernel.chunks_of(jnp.array([[0, 0, 5, 5, 12, 12]]), 16, 4)
    np.testing.assert_array_equal(chunks.first, [[0, 0, 2, 2, 4, 4]])
    np.testing.assert_array_equal(chunks.sequence, [[1, 1, 3, 3, 5, 5, 5, 5, 5]])
    assert chunks.counts == (9, 5)


def test_bounds_that_no_call_may_have_stay_inside_of_the_array(interpreted):
    """They cannot be refused under jit; what is computed for them means nothing, but nothing outside is read or written."""
    chunks = kernel.chunks_of(jnp.array([[0, 9, 4, 100]]), 12, 4)
    np.testing.assert_array_equal(chunks.bounds, [[0, 9, 9, 12]])
    assert int(chunks.first[0, -1]) <= chunks.counts[0]


@pytest.mark.parametrize(("shape", "sequences"), [((8, 8192, 32, 128), 0), ((1, 65536, 32, 128), 4), ((2, 5, 1, 3), 0)])
def test_search_spaces_are_small_and_hold_the_heuristic(shape, sequences):
    bounds = ArraySpec((1, sequences + 1), "int32") if sequences else None
    call = MeanPoolingCall(x=ArraySpec(shape, "bfloat16"), cu_seqlens=bounds)
    for space in (config.FORWARD, config.BACKWARD):
        found = space.search_space(call, H200)
        assert space.heuristic(call, H200) in found
        assert len(found) == len(set(found)) <= 60


COMPILED = [((8, 8192, 32, 128), 0), ((1, 65536, 32, 128), 4), ((2, 100, 3, 17), 0)]


@pytest.mark.parametrize(
    ("shape", "sequences", "capability_number"),
    [
        pytest.param(*problem, number, marks=pytest.mark.slow if number != 90 and problem is not COMPILED[0] else ())
        for problem in COMPILED
        for number in (80, 90, 100)
    ],
)
def test_compiles_without_spills(recorder, shape, sequences, capability_number):
    bounds = ArraySpec((1, sequences + 1), "int32") if sequences else None
    call = MeanPoolingCall(x=ArraySpec(shape, "bfloat16"), cu_seqlens=bounds)
    inputs = MeanPoolingInputs(*(s and jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (call.x, call.cu_seqlens)))
    target = Target("gpu", "", f"{capability_number // 10}.0")

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    names = [compilation.kernel.fn.__name__ for compilation in recorder.compilations]
    assert names == ["pooling_partial_sums_kernel", "pooling_means_kernel", "pooling_backward_kernel"]
    compiled = [compilation.compile(capability_number) for compilation in recorder.compilations]
    assert max(testing.stack_bytes(program) for program in compiled) <= testing.tolerated_stack()
    if shape[-1] == 128:
        ptx = [program.asm["ptx"] for program in compiled]
        assert "ld.global.v2.b32" in ptx[0], "each of many threads loads its four elements at once"
        assert "st.global.v4.b32" in ptx[2], "stores are not 16 bytes wide"


@needs_jax_triton
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_for_cuda(packed):
    def loss(x, *cu_seqlens):
        return ejkernel.mean_pooling(x, *cu_seqlens, platform="triton").astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, 64, 4, 32), "bfloat16")]
    arrays += [jax.ShapeDtypeStruct((5,), "int32")] if packed else []
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.mean_pooling.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 3


@needs_jax_triton
def test_supports():
    call = MeanPoolingCall(x=ArraySpec((2, 64, 4, 32), "float32"))

    def ask(target=H200, **changes):
        return capability.supports_forward(dataclasses.replace(call, **changes), target)

    assert ask() is None
    assert "the target is cpu" in str(ask(Target("cpu")))
    assert "x is float64" in str(ask(x=ArraySpec((2, 64, 4, 32), "float64")))
    assert "4000000000 tokens" in str(ask(x=ArraySpec((2, 2_000_000_000, 1, 1), "float32")))
