"""`linear_recurrence` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.case import Case
from ejkernel.operations.linear_recurrence import reference
from ejkernel.operations.linear_recurrence.cases import CASES, arrays
from ejkernel.operations.linear_recurrence.interface import (
    OPERATION,
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.testing.problem import fields_refused
from ejkernel.utils.tolerance import deviation
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton._chunks import chunks_of
from ejkernel_triton._plugin import ejkernel_plugin
from ejkernel_triton._versions import version_problem
from ejkernel_triton.linear_recurrence import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import _jax_triton, testing
from ejkernel_triton.linear_recurrence import decays, forms, kernel, launches, tile_sizes

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
LAUNCHING = (decays, launches)
"""The modules that call kernels."""
NAMED = {case.name: case for case in CASES}
SCALED = {"value_scale": True, "skip": "head"}
SEVERAL_SEGMENTS = config.Config(16, 16, 16, 4, 1)
DOCUMENTS = (0, 3, 3, 67, 68, 85)
"""A short one, an empty one, one of several chunks, one token, one that ends before the tokens do; 90 tokens in all."""


@pytest.fixture
def interpreted(monkeypatch):
    for module in LAUNCHING:
        monkeypatch.setattr(module, "call_kernel", testing.interpreted_call)


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels that the interpreter runs, and how many heads or blocks each program runs."""
    found = []

    def recorded_call(function, *arguments, **constants):
        found.append((function.fn.__name__, constants.get("MEMBERS")))
        return testing.interpreted_call(function, *arguments, **constants)

    for module in LAUNCHING:
        monkeypatch.setattr(module, "call_kernel", recorded_call)
    return found


def bound_of(maker, options=None, dtype="float32"):
    made = maker(np.random.default_rng(0))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else value.dtype) for name, value in made.items()}
    bound = OPERATION.canonicalise(**made, **(options or {}))
    return bound.call, bound.inputs


def check(call, inputs, choice, limits=(2e-6, 1e-5)):
    """Outputs and every gradient against the reference, in the norm."""
    specs = OPERATION.output_specs(call)
    rng = np.random.default_rng(1)
    cotangents = LinearRecurrenceOutputs(
        *(None if spec is None else jnp.asarray(rng.standard_normal(spec.shape), spec.dtype) for spec in specs)
    )
    outputs = kernel.forward(call, inputs, choice)
    gradients = kernel.backward(call, inputs, outputs, cotangents, choice)
    with np.errstate(all="ignore"):
        exact = reference.forward(call, widened(inputs))
        wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    for (name, value), like in zip(outputs._asdict().items(), exact, strict=True):
        assert (value is None) == (like is None), name
        assert value is None or deviation(value, like).norm < limits[0], name
    for name, like in wanted._asdict().items():
        value = getattr(gradients, name)
        assert (value is None) == (like is None), name
        if value is not None:
            assert value.dtype == getattr(inputs, name).dtype, name
            assert deviation(value, like, floor=1e-3).norm < limits[1], name
    return outputs, gradients


@pytest.mark.parametrize(
    "name",
    [
        *("gla", "scalar", "no-decay", "packed", "packed-reset", "query-groups", "value-groups", "gamma", "extreme-key-decay"),
        *("value-scale", "skip", "packed-ssd"),
    ],
)
def test_several_segments(interpreted, name):
    limits = (1e-5, 2e-3) if name.startswith("extreme") else (2e-6, 1e-5)
    check(*bound_of(NAMED[name].arrays, NAMED[name].options), SEVERAL_SEGMENTS, limits)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    ("decays", "options"),
    [
        ("", {"value_heads": 4}),
        ("g gamma", {"query_heads": 4}),
        ("gk", {"value_heads": 6}),
        ("g gk", {}),
        ("gk", {"bonus": True}),
        ("gk", {"bonus": True, "value_heads": 4}),
        ("g", {"value_heads": 6, "transposed": True}),
        ("g", {"value_heads": 6, "transposed": True, **SCALED}),
        ("gk", {"query_heads": 4, "value_scale": True, "skip": "channel"}),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_few_tokens_go_one_after_the_other(interpreted, decays, options, length, reverse):
    """With heads of value wider than what the chunked form holds, too."""
    channels = kernel.WIDEST_VALUE + 20 if decays == "" else 18
    maker = arrays(2, length, 2, 20, channels, decays=decays, state=True, **options)
    transposed = options.get("transposed", False)
    call, inputs = bound_of(maker, {"reverse": reverse, "return_state": True, "transposed_state": transposed})
    for given in (inputs, inputs._replace(initial_state=None)):
        specs = call if given.initial_state is not None else dataclasses.replace(call, initial_state=None)
        choice = config.forward_heuristic(specs, H200)
        assert choice.chunk_size == 0
        found = kernel.forward(specs, given, choice)
        for value, like in zip(found, reference.forward(specs, widened(given)), strict=True):
            assert deviation(value, like).norm < 2e-6


@pytest.mark.parametrize(
    ("decays", "heads", "bounds", "reverse"),
    [
        ("g", {"value_heads": 6}, None, False),
        ("g gamma", {"query_heads": 4}, (0, 9, 9, 30), True),
        ("gk", {"query_heads": 4}, None, True),
        ("", {"value_heads": 4}, (0, 17, 33), False),
    ],
)
def test_programs_that_sum_heads(launched, monkeypatch, decays, heads, bounds, reverse):
    """What heads share has its gradient summed by the program that runs them; here by one, and by several."""
    maker = arrays(1, 40, 2, 20, 18, decays=decays, state=True, bounds=bounds, rate=0.1, **heads)
    call, inputs = bound_of(maker, {"reverse": reverse, "return_state": True})
    group = call.heads[1] // call.heads[0]
    monkeypatch.setattr(tile_sizes, "_ENOUGH_PROGRAMS", 1)
    check(call, inputs, SEVERAL_SEGMENTS)
    assert ("fused_chunk_kernel", group) in launched
    launched.clear()
    monkeypatch.setattr(tile_sizes, "_ENOUGH_PROGRAMS", 10**6)
    check(call, inputs, SEVERAL_SEGMENTS)
    assert {members for _, members in launched} == {None, 1}


@pytest.mark.parametrize(
    ("decays", "options", "reverse", "members"),
    [
        ("g", {"value_heads": 4, "rate": 0.1}, False, 4),
        ("g gamma", {"value_heads": 4, "state": True, "rate": 0.1}, True, 4),
        ("g", {"heads": 4, "value_heads": 2, "rate": 3.0}, False, 2),
        ("g", {"value_heads": 4, "rate": 0.1, **SCALED}, False, 4),
        ("g", {"value_heads": 4, "state": True, "rate": 0.1, "skip": "head"}, True, 4),
        ("g", {"heads": 4, "value_heads": 2, "rate": 0.1, "value_scale": True}, True, 2),
        ("g", {"value_heads": 4, "state": True, "rate": 0.1, **SCALED, "bounds": DOCUMENTS}, False, 4),
        ("g gamma", {"value_heads": 4, "state": True, "rate": 0.1, "skip": "head", "bounds": DOCUMENTS}, True, 4),
        ("gamma", {"heads": 4, "value_heads": 2, "rate": 0.1, "value_scale": True, "bounds": (0, 90)}, False, 2),
    ],
)
def test_stored_states(launched, monkeypatch, decays, options, reverse, members):
    """Backward from the states of all chunks: a tail, two blocks of value, several groups of chunks for gradients of decays."""
    options = {"heads": 2} | options
    maker = arrays(1, 90, width=20, channels=20, decays=decays, **options)
    call, inputs = bound_of(maker, {"reverse": reverse, "return_state": True}, "bfloat16")
    choice = dataclasses.replace(SEVERAL_SEGMENTS, store_states=True)
    found = []
    for programs, most in ((1, members), (10**6, 1)):
        monkeypatch.setattr(tile_sizes, "_ENOUGH_PROGRAMS", programs)
        launched.clear()
        found.append(check(call, inputs, choice, (8e-3, 1.6e-2))[1])
        assert ("query_gradients_kernel", most) in launched and ("key_gradients_kernel", most) in launched
    for name in ("value", "g", "value_scale", "skip"):  # the same numbers, whichever programs compute them
        if getattr(found[0], name) is not None:
            np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name))
    of_segments = "segment_states_kernel", None
    assert launched.count(of_segments) == 1, "forward alone"
    monkeypatch.setattr(tile_sizes, "_LEAST_CHUNKS", 2)
    check(call, inputs, choice, (8e-3, 1.6e-2))
    assert launched.count(of_segments) == 4, "few heads: states of segments come first"


@pytest.mark.parametrize("least", [2, 8])
@pytest.mark.parametrize("final", [False, True])
def test_a_sequence_without_tokens_passes_gradients_of_its_state(interpreted, monkeypatch, final, least):
    """With stored states, of segments or of whole sequences: its last state is its first one."""
    monkeypatch.setattr(tile_sizes, "_LEAST_CHUNKS", least)
    maker = arrays(1, 90, 1, 20, 20, value_heads=2, decays="g", state=True, bounds=DOCUMENTS, rate=0.1)
    call, inputs = bound_of(maker, {"return_state": final}, "bfloat16")
    choice = dataclasses.replace(SEVERAL_SEGMENTS, store_states=True)
    gradients = check(call, inputs, choice, (8e-3, 1.6e-2))[1]
    assert bool(np.any(gradients.initial_state[:, 1])) == final


@pytest.mark.parametrize(
    ("decays", "options", "dtype"),
    [("g", {}, "float32"), ("gk", {}, "bfloat16"), ("", {"bounds": (0, 9, 40)}, "bfloat16")],
)
def test_states_are_not_stored_for_other_calls(launched, decays, options, dtype):
    call, inputs = bound_of(arrays(1, 40, 1, 5, 4, decays=decays, rate=0.1, **options), {}, dtype)
    limits = (2e-6, 1e-5) if dtype == "float32" else (8e-3, 1.6e-2)
    check(call, inputs, dataclasses.replace(SEVERAL_SEGMENTS, store_states=True), limits)
    assert "chunk_states_kernel" not in {name for name, _ in launched} and not config.can_store_states(call)


@pytest.mark.parametrize(
    ("decays", "options", "fused"),
    [
        ("g gamma", {"value_heads": 4, "state": True, **SCALED}, True),
        ("", {"query_heads": 4, **SCALED}, True),
        ("g", {"value_heads": 4, "value_scale": True, "skip": "channel"}, False),
        ("gk", {"query_heads": 4, "bounds": (0, 9, 9, 30), **SCALED}, False),
        ("gk", {"bonus": True, "value_scale": True}, False),
        ("g", {"channels": 257, **SCALED}, False),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_factors_of_values(monkeypatch, decays, options, fused, reverse):
    """In the kernels of the forward phase, or around all of them."""
    scaled = set()

    def recorded_call(function, *arguments, **constants):
        scaled.add(constants["R"].value_scale_heads > 0)
        return testing.interpreted_call(function, *arguments, **constants)

    for module in LAUNCHING:
        monkeypatch.setattr(module, "call_kernel", recorded_call)
    options = {"channels": 18, **options}
    call, inputs = bound_of(arrays(1, 40, 2, 20, decays=decays, rate=0.1, **options), {"reverse": reverse})
    for choice in (config.Config(16, 0, 16, 4, 1), SEVERAL_SEGMENTS):
        scaled.clear()
        check(call, inputs, choice)
        assert (True in scaled) == fused


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_bonus(interpreted, state, reverse):
    maker = arrays(2, 20, 1, 5, 4, query_heads=2, decays="gk", bonus=True, state=state)
    check(*bound_of(maker, {"reverse": reverse, "return_state": True}), SEVERAL_SEGMENTS)


def test_one_token_with_a_bonus(interpreted):
    check(*bound_of(NAMED["bonus"].arrays, NAMED["bonus"].options), config.Config(32, 32, 16, 4, 1))
    maker = arrays(2, 1, 2, 5, 4, decays="gk", bonus=True, state=True)
    check(*bound_of(maker, {"return_state": True}), config.Config(16, 0, 16, 4, 1))


@pytest.mark.parametrize("channels", [257, 272, 520])
def test_wide_values_are_several_calls(interpreted, channels):
    maker = arrays(1, 20, 1, 5, channels, decays="g", state=True)
    call, inputs = bound_of(maker, {"return_state": True})
    parts = [part.call.value.shape[3] for part in forms.parts_of(call)]
    assert sum(parts) == channels and max(parts) <= 256 and len(parts) == -(-channels // 256)
    check(call, inputs, SEVERAL_SEGMENTS)
    wide, _ = bound_of(arrays(1, 4096, 4, 128, 512, decays="g"), {}, "bfloat16")
    assert config.forward_heuristic(wide, H200) == config.forward_heuristic(forms.parts_of(wide)[0].call, H200)


@pytest.mark.parametrize(("decays", "bounds"), [("gk", None), ("g", (0, 9, 9, 30)), ("gk g", (0, 17, 33))])
def test_back_to_front(interpreted, decays, bounds):
    maker = arrays(1, 40, 1, 5, 4, decays=decays, state=True, bounds=bounds)
    check(*bound_of(maker, {"reverse": True, "return_state": True}), SEVERAL_SEGMENTS)


@pytest.mark.parametrize("factors", [{}, SCALED])
@pytest.mark.parametrize(
    ("decays", "length", "bounds"), [("g gamma", 150, None), ("gamma", 128, None), ("", 70, None), ("g", 150, (0, 70, 140))]
)
def test_eight_warps_turn_tiles(interpreted, decays, length, bounds, factors):
    maker = arrays(1, length, 1, 24, 100, value_heads=2, decays=decays, state=True, bounds=bounds, rate=0.1, **factors)
    check(*bound_of(maker, {"return_state": True}), config.Config(64, 64, 128, 8, 3))


@pytest.mark.parametrize(("rate", "dtype"), [(0.05, "float32"), (3.0, "float32"), (0.05, "bfloat16"), (3.0, "bfloat16")])
def test_mild_and_strong_decays_per_channel(interpreted, rate, dtype):
    """They are split in the middle of a chunk, or at the middle of every block."""
    limits = (2e-6, 2e-5) if dtype == "float32" else (8e-3, 1.6e-2)
    maker = arrays(1, 100, 1, 20, 17, decays="gk", state=True, rate=rate)
    check(*bound_of(maker, {"return_state": True}, dtype), config.Config(64, 64, 16, 4, 2), limits)


def test_float16_states_do_not_overflow(interpreted):
    call, inputs = bound_of(arrays(1, 600, 1, 16, 16), dtype="float16")
    inputs = inputs._replace(key=jnp.full_like(inputs.key, 14), value=jnp.full_like(inputs.value, 14))
    call = dataclasses.replace(call, softmax_scale=1e-4)
    out = kernel.forward(call, inputs, config.Config(64, 128, 16, 4, 1)).out
    exact = reference.forward(call, widened(inputs)).out
    assert np.abs(exact).max() < 1000 and deviation(out, exact).norm < 2e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_table_of_segments(batch):
    """Of packed sequences of any lengths, each cut by itself; segments that are left over belong to no sequence."""
    rng = np.random.default_rng(0)
    bounds = np.sort(rng.integers(0, 200, (batch, 12)), axis=1)
    found = chunks_of(jnp.asarray(bounds, jnp.int32), 200, 16)
    for row, first, sequence in zip(bounds, found.first, found.sequence, strict=True):
        counts = -(-np.diff(row) // 16)
        np.testing.assert_array_equal(first, np.append(0, np.cumsum(counts)))
        used = np.repeat(np.arange(11), counts)
        np.testing.assert_array_equal(sequence, np.append(used, np.full(11 + 200 // 16 - len(used), 11)))


def test_packed_sequences_store_states_as_rows_do():
    for length, bounds in ((8192, (0, 3000, 8192)), (200, (0, 200))):
        calls = [
            bound_of(arrays(1, length, 1, 128, 64, value_heads=32, decays="g", bounds=given), {}, "bfloat16")[0]
            for given in (None, bounds)
        ]
        alone, packed = (config.backward_heuristic(call, H200) for call in calls)
        assert alone == packed and alone.store_states == (length > 512)
        assert alone in config.backward_space(calls[1], H200)


def test_minus_infinity_forgets(interpreted):
    call, inputs = bound_of(arrays(1, 40, 1, 8, 8, decays="g gk", rate=0.1))
    inputs = inputs._replace(g=inputs.g.at[0, 7].set(-jnp.inf), gk=inputs.gk.at[0, 20, 0, 3].set(-jnp.inf))
    check(call, inputs, config.Config(32, 32, 16, 4, 1))
    only_g = dataclasses.replace(call, gk=None), inputs._replace(gk=None)
    check(*only_g, config.Config(32, 32, 16, 4, 1))


@pytest.mark.parametrize(("dtype", "limits"), [("float32", (2e-6, 1e-5)), ("bfloat16", (8e-3, 1.6e-2))])
def test_each_member_of_the_batch_may_have_its_own(interpreted, dtype, limits):
    """What vmap over cu_seqlens, g_gamma and skip folds to; tokens outside of every sequence hold NaN. In bfloat16 with stored
    states."""
    call, inputs = bound_of(arrays(3, 40, 2, 5, 4, decays="g", value_scale=True), dtype=dtype)
    bounds = jnp.array([[0, 20, 40], [0, 0, 31], [0, 33, 33]], jnp.int32)
    outside = np.arange(40)[None] >= np.asarray(bounds)[:, -1:]
    values = {name: jnp.where(outside[..., None, None], jnp.nan, getattr(inputs, name)) for name in ("query", "key", "value")}
    gamma = jnp.asarray(-np.random.default_rng(5).random((3, 2)), jnp.float32)
    inputs = inputs._replace(**values, cu_seqlens=bounds, g_gamma=gamma, skip=gamma[..., None])
    specs = {name: ArraySpec.of(getattr(inputs, name)) for name in ("cu_seqlens", "g_gamma", "skip")}
    call = dataclasses.replace(call, **specs, return_state=True)
    choices = [SEVERAL_SEGMENTS, config.Config(32, 32, 16, 4, 1)]
    if dtype == "bfloat16":
        choices = [dataclasses.replace(choice, store_states=True) for choice in choices]
    for choice in choices:
        outputs, gradients = check(call, inputs, choice, limits)
        assert not np.asarray(outputs.out)[outside].any()
        assert not np.asarray(gradients.g)[outside].any()


def test_segments_are_whole_chunks():
    with pytest.raises(ValueError, match="segment_size: got 32, expected 0 or a multiple of chunk_size, 64"):
        config.Config(64, 32, 16, 4, 2)
    with pytest.raises(ValueError, match="chunk_size: got 48"):
        config.Config(48, 48, 16, 4, 2)


def test_exact_products_of_float32_take_small_chunks():
    call, _ = bound_of(arrays(1, 300, 1, 64, 64), {"precision": "highest"})
    assert {choice.chunk_size for choice in config.BACKWARD.search_space(call, H200)} == {16}


@pytest.mark.parametrize(
    ("width", "capability_number", "tile"),
    [(64, 90, (64, 32, 2)), (128, 90, (64, 64, 1)), (64, 80, (32, 32, 1)), (128, 80, (32, 16, 1))],
)
def test_tiles_of_float32_are_those_that_registers_hold_best(width, capability_number, tile):
    call, _ = bound_of(arrays(1, 300, 1, width, width))
    target = target_of(capability_number)
    for space in (config.FORWARD, config.BACKWARD):
        choice = space.heuristic(call, target)
        assert (choice.chunk_size, choice.block_v, choice.num_stages) == tile
        most = 64 if capability_number == 90 else 32
        assert {found.block_v for found in space.search_space(call, target)} == {most // 2, most} | {tile[1]}


@pytest.mark.parametrize("name", ["bench-scalar-t1024-h4-d64", "bench-gla-t1024-h4-d64"])
def test_compiles_within_the_limits(monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched = [launch for _, launch in recorded("linear_recurrence", NAMED[name], "bfloat16", target_of(90))]
    names = [launch.kernel.fn.__name__ for launch in launched]
    assert names.count("fused_chunk_kernel") == 4
    assert names.count("scores_kernel" if "gla" in name else "sums_kernel") == 2
    for launch in {
        launch.identity: launch for launch in launched if launch.kernel.fn.__name__ == "fused_chunk_kernel"
    }.values():
        compiled = launch.compile(90)
        assert testing.resources(compiled).shared <= 227 * 1024
        assert compiled.asm["ptx"].count("wgmma.mma_async") >= 8, "products of whole tiles are not on the matrix units"


@pytest.mark.parametrize(("bounds", "stack", "spilling"), [(None, 96, 0.02), ((0, 5000, 5001, 16384), 112, 0.022)])
def test_stored_states_compile_within_the_limits(monkeypatch, tmp_path, bounds, stack, spilling):
    """Every config of the search space that stores states; it has none before Hopper."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case, found, tolerated = NAMED["bench-ssd-b4-t4096-h80-n128"], {}, testing.tolerated_stack(64)
    if bounds:
        case = Case("packed", arrays(1, 16384, 1, 128, 64, value_heads=80, decays="g", rate=0.05, bounds=bounds))
    assert not any(
        "store_states=True" in name for name, _ in recorded("linear_recurrence", case, "bfloat16", target_of(80), space=True)
    )
    kernels = ("query_gradients_kernel", "key_gradients_kernel", "chunk_states_kernel")
    for name, launch in recorded("linear_recurrence", case, "bfloat16", target_of(90), space=True):
        if "store_states=True" in name and launch.kernel.fn.__name__ in kernels:
            found[launch.identity] = launch
    assert len(found) >= 12
    for launch in found.values():
        compiled = launch.compile(90)
        used = testing.resources(compiled)
        assert used.shared <= 113 * 1024, "two programs do not fit on a multiprocessor"
        assert used.stack <= stack + tolerated and used.spilling < spilling, (launch.kernel.fn.__name__, launch.constants)
        assert compiled.asm["ptx"].count("wgmma.mma_async") >= 4, "products of whole tiles are not on the matrix units"


@pytest.mark.parametrize(
    ("bounds", "forward", "backward"),
    [(None, (64, 0.01), (304, 0.06)), ((0, 1000, 1001, 4096), (96, 0.016), (328, 0.06))],
)
def test_what_mamba_2_takes_compiles_within_the_limits(monkeypatch, tmp_path, bounds, forward, backward):
    """Step sizes and skips in the kernels, with states before and after: forward in one pass spills a few registers outside of
    its loop, in segments, as packed sequences are, a few more; gradients hardly more than without factors."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    limits = {"fused_chunk_kernel": forward, "key_gradients_kernel": backward}
    options = {"softmax_scale": 1.0, "return_state": True, "transposed_state": True}
    more = {"rate": 0.05, "state": True, "transposed": True, "bounds": bounds, **SCALED}
    maker = arrays(1 if bounds else 4, 4096, 1, 128, 64, value_heads=80, decays="g", **more)
    case, tolerated = Case("mamba2", maker, options), testing.tolerated_stack(96)
    found = {launch.identity: launch for _, launch in recorded("linear_recurrence", case, "bfloat16", target_of(90))}
    assert [launch.kernel.fn.__name__ for launch in found.values()].count("chunk_states_kernel") == 2
    for launch in found.values():
        used, (stack, spilling) = testing.resources(launch.compile(90)), limits.get(launch.kernel.fn.__name__, (0, 0.0))
        assert used.stack <= stack + tolerated and used.spilling <= spilling + tolerated, launch.kernel.fn.__name__


@needs_jax_triton
@pytest.mark.parametrize(("length", "sequences"), [(64, 0), (1, 0), (1, 1)])
def test_lowers_for_cuda(length, sequences):
    """Integers that are 1 are constants to the compiler."""

    def loss(values, bounds):
        given = {**values, "cu_seqlens": bounds}
        return OPERATION.invoke(given, {}, platform="triton").astype(jnp.float32).sum()

    tokens = {name: jax.ShapeDtypeStruct((1, length, 2, 16), "bfloat16") for name in ("query", "key", "value", "gk")}
    bounds = jax.ShapeDtypeStruct((sequences + 1,), "int32") if sequences else None
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(tokens, bounds).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.linear_recurrence.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") >= 8


@needs_jax_triton
@pytest.mark.parametrize("factors", [{}, SCALED])
@pytest.mark.parametrize(("length", "state"), [(1, False), (150, False), (150, True)])
@pytest.mark.parametrize("sequences", [0, 1, 2])
def test_stored_states_lower_for_cuda(monkeypatch, length, state, factors, sequences):
    """`state`: one enters, and the one that leaves has a gradient; both in float32, unlike those that are stored."""
    monkeypatch.setattr(_jax_triton, "current_target", lambda: H200)
    bounds = (*range(sequences), length) if sequences else None
    made = arrays(1, length, 1, 16, 16, value_heads=4, decays="g", bounds=bounds, **factors)
    call, inputs = bound_of(made, {"return_state": state}, "bfloat16")
    states = jnp.ones((1, max(sequences, 1), 4, 16, 16))
    if state:
        inputs = inputs._replace(initial_state=states)
        call = dataclasses.replace(call, initial_state=ArraySpec(inputs.initial_state.shape, "float32"))
    choice = config.Config(64, 64, 16, 4, 2, True)

    def gradients(inputs):
        outputs = LinearRecurrenceOutputs(jnp.ones((1, length, 4, 16), "bfloat16"), states if state else None)
        return tuple(x for x in kernel.backward(call, inputs, outputs, outputs, choice) if x is not None)

    text = jax.jit(gradients).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 6


def test_supports():
    spec = ArraySpec((2, 64, 4, 32), "float32")
    call = LinearRecurrenceCall(query=spec, key=spec, value=spec)

    def ask(target=H200, **changes):
        return capability.supports_backward(dataclasses.replace(call, **changes), target)

    if version_problem() is None:
        assert ask() is None
    assert "the target is cpu" in str(ask(Target("cpu")))
    assert "query is float64" in str(ask(query=ArraySpec((2, 64, 4, 32), "float64")))
    assert "value bfloat16, needs one dtype" in str(ask(value=ArraySpec((2, 64, 4, 32), "bfloat16")))
    assert "9.0 or older" in str(ask(Target("gpu", "NVIDIA B200", "10.0")))
    assert fields_refused(ejkernel_plugin(), "linear_recurrence", dataclasses.replace(call, gv=spec)) == {"gv"}
    assert "head size 257" in str(ask(query=ArraySpec((2, 64, 4, 257), "float32")))
    packed = {"bonus": ArraySpec((1, 4, 32), "float32"), "cu_seqlens": ArraySpec((1, 3), "int32")}
    assert "a bonus in packed sequences" in str(ask(**packed))
    assert "tokens are more than" in str(
        ask(**dict.fromkeys(("query", "key", "value"), ArraySpec((2, 2**30, 1, 1), "float32")))
    )


def test_no_tokens(interpreted):
    call, inputs = bound_of(arrays(2, 0, 2, state=True, decays="g"), {"return_state": True})
    outputs = kernel.forward(call, inputs, SEVERAL_SEGMENTS)
    assert outputs.out.shape == (2, 0, 2, 3)
    np.testing.assert_array_equal(outputs.final_state, inputs.initial_state)
    gradients = kernel.backward(
        call, inputs, outputs, LinearRecurrenceOutputs(outputs.out, outputs.final_state), SEVERAL_SEGMENTS
    )
    np.testing.assert_array_equal(gradients.initial_state, outputs.final_state)
    assert isinstance(gradients, LinearRecurrenceInputs) and gradients.g.shape == (2, 0, 2)
