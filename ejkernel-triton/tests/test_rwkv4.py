"""`rwkv4` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_phases import check_phases

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.rwkv4 import reference
from ejkernel.operations.rwkv4.cases import CASES, arrays
from ejkernel.operations.rwkv4.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import deviation
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton._versions import version_problem
from ejkernel_triton.rwkv4 import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.rwkv4 import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
NAMED = {case.name: case for case in CASES}
SMALL = [case.name for case in CASES if not case.tags & {"bench", "bench-cpu", "nan"}]


def bound_of(maker, options=None, dtype="float32"):
    made = {name: jnp.asarray(value, dtype) for name, value in maker(np.random.default_rng(0)).items()}
    bound = OPERATION.canonicalise(**made, **(options or {}))
    return bound.call, bound.inputs


def check(call, inputs, choice, limits=(2e-6, 1e-5)):
    check_phases(OPERATION, kernel, call, inputs, (choice, choice), limits)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("choice", [config.Config(0, 4, 4, 1), config.Config(8, 2, 8, 1)], ids=["whole", "segments"])
def test_every_case(interpreted, name, choice):
    call, inputs = bound_of(NAMED[name].arrays, NAMED[name].options)
    check(call, inputs, choice, (2e-3, 2e-3) if "extreme" in NAMED[name].tags else (2e-6, 1e-5))


@pytest.mark.parametrize("length", [7, 8, 9, 16])
def test_lengths_around_chunks_and_segments(interpreted, length):
    check(*bound_of(arrays(2, length, 6, state=True), {"return_state": True}), config.Config(8, 4, 4, 1))


@pytest.mark.parametrize(("dtype", "limits"), [("bfloat16", (8e-3, 1.6e-2)), ("float16", (1e-3, 2.5e-3))])
def test_narrow_dtypes(interpreted, dtype, limits):
    check(*bound_of(arrays(1, 40, 8, state=True), {}, dtype), config.Config(16, 8, 8, 1), limits)


def test_members_with_decays_of_their_own(interpreted):
    """As a batch axis that `jax.vmap` folded."""
    call, inputs = bound_of(arrays(2, 10, 4, state=True))
    doubled = {name: jnp.concatenate([getattr(inputs, name), getattr(inputs, name) + 1]) for name in ("w", "u")}
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(call, inputs._replace(**doubled), config.Config(4, 2, 4, 1))


@pytest.mark.parametrize("far", [0, 5, 12])
def test_the_exponent_is_differentiated_through_the_token_it_is_of(interpreted, far):
    """The largest key is in the first, the second or the last segment."""
    call, inputs = bound_of(arrays(1, 13, 4, state=True), {"return_state": True})
    check(call, inputs._replace(k=inputs.k.at[0, far].set(9.0)), config.Config(4, 2, 4, 1))


def test_what_comes_later_is_not_seen(interpreted):
    """Values that are NaN from a token on leave the outputs before it as they are."""
    call, inputs = bound_of(NAMED["garbage-after"].arrays)
    out = kernel.forward(call, inputs, config.Config(8, 2, 8, 1)).out
    assert deviation(out[:, :7], reference.forward(call, widened(inputs)).out[:, :7]).norm < 2e-6


def test_configs_say_what_is_wrong():
    with pytest.raises(ValueError, match="block_i: got 3"):
        config.Config(0, 4, 3, 1)
    with pytest.raises(ValueError, match="segment_size: got 12, expected 0 or a multiple of chunk_size, 8"):
        config.Config(12, 8, 4, 1)


def test_segments_fill_the_device():
    call, _ = bound_of(arrays(1, 8, 4))
    tokens = (ArraySpec((batch, 4096, 2048), "float32") for batch in (1, 64))
    few, many = (dataclasses.replace(call, k=spec, v=spec) for spec in tokens)
    assert config.heuristic(few, H200).segment_size == 128
    assert config.heuristic(many, H200).segment_size == 0


def test_compiles_within_the_limits(triton_cache):
    launched = [launch for _, launch in recorded("rwkv4", NAMED["bench-b2-t512-c512"], "bfloat16", target_of(90))]
    names = [launch.kernel.fn.__name__ for launch in launched]
    assert names == ["segment_kernel", "scan_kernel", "segment_kernel", "head_kernel", "gradient_kernel"]
    assert max(testing.stack_bytes(launch.compile(90)) for launch in launched) <= testing.tolerated_stack()


@needs_jax_triton
@pytest.mark.parametrize("length", [64, 1])
def test_lowers_for_cuda(length):
    def loss(values):
        return OPERATION.invoke(values, {}, platform="triton").astype(jnp.float32).sum()

    shapes = {"w": (32,), "u": (32,), "k": (1, length, 32), "v": (1, length, 32)}
    values = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(values).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.rwkv4.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") >= 2


def test_supports():
    call, _ = bound_of(arrays(1, 8, 4))
    if version_problem() is None:
        assert capability.supports_backward(call, H200) is None
    assert "the target is cpu" in str(capability.supports_forward(call, Target("cpu")))
    double = dataclasses.replace(call, v=ArraySpec(call.v.shape, "float64"))
    assert "v is float64" in str(capability.supports_forward(double, H200))
    longest = dataclasses.replace(call, k=ArraySpec((2, 2**30, 1), "bfloat16"))
    assert "tokens are more than" in str(capability.supports_forward(longest, H200))
