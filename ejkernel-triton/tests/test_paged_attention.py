"""`paged_attention` in Triton on a machine without a GPU: numbers in the interpreter, schedules, machine code, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.paged_attention import reference
from ejkernel.operations.paged_attention.interface import OPERATION, PagedAttentionInputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.paged_attention import capability, config
from ejkernel_triton.paged_attention.config import PagedAttentionConfig

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from paged_problems import PROBLEMS, draw, problem

from ejkernel_triton import _interpreter, testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.paged_attention import kernel
from ejkernel_triton.paged_attention.schedule import MIN_BLOCKS_PER_SPLIT, Sizes, make_schedule

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SPLIT = PagedAttentionConfig(block_q=2, block_k=16, num_warps=4, num_stages=2, programs=12)
ALONE = dataclasses.replace(SPLIT, decode_block_k=32)


def check(call, inputs, chosen, tolerance=1e-6):
    with intercept_launches(_interpreter.interpreted_call):
        got = kernel.forward(call, inputs, chosen)
    exact = reference.forward(call, widened(inputs))
    assert (got.out.dtype, got.lse.dtype) == (inputs.query.dtype, jnp.float32)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), exact.out, rtol=0, atol=tolerance * 4)
    np.testing.assert_allclose(np.asarray(got.lse, np.float64), exact.lse, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("chosen", [SPLIT, ALONE], ids=["one-pass", "two-passes"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers_in_the_interpreter(name, chosen):
    check(*problem(**PROBLEMS[name]), chosen)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1e-3)])
def test_numbers_of_narrow_types(dtype, tolerance):
    check(*problem(dtype=dtype), SPLIT, tolerance)


def test_mixed_dtypes_are_multiplied_in_the_wider_one():
    call, inputs = problem(dtype="bfloat16")
    pages = [array.astype(jnp.float32) for array in (inputs.key_pages, inputs.value_pages)]
    inputs = inputs._replace(key_pages=pages[0], value_pages=pages[1])
    specs = {name: ArraySpec.of(getattr(inputs, name)) for name in ("key_pages", "value_pages")}
    check(dataclasses.replace(call, **specs), inputs, SPLIT, 4e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"block_q": 1},
        {"block_q": 3},
        {"block_q": 8},
        {"block_k": 32},
        {"block_k": 128},
        {"programs": 1},
        {"programs": 64},
        {"decode_block_k": 16},
        {"decode_block_k": 128},
        {"num_warps": 8},
        {"num_stages": 4},
    ],
    ids=str,
)
def test_no_config_changes_the_numbers(change):
    call, inputs = problem()
    check(call, inputs, dataclasses.replace(SPLIT, **change))


def test_batch_members_share_what_they_may():
    call, inputs = problem()
    doubled = {
        "query": jnp.concatenate([inputs.query, inputs.query[:, ::-1]]),
        "kv_lens": jnp.concatenate([inputs.kv_lens, jnp.maximum(inputs.kv_lens - 2, 0)]),
        "value_pages": jnp.concatenate([inputs.value_pages, 2 * inputs.value_pages]),
    }
    inputs = inputs._replace(**doubled)
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(call, inputs, ALONE)


def test_nan_reaches_only_the_rows_that_see_it():
    """The new tokens of one request are in one tile; the value of the third one is NaN, the key of the last one is infinite."""
    call, inputs = problem(requests=((6, 20),), spare_tokens=0, heads=1)
    tables, size = np.asarray(inputs.block_tables)[0, 0], call.pages.page_size
    value = inputs.value_pages.at[0, tables[16 // size], 16 % size, 0, 2].set(jnp.nan)
    inputs = inputs._replace(value_pages=value, key_pages=inputs.key_pages.at[0, tables[19 // size], 19 % size].set(jnp.inf))
    with intercept_launches(_interpreter.interpreted_call):
        got = kernel.forward(call, inputs, dataclasses.replace(SPLIT, block_q=8))
    with np.errstate(invalid="ignore"):
        exact = reference.forward(call, widened(inputs))
    np.testing.assert_allclose(got.out[0, :2], exact.out[0, :2], atol=4e-6)
    assert np.isnan(np.asarray(got.out[0, 2:])).all()


@pytest.mark.parametrize("shape", ["no tokens", "no requests", "no pages"])
def test_nothing_to_attend_to(shape):
    call, inputs = problem(softmax_aux=draw(2))
    empty = {
        "no tokens": {"query": inputs.query[:, :0], "query_start_loc": jnp.zeros_like(inputs.query_start_loc)},
        "no requests": {
            "kv_lens": inputs.kv_lens[:, :0],
            "query_start_loc": inputs.query_start_loc[:, :1],
            "block_tables": inputs.block_tables[:, :0],
        },
        "no pages": {"key_pages": inputs.key_pages[:, :0], "value_pages": inputs.value_pages[:, :0]},
    }[shape]
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in empty.items()})
    inputs = inputs._replace(**empty)
    got = kernel.forward(call, inputs, SPLIT)
    exact = reference.forward(call, widened(inputs))
    np.testing.assert_array_equal(got.out, np.zeros(exact.out.shape))
    np.testing.assert_allclose(got.lse, exact.lse, rtol=1e-6)


# The schedule


def lengths_of(rng, requests, tokens):
    """Uneven descriptions of `requests` requests with at most `tokens` new tokens and 4096 keys."""
    cuts = np.sort(rng.integers(0, tokens + 1, requests))
    new = np.diff(cuts, prepend=0)
    keys = np.maximum(new, (4096 * rng.random(requests) ** rng.integers(1, 9)).astype(int))
    return np.concatenate([[0], np.cumsum(new)])[None].astype(np.int32), np.where(new > 0, keys, 0)[None].astype(np.int32)


@pytest.mark.parametrize(
    ("tokens", "requests", "chosen"), [(64, 64, (1, 64, 1056)), (300, 7, (8, 32, 264)), (40, 40, (1, 64, 16))]
)
def test_units_are_within_their_bounds_and_balanced(tokens, requests, chosen):
    """No more units than programs are launched for, every key in one of them, and none much longer than the average."""
    call = shapes_of(tokens, requests, 256, 16)
    options = PagedAttentionConfig(chosen[0], chosen[1], 4, 3, chosen[2])
    sizes = Sizes.of(call, options, tokens_of_tile=chosen[0], keys=chosen[1])
    made = jax.jit(lambda starts, lengths: make_schedule(call, sizes, starts, lengths))
    for seed in range(40):
        starts, lengths = lengths_of(np.random.default_rng(seed), requests, tokens)
        splits, units, partials = (np.asarray(array)[0] for array in made(starts, lengths))
        tiles = -(-np.diff(starts[0]) // chosen[0])
        np.testing.assert_array_equal(units, np.cumsum(tiles * splits))
        np.testing.assert_array_equal(partials, np.cumsum(np.where(splits > 1, tiles * splits, 0)))
        assert units[-1] <= sizes.units
        assert partials[-1] <= sizes.partials
        assert ((splits > 0) == (tiles > 0)).all()
        blocks = -(-lengths[0] // chosen[1])
        longest = np.max(-(-blocks // np.maximum(splits, 1)), initial=0)
        average = np.sum(blocks * tiles) / sizes.wanted
        assert longest <= 1.5 * max(np.ceil(average), MIN_BLOCKS_PER_SPLIT)


def test_equal_requests_that_fill_the_device_are_not_split():
    """64 requests of 4096 keys under 8 key heads are 512 programs of 528: cutting each in two would only add a merge."""
    call = shapes_of(64, 64, 256, 16)
    sizes = Sizes.of(call, PagedAttentionConfig(1, 16, 2, 3, 528), tokens_of_tile=1, keys=16)
    splits, _, partials = make_schedule(call, sizes, jnp.arange(65)[None], jnp.full((1, 64), 4096))
    assert (splits == 1).all()
    assert (partials == 0).all()


def test_one_compilation_for_every_mix_of_lengths(monkeypatch):
    monkeypatch.setenv("EJKERNEL_TRITON_INTERPRET", "1")
    calls = [problem(requests=requests, spare_tokens=12 - sum(new for new, _ in requests)) for requests in (
        ((1, 150), (3, 40), (0, 9)), ((12, 12), (0, 0), (0, 150)), ((1, 1), (1, 150), (1, 3))
    )]  # fmt: skip
    call, rows = calls[0][0], max(inputs.key_pages.shape[1] for _, inputs in calls)
    run = jax.jit(lambda inputs: kernel.forward(call, inputs, ALONE))
    with ejkernel.use(target=H200):
        for _, inputs in calls:
            pages = [jnp.pad(pages, ((0, 0), (0, rows - pages.shape[1]), *[(0, 0)] * 3)) for pages in inputs[1:3]]
            inputs = inputs._replace(key_pages=pages[0], value_pages=pages[1])
            shape = ArraySpec.of(pages[0])
            call = dataclasses.replace(call, key_pages=shape, value_pages=shape)
            exact = reference.forward(call, widened(inputs))
            np.testing.assert_allclose(run(inputs).out, exact.out, atol=4e-6)
    assert run._cache_size() == 1


# Machine code and lowering


def shapes_of(tokens, requests, width, page_size, *, dtype="bfloat16", stored=None, size=128, heads=32, key_heads=8, **options):
    """A call of the shapes of serving; no arrays."""

    def make():
        zeros = jnp.zeros
        pages = zeros((16, page_size, key_heads, size), stored or dtype)
        bound = OPERATION.canonicalise(
            zeros((tokens, heads, size), dtype), pages, pages, zeros(requests + 1, jnp.int32), zeros(requests, jnp.int32),
            zeros((requests, width), jnp.int32), **options,
        )  # fmt: skip
        found.append(bound.call)
        return bound.inputs

    found = []
    jax.eval_shape(make)
    return found[0]


MACHINE = {
    "decode": ((64, 64, 256, 16), {}, (80, 90, 100)),
    "decode, long pages": ((1, 1, 2048, 64), {}, (90,)),
    "prefill": ((2080, 33, 256, 16), {}, (80, 90, 100)),
    "prefill, everything": ((2080, 33, 256, 16), {"sliding_window": 512, "logits_soft_cap": 30.0}, (90,)),
    "wide heads": ((2080, 33, 256, 16), {"size": 256}, (90,)),
    "float32": ((64, 64, 256, 16), {"dtype": "float32"}, (80,)),
    "int8": ((64, 64, 256, 16), {"stored": "int8"}, (80,)),
    "e4m3": ((64, 64, 256, 16), {"stored": "float8_e4m3fn"}, (90,)),
}


@pytest.mark.parametrize(
    ("name", "capability_number"), [(name, number) for name, (*_, numbers) in MACHINE.items() for number in numbers]
)
def test_loops_compile_without_spills(triton_cache, name, capability_number):
    arguments, options, _ = MACHINE[name]
    call, target = shapes_of(*arguments, **options), Target("gpu", "", f"{capability_number // 10}.0")
    chosen, recorder = config.heuristic(call, target), testing.Recorder()
    specs = {field: getattr(call, field) for field in PagedAttentionInputs._fields}
    arrays = PagedAttentionInputs(**{k: v and jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in specs.items()})
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, chosen), arrays)
    names = [compilation.kernel.fn.__name__ for compilation in recorder.compilations]
    assert names == ["paged_attention_kernel", "paged_attention_combine_kernel"] * (2 if chosen.decode_block_k else 1)
    for compilation in recorder.compilations:
        compiled = compilation.compile(capability_number)
        found = testing.resources(compiled)
        assert found.spilling == 0, (compilation.kernel.fn.__name__, found)
        if compilation.kernel is kernel.paged_attention_kernel:
            assert "cp.async.cg.shared.global" in compiled.asm["ptx"], (
                "keys are not copied 16 bytes at a time ahead of their use"
            )


def arrays_of(tokens, requests, width, page_size):
    spec = jax.ShapeDtypeStruct
    pages = spec((64, page_size, 8, 128), jnp.bfloat16)
    lengths = (spec((requests + 1,), jnp.int32), spec((requests,), jnp.int32), spec((requests, width), jnp.int32))
    return spec((tokens, 32, 128), jnp.bfloat16), pages, pages, *lengths


@needs_jax_triton
@pytest.mark.parametrize(("tokens", "requests", "calls"), [(4, 4, 2), (64, 4, 4)])
def test_lowers_for_cuda(tokens, requests, calls):
    """Two kernels a pass; requests with one new token have a pass of their own where others have more."""

    def attend(query, key_pages, value_pages, starts, lengths, tables):
        arguments = (query, key_pages, value_pages, lengths, tables, starts)
        return ejkernel.unified_attention(*arguments, platform="triton")

    with ejkernel.use(target=H200):
        traced = jax.jit(attend).trace(*arrays_of(tokens, requests, 256, 16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") == calls
    assert "ejkernel.paged_attention[triton]" in text
    assert text.count("output_operand_aliases = [#stablehlo.output_operand_alias") == calls - 1


@needs_jax_triton
def test_supports_refuses_with_numbers():
    call = shapes_of(64, 64, 256, 16)

    def ask(target=H200, **changes):
        return capability.supports_forward(dataclasses.replace(call, **changes), target)

    def pages(dtype, size=128):
        return ArraySpec((1, 16, 16, 8, size), dtype)

    assert ask() is None
    assert ask(Target("gpu", "", "8.0")) is None
    assert "the target is cpu" in ask(Target("cpu"))
    assert "has 7.5" in ask(Target("gpu", "Tesla T4", "7.5"))
    assert "query is float64" in ask(query=ArraySpec((1, 64, 32, 128), "float64"))
    assert "key_pages is float64" in ask(key_pages=pages("float64"), value_pages=pages("float64"))
    assert "1024 is above 512" in ask(value_pages=pages("bfloat16", 1024))
    assert "a page of 4294967296 elements" in ask(key_pages=ArraySpec((1, 2, 2**22, 8, 128), "int8"))
    e4m3 = {"key_pages": pages("float8_e4m3fn"), "value_pages": pages("float8_e4m3fn")}
    assert ask(**e4m3) is None
    assert "8.9" in ask(Target("gpu", "", "8.0"), **e4m3)


def test_search_space_holds_the_heuristic_and_fits_shared_memory():
    for arguments, options, _ in MACHINE.values():
        call = shapes_of(*arguments, **options)
        for target in (H200, Target("gpu", "", "8.6")):
            space = config.search_space(call, target)
            assert config.heuristic(call, target) in space
            assert len(space) == len(set(space)) <= 60
