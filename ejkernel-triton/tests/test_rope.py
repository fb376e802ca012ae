"""`rope` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.rope import reference
from ejkernel.operations.rope.cases import CASES
from ejkernel.operations.rope.interface import OPERATION, RopeCall, RopeInputs, RopeOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.rope import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.rope import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)}


def problem(case, dtype="float32"):
    rng = np.random.default_rng(2)
    arrays = {name: jnp.asarray(value) for name, value in case.arrays(rng).items()}
    arrays |= {name: arrays[name].astype(dtype) for name in ("query", "key") if name in arrays}
    bound = OPERATION.canonicalise(**arrays, **case.options)
    specs = (bound.call.query, bound.call.key)
    grads = RopeOutputs(*(None if s is None else jnp.asarray(rng.standard_normal(s.shape), dtype) for s in specs))
    return bound.call, bound.inputs, grads


def check(call, inputs, cotangents, choice, limit=3e-6):
    outputs = kernel.forward(call, inputs, choice)
    exact = reference.forward(call, widened(inputs))
    got = kernel.backward(call, inputs, outputs, cotangents, choice)
    wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    for value, exact_value, like in zip((*outputs, *got), (*exact, *wanted), (*inputs[:2], *inputs), strict=True):
        assert (value is None) == (exact_value is None)
        if value is not None:
            np.testing.assert_allclose(np.asarray(value, np.float64), exact_value, atol=limit * 4, rtol=limit)
            assert value.dtype == like.dtype


@pytest.mark.parametrize("name", SMALL)
def test_numbers_in_the_interpreter(interpreted, name):
    check(*problem(SMALL[name]), config.Config(tokens=4, heads=2, num_warps=1))


@pytest.mark.parametrize("name", ["gqa", "interleaved-per-channel", "heads-first"])
def test_every_config_gives_the_same_numbers(interpreted, name):
    call, inputs, cotangents = problem(SMALL[name])
    for tokens, heads, span in ((1, 2, 0), (2, 8, 0), (16, 1, 1), (4, 2, 2), (64, 8, 8)):
        check(call, inputs, cotangents, config.Config(tokens, heads, 1, span))


@pytest.mark.parametrize("programs", [1, 2, 6])
def test_programs_that_share_the_batch(interpreted, monkeypatch, programs):
    """One program for all five members, two, and one for each: the sums of cos and sin are the same."""
    monkeypatch.setattr(kernel, "_PROGRAMS", programs)
    arrays = {name: np.random.default_rng(7).standard_normal((5, 3, count, 8)) for name, count in (("query", 3), ("key", 1))}
    angles = np.random.default_rng(8).uniform(-1, 1, (2, 3, 4))
    case = dataclasses.replace(SMALL["query-alone"], arrays=lambda rng: {
        **{name: array.astype(np.float32) for name, array in arrays.items()},
        **{name: array.astype(np.float32) for name, array in zip(("cos", "sin"), angles, strict=True)},
    })  # fmt: skip
    check(*problem(case), config.Config(tokens=4, heads=2, num_warps=1))


@pytest.mark.parametrize("shared", ["cos", "sin"])
def test_only_one_of_cos_and_sin_is_shared_over_the_batch(interpreted, shared):
    """What vmap over the other one folds to."""
    call, inputs, cotangents = problem(SMALL["gqa"])
    inputs = inputs._replace(**{shared: getattr(inputs, shared)[:1]})
    call = dataclasses.replace(call, **{shared: ArraySpec.of(getattr(inputs, shared))})
    check(call, inputs, cotangents, config.Config(tokens=8, heads=2, num_warps=1))


def test_half_precision_beside_float32_angles(interpreted):
    check(*problem(SMALL["partial"], "bfloat16"), config.Config(tokens=4, heads=2, num_warps=1), 8e-3)


def test_the_search_space_holds_the_heuristic():
    for name in ("gqa", "heads-first", "query-alone"):
        call, _, _ = problem(SMALL[name])
        wide_call = dataclasses.replace(call, query=ArraySpec((4, 8192, 32, 128), "bfloat16"), rotary_dim=128)
        space = config.search_space(wide_call, H200)
        assert config.heuristic(wide_call, H200) in space and len(space) == len(set(space)) <= 60


LLAMA = {"rotary_dim": 128, "angles": 64}


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA,
        {**LLAMA, "interleaved": True},
        {**LLAMA, "heads_first": True},
        {"rotary_dim": 128, "angles": 128, "interleaved": True},
        {"rotary_dim": 64, "angles": 32},
    ],
    ids=["llama", "interleaved", "heads-first", "per-channel", "partial"],
)
@pytest.mark.parametrize("capability_number", [80, 90, 100])
def test_compiles_without_spills(recorder, flags, capability_number):
    flags = dict(flags)
    angles = ArraySpec((1, 512, flags.pop("angles")), "float32")

    def heads(count):
        return ArraySpec((2, count, 512, 128) if flags.get("heads_first") else (2, 512, count, 128), "bfloat16")

    call = RopeCall(query=heads(32), key=heads(8), cos=angles, sin=angles, **flags)
    inputs = RopeInputs(*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (call.query, call.key, angles, angles)))
    choice = config.heuristic(call, Target("gpu", "", f"{capability_number // 10}.0"))
    jax.eval_shape(lambda inputs: kernel.backward(call, inputs, None, RopeOutputs(*inputs[:2]), choice), inputs)
    assert [c.kernel.fn.__name__ for c in recorder.compilations] == ["rope_kernel", "rope_angle_gradients_kernel"]
    for compilation in recorder.compilations:
        compiled = compilation.compile(capability_number)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack()
        if compilation is recorder.compilations[0]:  # at least eight pairs a thread: 16 bytes of each half
            assert "ld.global.v4.b32" in compiled.asm["ptx"]


def loss(query, key, cos, sin):
    outputs = ejkernel.llama_rope(query, key, cos, sin, platform="triton")
    return sum(out.astype(jnp.float32).sum() for out in outputs)


@needs_jax_triton
@pytest.mark.parametrize(("asked", "launches"), [((0, 1), 1), ((0, 1, 2, 3), 2)], ids=["query-key", "angles-too"])
def test_lowers_for_cuda(asked, launches):
    """The kernel of the angles' gradients is lowered, but stands alone, so that it falls away where it is not used."""
    query, key = (jax.ShapeDtypeStruct((2, 64, count, 32), "bfloat16") for count in (4, 2))
    angles = jax.ShapeDtypeStruct((64, 16), "float32")
    with ejkernel.use(target=H200):
        lowered = jax.jit(jax.grad(loss, asked)).trace(query, key, angles, angles).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") >= launches
    assert "ejkernel.rope.backward[triton]" in text
    assert "has_side_effect = true" not in text


@needs_jax_triton
def test_supports():
    call, _, _ = problem(SMALL["gqa"])

    def ask(target=H200, **changes):
        return capability.supports_forward(dataclasses.replace(call, **changes), target)

    assert ask() is None
    assert ask(Target("gpu", "", "8.0"), heads_first=True, interleaved=True) is None
    assert "the target is cpu" in str(ask(Target("cpu")))
    assert "cos is float64" in str(ask(cos=ArraySpec((2, 33, 8), "float64")))
    assert "8192 is above 4096" in str(ask(query=ArraySpec((2, 33, 4, 8192), "float32")))
    assert "no heads" in str(ask(query=ArraySpec((2, 33, 0, 16), "float32")))
    first = ArraySpec((2_000_000, 1024, 1, 16), "float32")
    assert "2000000 tokens of 2048 heads" in str(ask(query=first, key=first, heads_first=True))
    assert "4000000000 tokens" in str(ask(query=ArraySpec((2, 2_000_000_000, 4, 16), "float32")))
