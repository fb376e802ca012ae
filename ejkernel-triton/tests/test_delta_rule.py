"""`delta_rule` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.case import Case
from ejkernel.operations.delta_rule import reference
from ejkernel.operations.delta_rule.cases import CASES, arrays
from ejkernel.operations.delta_rule.interface import OPERATION, DeltaRuleCall, DeltaRuleOutputs
from ejkernel.plugin import Target
from ejkernel.utils.tolerance import deviation
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._versions import version_problem
from ejkernel_triton.delta_rule import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.delta_rule import general, kernel, segment_scan, state_scan

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
NAMED = {case.name: case for case in CASES}
CHUNKS = config.Config(16, 16, 4, 1), config.GradientConfig(16, 16, 4, 1, 16, 16, 4)
WHOLE_ROWS = config.Config(32, 32, 4, 1), config.GradientConfig(32, 32, 4, 1, 128, 32, 4)
STEPS = config.Config(0, 4, 1, 1)
SCANS = (segment_scan.__name__, state_scan.__name__)


@pytest.fixture
def interpreted(monkeypatch):
    for module in (kernel, general):
        monkeypatch.setattr(module, "call_kernel", testing.interpreted_call)


def wide(values):
    def widen(value):
        if value is None or not jnp.issubdtype(value.dtype, jnp.floating):
            return None if value is None else np.asarray(value)
        return np.asarray(value).astype(np.float64)

    return type(values)(*map(widen, values))


def bound_of(maker, options=None, dtype="float32"):
    made = maker(np.random.default_rng(0))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else value.dtype) for name, value in made.items()}
    bound = OPERATION.canonicalise(**made, **(options or {}))
    return bound.call, bound.inputs


def cotangents_of(call):
    specs, rng = OPERATION.output_specs(call), np.random.default_rng(1)
    made = (None if spec is None else jnp.asarray(rng.standard_normal(spec.shape), spec.dtype) for spec in specs)
    return DeltaRuleOutputs(*made)


def check_forward(call, inputs, choice, limit=2e-6):
    outputs = kernel.forward(call, inputs, choice)
    with np.errstate(all="ignore"):
        exact = reference.forward(call, wide(inputs))
    for (name, value), like in zip(outputs._asdict().items(), exact, strict=True):
        assert (value is None) == (like is None), name
        assert value is None or deviation(value, like).norm < limit, name
    return outputs


def check(call, inputs, choices, limits=(2e-6, 1e-5)):
    """Outputs and every gradient against the reference, in the norm."""
    outputs, cotangents = check_forward(call, inputs, choices[0], limits[0]), cotangents_of(call)
    gradients = kernel.backward(call, inputs, outputs, cotangents, choices[1])
    with np.errstate(all="ignore"):
        exact = reference.forward(call, wide(inputs))
        wanted = reference.backward(call, wide(inputs), exact, wide(cotangents))
    for name, like in wanted._asdict().items():
        value = getattr(gradients, name)
        assert (value is None) == (like is None), name
        if value is not None:
            assert value.dtype == getattr(inputs, name).dtype, name
            assert deviation(value, like, floor=1e-3).norm < limits[1], name


@pytest.mark.parametrize(
    "name",
    ["plain", "gated", "normalised", "grouped", "segments", "segments-backwards", "packed", "packed-backwards", "by-channel"],
)
@pytest.mark.parametrize("choices", [CHUNKS, WHOLE_ROWS], ids=["chunks", "whole-rows"])
def test_by_chunks(interpreted, name, choices):
    check(*bound_of(NAMED[name].arrays, NAMED[name].options), choices)


@pytest.mark.parametrize("name", ["rank-one", "write-alone", "read-alone"])
@pytest.mark.parametrize("choices", [CHUNKS, WHOLE_ROWS], ids=["chunks", "whole-rows"])
def test_general_form_by_chunks(interpreted, name, choices):
    check(*bound_of(NAMED[name].arrays, NAMED[name].options), choices)


IDS = (-1, 3, 3, 3, 3, -1, 3, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, -1, -1)


@pytest.mark.parametrize(
    ("low_rank", "decay", "split", "reverse"),
    [
        ("ab", "channel", {"bounds": (0, 1, 18, 18, 20)}, True),
        ("a", "head", {"ids": IDS}, True),
        ("ab", "", {"ids": IDS}, False),
        ("b", "channel", {"extreme": True}, False),
    ],
    ids=["packed-backwards", "write-segments-backwards", "segments", "read-extreme"],
)
def test_general_form(interpreted, low_rank, decay, split, reverse):
    length = len(IDS) + 2 * ("ids" not in split)
    maker = arrays(1, length, 2, 20, 24, key_heads=1, decay=decay, low_rank=low_rank, state=True, **split)
    call, inputs = bound_of(maker, {"use_qk_l2norm": True, "return_state": True, "reverse": reverse})
    check(call, inputs, CHUNKS)
    check_forward(call, inputs, STEPS)


@pytest.mark.parametrize(("dtype", "limits"), [("bfloat16", (8e-3, 1.6e-2)), ("float16", (1e-3, 2.5e-3))])
def test_general_form_in_narrow_dtypes(interpreted, dtype, limits):
    call, inputs = bound_of(arrays(1, 80, 1, 32, 20, beta=False, decay="channel", low_rank="ab", state=True), {}, dtype)
    check(call, inputs, (config.Config(64, 32, 4, 1), config.GradientConfig(64, 32, 4, 1, 32, 32, 4)), limits)


@pytest.mark.parametrize("name", [case.name for case in CASES if not case.tags & {"bench", "bench-cpu"}])
def test_by_tokens(interpreted, name):
    call, inputs = bound_of(NAMED[name].arrays, NAMED[name].options)
    check_forward(call, inputs, STEPS)


@pytest.mark.parametrize("name", ["extreme-decays", "extreme-decays-by-channel"])
def test_extreme_decays(interpreted, name):
    check(*bound_of(NAMED[name].arrays, NAMED[name].options), WHOLE_ROWS, (1e-5, 1e-4))


@pytest.mark.parametrize(
    ("decay", "bounds"), [("head", None), ("channel", None), ("head", (0, 17, 50)), ("channel", (0, 33, 50))]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_several_chunks(interpreted, decay, bounds, reverse):
    maker = arrays(1, 55, 2, 20, 24, key_heads=1, decay=decay, state=True, bounds=bounds)
    check(*bound_of(maker, {"use_qk_l2norm": True, "return_state": True, "reverse": reverse}), CHUNKS)


def split_in(segments, choices=CHUNKS):
    return tuple(dataclasses.replace(choice, segments=segments) for choice in choices)


@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize(("decay", "state", "strength"), [
    ("", False, 0.0), ("head", True, 0.03), ("head", False, 3.0), ("channel", True, 0.03), ("channel", False, 3.0),
])  # fmt: skip
def test_segments_of_a_sequence(interpreted, segments, decay, state, strength):
    """Five chunks, the last with a tail: 3 + 2, 2 + 2 + 1, or some segments without any."""
    call, inputs = bound_of(
        arrays(1, 71, 2, 20, 24, key_heads=1, decay=decay, state=state), {"use_qk_l2norm": True, "return_state": state}
    )
    if decay:
        inputs = inputs._replace(decay=inputs.decay * strength)
    check(call, inputs, split_in(segments), (3e-6, 2e-5))


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("split", [{"bounds": (0, 3, 70, 70, 103)}, {"ids": (*[0] * 20, *[1] * 60, *[-1] * 5, *[2] * 25)}])
@pytest.mark.parametrize("reverse", [False, True])
def test_segments_of_packed_sequences(interpreted, decay, split, reverse):
    """Sequences of one chunk and of several, an empty one, and documents that end within segments."""
    maker = arrays(1, 110, 2, 20, 24, key_heads=1, decay=decay, state=True, **split)
    check(*bound_of(maker, {"use_qk_l2norm": True, "return_state": True, "reverse": reverse}), split_in(3))


@pytest.mark.parametrize(("width", "channels"), [(64, 64), (96, 40), (256, 32)])
def test_segments_of_wide_heads(interpreted, width, channels):
    call, inputs = bound_of(arrays(1, 130, 1, width, channels, state=True), {"use_qk_l2norm": True, "return_state": True})
    check(call, inputs, split_in(3, WHOLE_ROWS), (3e-6, 2e-5))


@pytest.mark.parametrize(("dtype", "limits"), [("bfloat16", (8e-3, 1.6e-2)), ("float16", (1e-3, 2.5e-3))])
def test_segments_in_narrow_dtypes(interpreted, dtype, limits):
    """Weak decays, so that states come from the first segment."""
    call, inputs = bound_of(arrays(1, 300, 1, 32, 20, state=True), {"use_qk_l2norm": True}, dtype)
    inputs = inputs._replace(decay=inputs.decay * jnp.asarray(0.01, inputs.decay.dtype))
    choices = config.Config(64, 32, 4, 1), config.GradientConfig(64, 32, 4, 1, 32, 32, 4)
    check(call, inputs, split_in(3, choices), limits)


def test_transitions_that_vanish_are_not_walked_to_the_end(interpreted):
    """What they do not see, such as a NaN, is in the states all the same."""
    call, inputs = bound_of(arrays(1, 16 * 40, 1, 16, 16, state=True), {"use_qk_l2norm": True, "return_state": True})
    inputs, choice = inputs._replace(decay=jnp.full_like(inputs.decay, -1)), split_in(2)[0]
    check_forward(call, inputs, choice)
    problem = kernel._Chunked(call, inputs._replace(key=inputs.key.at[0, 16 * 18].set(jnp.nan)), 16)
    before, transitions = problem.states_before(problem.prepare(), choice)
    assert not np.any(transitions[:, :, 0])
    assert np.isfinite(before[:, :, 0]).all() and np.isnan(before[:, :, 1]).all()


@pytest.mark.parametrize(("decay", "dtype", "limits"), [
    ("head", "bfloat16", (8e-3, 1.6e-2)), ("channel", "bfloat16", (8e-3, 1.6e-2)),
    ("head", "float16", (1e-3, 2.5e-3)), ("channel", "float16", (1e-3, 2.5e-3)),
])  # fmt: skip
def test_narrow_dtypes(interpreted, decay, dtype, limits):
    call, inputs = bound_of(arrays(1, 80, 1, 32, 20, decay=decay, state=True), {"use_qk_l2norm": True}, dtype)
    check(call, inputs, (config.Config(64, 32, 4, 1), config.GradientConfig(64, 32, 4, 1, 32, 32, 4)), limits)


def test_equal_keys_written_in_full(interpreted):
    """The triangular matrix is as far from 0 as keys of length 1 make it; a sum of its powers would lose all digits. Products of
    three TF32 ones, as on a GPU, leave 1.4e-5."""
    call, inputs = bound_of(arrays(1, 64, 1, 16, 16, decay=""), {"use_qk_l2norm": True})
    inputs = inputs._replace(key=jnp.ones_like(inputs.key), beta=jnp.full_like(inputs.beta, 1.9))
    check(call, inputs, (config.Config(64, 16, 4, 1), config.GradientConfig(64, 16, 4, 1, 16, 16, 4)), (3e-5, 1e-4))


def test_nothing_written_has_a_gradient_of_beta(interpreted):
    call, inputs = bound_of(arrays(1, 40, 1, 16, 16))
    check(call, inputs._replace(beta=inputs.beta.at[:, ::2].set(0)), CHUNKS)


def test_minus_infinity_forgets(interpreted):
    for decay in ("head", "channel"):
        call, inputs = bound_of(arrays(1, 40, 1, 16, 16, decay=decay, state=True))
        check(call, inputs._replace(decay=inputs.decay.at[0, 20].set(-jnp.inf)), CHUNKS)
        check_forward(call, inputs._replace(decay=inputs.decay.at[0, 20].set(-jnp.inf)), STEPS)


def test_no_tokens(interpreted):
    call, inputs = bound_of(NAMED["length-0"].arrays, NAMED["length-0"].options)
    outputs = kernel.forward(call, inputs, CHUNKS[0])
    np.testing.assert_array_equal(outputs.final_state, inputs.initial_state)
    gradients = kernel.backward(call, inputs, outputs, outputs, CHUNKS[1])
    np.testing.assert_array_equal(gradients.initial_state, outputs.final_state)
    assert gradients.query.shape == inputs.query.shape


LONG_AND_FEW = Case(
    "long-and-few-heads", arrays(1, 32768, 8, 128, 128, state=True), {"use_qk_l2norm": True, "return_state": True}
)


def segments_of(batch, length, heads, width=128, target=H200, **arguments):
    """That of the heuristics, then those of the search spaces."""
    spec = ArraySpec((batch, length, heads, width), "bfloat16")
    call = DeltaRuleCall(query=spec, key=spec, value=spec, **arguments)
    spaces = config.FORWARD, config.BACKWARD
    (chosen,) = {space.heuristic(call, target).segments for space in spaces}
    found = [{choice.segments for choice in space.search_space(call, target)} for space in spaces]
    assert found[0] == found[1]
    return chosen, found[0]


def test_long_sequences_of_few_heads_are_split():
    """On 132 multiprocessors, which 8 heads of 128 channels leave half idle."""
    assert segments_of(1, 32768, 8) == (8, {1, 4, 8, 16})
    assert segments_of(1, 32768, 1) == (16, {1, 4, 8, 16})
    assert segments_of(1, 8192, 8) == segments_of(2, 8192, 4) == (8, {1, 4, 8})
    assert segments_of(1, 512, 8) == segments_of(1, 32768, 32) == segments_of(4, 8192, 8) == (1, {1})
    by_channel = ArraySpec((1, 32768, 8, 128), "float32")
    assert segments_of(1, 32768, 8, decay=by_channel) == (4, {1, 4, 8, 16})
    bounds = {count: ArraySpec((1, count + 1), "int32") for count in (2, 16)}
    assert segments_of(1, 32768, 4, cu_seqlens=bounds[2]) == (8, {1, 4, 8, 16})
    assert segments_of(1, 32768, 4, cu_seqlens=bounds[16]) == (1, {1})
    low_rank = ArraySpec((1, 32768, 4, 128), "bfloat16")
    assert segments_of(1, 32768, 4, a=low_rank, b=low_rank) == (1, {1})


def test_segments_have_their_best_block():
    spec = ArraySpec((1, 8192, 8, 128), "bfloat16")
    call = DeltaRuleCall(query=spec, key=spec, value=spec)
    for space in (config.FORWARD, config.BACKWARD):
        assert {(choice.segments, choice.block_v) for choice in space.search_space(call, H200)} >= {(1, 16), (4, 32), (8, 64)}


def test_at_least_one_segment():
    with pytest.raises(ValueError, match="segments: got 0, expected at least 1"):
        config.Config(64, 16, 4, 1, segments=0)
    with pytest.raises(ValueError, match="segments: got -1, expected at least 1"):
        config.GradientConfig(64, 16, 4, 1, 16, 16, 4, segments=-1)


def test_tiles_are_powers_of_two():
    with pytest.raises(ValueError, match="chunk_size: got 48"):
        config.Config(48, 16, 4, 1)
    with pytest.raises(ValueError, match="gradient_block_k: got 8"):
        config.GradientConfig(64, 16, 4, 1, 8, 16, 4)


def test_a_few_tokens_are_walked_one_by_one():
    for length, options, chunk in ((1, {}, 0), (11, {}, 16), (11, {"use_chunked": False}, 0), (100, {}, 32)):
        call, _ = bound_of(arrays(1, length, 1, 16, 16), options)
        assert {choice.chunk_size for choice in config.FORWARD.search_space(call, H200)} == {chunk}


@pytest.mark.parametrize("name", ["bench-gated-b1-t1024-h4-d64", "bench-by-channel-b1-t1024-h4-d64"])
def test_compiles_within_the_limits(monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched = [launch for _, launch in recorded("delta_rule", NAMED[name], "bfloat16", target_of(90))]
    assert [launch.kernel.fn.__name__ for launch in launched].count("state_scan_kernel") == 2
    for launch in {launch.identity: launch for launch in launched if launch.kernel.fn.__name__ == "state_scan_kernel"}.values():
        compiled = launch.compile(90)
        assert testing.resources(compiled).shared <= 227 * 1024
        assert compiled.asm["ptx"].count("wgmma.mma_async") >= 8, "products of whole tiles are not on the matrix units"


@pytest.mark.parametrize("capability", [80, 90])
def test_segments_compile_without_spills(monkeypatch, tmp_path, capability):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = LONG_AND_FEW if capability == 90 else dataclasses.replace(LONG_AND_FEW, arrays=arrays(1, 32768, 4, 128, 128))
    launched = {launch.identity: launch for _, launch in recorded("delta_rule", case, "bfloat16", target_of(capability))}
    kernels = [launch for launch in launched.values() if launch.kernel.fn.__module__ in SCANS]
    names = [launch.kernel.fn.__name__ for launch in kernels]
    assert names.count("segment_scan_kernel") == names.count("carry_kernel") == 2
    assert {launch.constants["SEGMENTS"] for launch in kernels} == {8}
    for launch in kernels:
        found = testing.resources(launch.compile(capability))
        assert found.shared <= shared_memory_limit(target_of(capability))
        assert found.spilling < (0.02 if capability == 90 else 0.04), launch.kernel.fn.__name__


@needs_jax_triton
@pytest.mark.parametrize(("length", "sequences"), [(64, 0), (1, 0), (1, 1), (4096, 0)])
def test_lowers_for_cuda(length, sequences):
    """Integers that are 1 are constants to the compiler."""

    def loss(values, bounds):
        given = {**values, "cu_seqlens": bounds}
        return OPERATION.invoke(given, {}, platform="triton").astype(jnp.float32).sum()

    tokens = {name: jax.ShapeDtypeStruct((1, length, 2, 16), "bfloat16") for name in ("query", "key", "value")}
    bounds = jax.ShapeDtypeStruct((sequences + 1,), "int32") if sequences else None
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(tokens, bounds).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.delta_rule.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") >= 4


def test_supports():
    spec = ArraySpec((2, 64, 4, 32), "float32")
    call = DeltaRuleCall(query=spec, key=spec, value=spec)

    def ask(target=H200, phase="backward", **changes):
        supports = capability.supports_backward if phase == "backward" else capability.supports_forward
        return supports(dataclasses.replace(call, **changes), target)

    if version_problem() is None:
        assert ask() is None
        assert ask(a=spec, b=spec, seg_ids=ArraySpec((2, 64), "int32")) is None
    assert "the target is cpu" in str(ask(Target("cpu")))
    assert "query is float64" in str(ask(query=ArraySpec((2, 64, 4, 32), "float64")))
    assert "9.0 or older" in str(ask(Target("gpu", "NVIDIA B200", "10.0")))
    assert "value's head size 513" in str(ask(value=ArraySpec((2, 64, 4, 513), "float32")))
    assert "tokens are more than" in str(
        ask(**dict.fromkeys(("query", "key", "value"), ArraySpec((2, 2**30, 1, 1), "float32")))
    )
