"""`sample_tokens` in Triton on a machine without a GPU: tokens in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.sample_tokens import reference
from ejkernel.operations.sample_tokens.cases import CASES
from ejkernel.operations.sample_tokens.interface import OPERATION, SampleTokensCall, SampleTokensInputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.sample_tokens import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.sample_tokens import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not case.is_benchmark}


def check(arrays, options, choice, dtype="float32"):
    arrays = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    bound = OPERATION.canonicalise(**arrays, **options)
    got = kernel.forward(bound.call, bound.inputs, choice)
    exact = reference.forward(bound.call, widened(bound.inputs))
    np.testing.assert_array_equal(got.tokens, exact.tokens)
    if exact.logprobs is not None:
        np.testing.assert_allclose(got.logprobs, exact.logprobs, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("name", SMALL)
@needs_jax_triton
def test_tokens_in_the_interpreter(interpreted, name):
    choice = config.Config(1024 if name == "wide" else 16, 1)
    check(SMALL[name].arrays(np.random.default_rng(0)), SMALL[name].options, choice)


@pytest.mark.parametrize(("kept", "slots"), [(128, 256), (4, 8), (1, 2)])
@pytest.mark.parametrize("name", SMALL)
@needs_jax_triton
def test_rows_of_parts_in_the_interpreter(interpreted, monkeypatch, name, kept, slots):
    """All that may be drawn is among what parts have kept, or some of it, or there are more equals than slots."""
    monkeypatch.setattr(kernel, "_KEPT", kept)
    monkeypatch.setattr(kernel, "_SLOTS", slots)
    choice = config.Config(1024, 1, 4096) if name == "wide" else config.Config(16, 1, 16)
    check(SMALL[name].arrays(np.random.default_rng(0)), SMALL[name].options, choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["top-k-top-p", "every-setting-per-row", "static-top-k-of-equals"])
@needs_jax_triton
def test_half_precision(interpreted, name, dtype):
    """Thresholds have 16 and 19 bits."""
    check(SMALL[name].arrays(np.random.default_rng(1)), SMALL[name].options, config.Config(32, 1), dtype)


@needs_jax_triton
@pytest.mark.parametrize(("block", "vocabulary"), [(1, 9), (8, 57), (64, 57), (128, 57)])
def test_every_size_of_blocks_draws_the_same(interpreted, block, vocabulary):
    """Blocks of one entry take few of them: the interpreter walks every block a score of times."""
    arrays = SMALL["every-setting-per-row"].arrays(np.random.default_rng(2))
    arrays = {name: value[:, :vocabulary] if value.shape[1:] == (57,) else value for name, value in arrays.items()}
    check(arrays, {"return_logprobs": True}, config.Config(block, 1))


def test_exponentials_of_the_smallest_and_largest_bits(interpreted):
    """Both ends, where 1 - u is rounded."""
    import triton
    import triton.language as tl

    @triton.jit
    def run(p_bits, p_out, LARGEST: tl.constexpr):
        o = tl.arange(0, 8)
        tl.store(p_out + o, kernel._log_of_exponential(tl.load(p_bits + o), LARGEST))

    bits = np.array([0, 1, 7, 255, 2**24, 2**31, 2**32 - 256, 2**32 - 1], np.uint32)
    (got,) = testing.interpreted_call(
        run, (jnp.asarray(bits),), (((8,), jnp.float32),), grid=1, num_warps=1, LARGEST=kernel.LARGEST
    )
    exact = np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, kernel.LARGEST)))
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)


def _call(shape=(1, 64, 128256), dtype="bfloat16", **rest):
    row = ArraySpec((1, shape[1]), "float32")
    return SampleTokensCall(
        logits=ArraySpec(shape, dtype), streams=ArraySpec((1, shape[1], 2), "uint32"), temperature=row, **rest
    )


def _filtered(dtype="bfloat16"):
    row = ArraySpec((1, 64), "float32")
    mask = ArraySpec((1, 64, 128256), "bool")
    counts = ArraySpec((1, 64), "int32")
    return _call(dtype=dtype, top_k=counts, top_p=row, min_p=row, token_mask=mask, return_logprobs=True)


def test_search_space_is_small_and_holds_the_heuristic():
    for call in (_call(), _call((1, 1, 5)), _call((1, 1024, 32000), "float32")):
        found = config.FORWARD.search_space(call, H200)
        assert config.forward_heuristic(call, H200) in found
        assert len(found) == len(set(found)) <= 12


@pytest.mark.parametrize("number", [80, 90, 100])
@pytest.mark.parametrize("call", [_call(), _filtered(), _filtered("float32")], ids=["plain", "filtered", "float32"])
def test_compiles_without_spills_in_loops(recorder, call, number):
    specs = {name: getattr(call, name) for name in SampleTokensInputs._fields}
    inputs = SampleTokensInputs(**{n: None if s is None else jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in specs.items()})
    target = Target("gpu", "", f"{number // 10}.0")
    jax.eval_shape(lambda inputs: kernel.forward(call, inputs, config.forward_heuristic(call, target)), inputs)
    programs = [compilation.compile(number) for compilation in recorder.compilations]
    assert len(programs) == (1 if call.top_k is None else 2)
    for program in programs:
        assert testing.resources(program).spilling == 0
        assert "ld.global.v4.b32" in program.asm["ptx"], "rows are not read by 16 bytes"


@needs_jax_triton
def test_lowers_for_cuda():
    def run(logits, key, top_p):
        return ejkernel.sample_tokens(logits, key, top_k=50, top_p=top_p, return_logprobs=True, platform="triton")

    arrays = [jax.ShapeDtypeStruct(*one) for one in (((4, 1000), "bfloat16"), ((2,), "uint32"), ((4,), "float32"))]
    with ejkernel.use(target=H200):
        text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.sample_tokens[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 1


@needs_jax_triton
def test_supports():
    assert capability.supports_forward(_call(), H200) is None
    assert "the target is cpu" in str(capability.supports_forward(_call(), Target("cpu")))
    assert "logits is float64" in str(capability.supports_forward(_call(dtype="float64"), H200))
    assert "33554432 tokens are more than 16777216" in str(capability.supports_forward(_call((1, 1, 2**25)), H200))
