"""`softmax` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.softmax import reference
from ejkernel.operations.softmax.cases import CASES
from ejkernel.operations.softmax.interface import OPERATION, SoftmaxCall, SoftmaxInputs, SoftmaxOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._ahead_of_time import TOLERATED
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._versions import version_problem
from ejkernel_triton.softmax import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.softmax import kernel
from ejkernel_triton.softmax.mask import PER_ELEMENT, PER_ROW, mask_of

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = [case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)]
SINGLE_PASS, LOOPED = config.Config(rows=4, num_warps=1), config.Config(rows=1, num_warps=1, block=16)
COOPERATIVE = dataclasses.replace(LOOPED, cooperative=True)
PERSISTENT = config.Config(rows=1, num_warps=1, num_stages=2, programs=5)
PERSISTENT_COOPERATIVE = dataclasses.replace(COOPERATIVE, num_stages=2, programs=4)
KINDS = {
    "single_pass": SINGLE_PASS,
    "looped": LOOPED,
    "cooperative": COOPERATIVE,
    "persistent": PERSISTENT,
    "persistent_cooperative": PERSISTENT_COOPERATIVE,
}


def problem(case, dtype="float32"):
    """A canonical call, its inputs, and a cotangent that is NaN at masked places."""
    rng = np.random.default_rng(3)
    arrays = {name: jnp.asarray(value) for name, value in case.arrays(rng).items()}
    arrays["x"] = arrays["x"].astype(dtype)
    bound = OPERATION.canonicalise(**arrays, **case.options)
    grad = jnp.asarray(rng.standard_normal(bound.inputs.x.shape), dtype)
    if bound.inputs.where is not None:
        grad = jnp.where(bound.inputs.where, grad, jnp.nan)
    return bound.call, bound.inputs, SoftmaxOutputs(grad)


def check(call, inputs, cotangents, choices, limit=2e-6):
    outputs = kernel.forward(call, inputs, choices[0])
    exact = reference.forward(call, widened(inputs))
    np.testing.assert_allclose(np.asarray(outputs.out, np.float64), exact.out, atol=limit)
    got = kernel.backward(call, inputs, outputs, cotangents, choices[1])
    wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    np.testing.assert_allclose(np.asarray(got.x, np.float64), wanted.x, atol=limit * 4)
    assert outputs.out.dtype == got.x.dtype == inputs.x.dtype
    assert got.where is None


@pytest.mark.parametrize(
    ("choice", "case"),
    [
        pytest.param(choice, case, id=f"{name}-{case.name}")
        for name, choice in KINDS.items()
        for case in SMALL
        if choice in (SINGLE_PASS, LOOPED)
        or case.name in ("where-poisoned", "where-empty-row", "negative-scale")
        or (choice is COOPERATIVE and case.name == "wide")
    ],
)
def test_numbers_in_the_interpreter(interpreted, choice, case):
    if case.name == "wide" and choice.block:
        choice = dataclasses.replace(choice, block=1024)
    check(*problem(case), (choice, choice))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-3), ("float16", 3e-4)])
@pytest.mark.parametrize("choice", [SINGLE_PASS, LOOPED], ids=["single_pass", "looped"])
def test_half_precision(interpreted, dtype, limit, choice):
    check(*problem(next(case for case in CASES if case.name == "scale"), dtype), (choice, choice), limit)


@pytest.mark.parametrize("name", ["where-poisoned", "two-axes"])
def test_every_config_gives_the_same_numbers(interpreted, name):
    call, inputs, cotangents = problem(next(case for case in CASES if case.name == name))
    forward = {c.rows: c for c in config.forward_space(call, H200)}
    cut = [
        config.Config(1, 1, 8),
        *(config.Config(1, 1, block, 1, cooperative) for block in (32, 64) for cooperative in (False, True)),
    ]
    persistent = [config.Config(1, 1, 0, stages, False, programs) for stages, programs in ((1, 2), (3, 100))]
    for choice in (*forward.values(), *cut, *persistent, config.Config(1, 1, 64, 1, True, 1)):
        check(call, inputs, cotangents, (choice, choice))


@pytest.mark.parametrize(
    ("choice", "kernels"),
    [
        (PERSISTENT, ("forward_persistent", "backward")),
        (PERSISTENT_COOPERATIVE, ("forward_cooperative", "backward_persistent_cooperative")),
    ],
    ids=["persistent", "persistent_cooperative"],
)
def test_programs_stay_for_whole_rows_in_forward_and_for_parts_in_backward(recorder, choice, kernels):
    x = jnp.zeros((6, 40))
    call, inputs = SoftmaxCall(x=ArraySpec.of(x)), SoftmaxInputs(x)
    outputs = kernel.forward(call, inputs, choice)
    kernel.backward(call, inputs, outputs, outputs, choice)
    assert [c.kernel.fn.__name__ for c in recorder.compilations] == [f"softmax_{name}_kernel" for name in kernels]


@pytest.mark.parametrize("choice", [*KINDS.values()][1:], ids=[*KINDS][1:])
def test_a_larger_value_in_a_later_block(interpreted, choice):
    """Sums are rescaled; rows of -inf in all blocks but the last one, and NaN and inf as in the definition."""
    x = np.full((4, 40), -np.inf, np.float32)
    x[0, 39], x[1, 3], x[1, 38] = 2.0, 1.0, 90.0
    x[2], x[3] = np.arange(40), 1.0
    x[3, 20] = np.nan
    out = kernel.forward(SoftmaxCall(x=ArraySpec.of(x)), SoftmaxInputs(jnp.asarray(x)), choice).out
    exact = reference.forward(SoftmaxCall(x=ArraySpec.of(x)), SoftmaxInputs(x[:3].astype(np.float64))).out
    np.testing.assert_allclose(out[:3], exact, atol=1e-6)
    assert np.isnan(out[3]).all()


@pytest.mark.parametrize(
    ("shape", "where", "stored", "middle", "inner", "kind"),
    [
        ((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8), 1, 24, PER_ELEMENT),
        ((2, 3, 4, 8), (1, 1, 1, 8), (1, 1, 1, 8), 24, 1, PER_ELEMENT),
        ((2, 3, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8), 3, 4, PER_ELEMENT),
        ((2, 3, 4, 8), (1, 3, 1, 1), (2, 3, 1, 1), 4, 1, PER_ROW),
        ((2, 3, 4, 8), (2, 1, 1, 8), (2, 1, 1, 8), 12, 1, PER_ELEMENT),
        ((2, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8), 2, 4, PER_ELEMENT),
        ((2, 3, 2, 5, 2, 8), (2, 1, 2, 1, 2, 8), (2, 3, 2, 1, 2, 8), 5, 2, PER_ELEMENT),
    ],
)
def test_masks_are_read_as_they_are_stored(shape, where, stored, middle, inner, kind):
    values = np.random.default_rng(0).random(where) < 0.5
    mask = mask_of(jnp.zeros(shape), jnp.asarray(values))
    assert (mask.where.shape, mask.middle, mask.inner, mask.kind) == (stored, middle, inner, kind)
    row = np.arange(np.prod(shape[:-1]))
    picked = np.asarray(mask.where).reshape(-1, where[-1])[row // (middle * inner) * inner + row % inner]
    np.testing.assert_array_equal(picked, np.broadcast_to(values, (*shape[:-1], where[-1])).reshape(-1, where[-1]))


HELD_KERNELS = ("forward", "backward")
COOPERATIVE_KERNELS = ("forward_cooperative", "backward_cooperative")
COMPILED = [
    ((64, 16384), None, HELD_KERNELS, "float32"),
    ((32768, 4096), None, HELD_KERNELS, "bfloat16"),
    ((131072, 128), (1, 128), HELD_KERNELS, "bfloat16"),
    ((64, 16384), None, HELD_KERNELS, "bfloat16"),
    ((8, 131072), (8, 131072), COOPERATIVE_KERNELS, "bfloat16"),
    ((8, 131072), (8, 131072), COOPERATIVE_KERNELS, "float32"),
    ((2048, 32768), None, ("forward_persistent", "backward"), "bfloat16"),
    ((1024, 131072), None, ("forward_cooperative", "backward_persistent_cooperative"), "bfloat16"),
]
"""The first, which has the most in registers, is always compiled for every generation."""


@pytest.mark.parametrize(
    ("shape", "where", "kernels", "dtype", "capability_number"),
    [
        pytest.param(*problem, number, marks=pytest.mark.slow if number != 90 and problem is not COMPILED[0] else ())
        for problem in COMPILED
        for number in (80, 90, 100)
    ],
)
def test_compiles_without_spills(recorder, shape, where, kernels, dtype, capability_number):
    """Programs of rows as wide as registers can hold may spill a little."""
    mask = None if where is None else ArraySpec(where, "bool")
    call = SoftmaxCall(x=ArraySpec(shape, dtype), where=mask)
    inputs = SoftmaxInputs(*(s and jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (call.x, call.where)))
    target = Target("gpu", "", f"{capability_number // 10}.0")

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    assert [c.kernel.fn.__name__ for c in recorder.compilations] == [f"softmax_{name}_kernel" for name in kernels]
    for compilation in recorder.compilations:
        compiled = compilation.compile(capability_number)
        taken = testing.resources(compiled)
        assert taken.shared <= shared_memory_limit(target)
        if shape[-1] >= 32768:
            assert taken.spilling <= TOLERATED
        else:
            assert taken.stack <= testing.tolerated_stack()
        wide_loads = ("ld.global.v4.b32", "cp.async.cg.shared.global")  # the second moves 16 bytes by definition
        assert any(load in compiled.asm["ptx"] for load in wide_loads), "loads are not 16 bytes wide"


@needs_jax_triton
def test_lowers_for_cuda():
    def loss(x, where):
        return ejkernel.softmax(x, where=where, platform="triton").astype(jnp.float32).sum()

    x, where = jax.ShapeDtypeStruct((6, 8, 256), "bfloat16"), jax.ShapeDtypeStruct((256,), "bool")
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(x, where).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 2
    assert "ejkernel.softmax.backward[triton]" in text


@needs_jax_triton
def test_supports():
    call = SoftmaxCall(x=ArraySpec((4, 64), "float32"), where=ArraySpec((4, 1), "bool"))
    for supports in (capability.supports_forward, capability.supports_backward):
        assert supports(call, H200) is None
        assert supports(dataclasses.replace(call, x=ArraySpec((4, 1_000_000), "float16")), Target("gpu", "", "8.0")) is None
        assert "x is float64" in str(supports(dataclasses.replace(call, x=ArraySpec((4, 64), "float64")), H200))
        assert "rows" in str(supports(dataclasses.replace(call, x=ArraySpec((3_000_000_000, 2), "float32")), H200))
        assert "the target is cpu" in str(supports(call, Target("cpu")))


@pytest.mark.parametrize(
    "choice", [COOPERATIVE, PERSISTENT, PERSISTENT_COOPERATIVE], ids=["cooperative", "persistent", "persistent_cooperative"]
)
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-3), ("float16", 3e-4)])
def test_values_of_half_precision_that_are_held_while_programs_meet(interpreted, choice, dtype, limit):
    """They are converted twice, the second time from their bits, and handed on in pairs."""
    x = jnp.asarray(np.random.default_rng(4).standard_normal((6, 40)) * 3, dtype)
    call = SoftmaxCall(x=ArraySpec.of(x), scale=0.5)
    inputs, cotangents = SoftmaxInputs(x), SoftmaxOutputs(x[:, ::-1])
    check(call, inputs, cotangents, (choice, choice), limit)


def test_too_many_parts_of_a_row_are_refused():
    call = SoftmaxCall(x=ArraySpec((2, 300), "float32"))
    with pytest.raises(ValueError, match="block 16 cuts a row of 300 columns into 19 splits"):
        kernel.forward(call, SoftmaxInputs(jnp.zeros((2, 300))), COOPERATIVE)


WINNERS = {
    (32768, 4096): ([(1, 8)], [(1, 8)]),
    (131072, 128): ([(16, 4)], [(32, 16), (8, 4)]),
    (2048, 32768): ([(1, 16, 0, 2, False, 132)], [(1, 32)]),
    (8192, 16384): ([(1, 8)], [(1, 16)]),
    (1024, 65536): ([(1, 4, 4096, 1, True)], []),
    (1024, 131072): ([(1, 4, 8192, 1, True)], [(1, 4, 8192, 2, True, 24), (1, 16, 16384, 1, True)]),
}
"""What was fastest on an H200 in either phase, in `benchmarks/results`."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_search_spaces_are_small_and_have_what_was_fastest(dtype):
    drawn = (case.arrays(np.random.default_rng(0)) for case in SMALL)
    shapes = {*(arrays["x"].shape for arrays in drawn), *WINNERS, (8192, 16384), (1024, 65536), (8, 32768), (8, 1_000_000)}
    for shape in shapes:
        for where in (None, ArraySpec(shape, "bool")):
            call = SoftmaxCall(x=ArraySpec(shape, dtype), where=where)
            for target in (H200, Target("gpu", "", "8.0"), Target("gpu", "", "8.9"), Target("cpu")):
                for phase, space in enumerate((config.FORWARD, config.BACKWARD)):
                    found = space.search_space(call, target)
                    assert space.heuristic(call, target) in found
                    assert len(found) == len(set(found)) <= 40, (shape, target, len(found))
                    if dtype == "bfloat16" and shape in WINNERS and target is H200:
                        assert {config.Config(*fields) for fields in WINNERS[shape][phase]} <= {*found}
