"""`paged_attention` on TPU without one: the schedule, numbers under Pallas's TPU interpreter, and lowering for `tpu`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import interpreted

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.paged_attention import cases, reference
from ejkernel.operations.paged_attention.interface import OPERATION, PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_pallas._jax_interpreter import tpu_races
from ejkernel_pallas.tpu._vmem import SMALLEST, memory_of
from ejkernel_pallas.tpu.paged_attention import capability, config, kernel, schedule

V6E = Target("tpu", "TPU v6 lite")
KINDS = ("", "TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x")
MIX = ((1, 21), (9, 11), (1, 3), (17, 30))
"""New tokens and keys: decoding, and chunks of more than one tile of 8."""


def problem(requests, seed=0, options=None, **arrays):
    """Canonical call and arrays; what the cases leave unused holds NaN."""
    made = cases._arrays(requests, **arrays)(np.random.default_rng(seed))
    bound = OPERATION.canonicalise(**{name: jnp.asarray(value) for name, value in made.items()}, **(options or {}))
    return dataclasses.replace(bound.call, save_residuals=True), bound.inputs


def exact(call, inputs):
    return reference.forward(call, widened(inputs))


def check(call, inputs, outputs, tolerance=1e-5):
    wanted = exact(call, inputs)
    np.testing.assert_allclose(np.asarray(outputs.out, np.float64), wanted.out, rtol=1e-6, atol=tolerance)
    np.testing.assert_allclose(np.asarray(outputs.lse), wanted.lse, atol=tolerance)


# The schedule


@pytest.mark.parametrize("tile", [1, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_items_have_every_token_once(seed, tile):
    rng = np.random.default_rng(seed)
    batch, requests, tokens = 2, 5, 64
    counts = rng.integers(0, 13, (batch, requests)) * (rng.random((batch, requests)) < 0.7)
    counts[0, 0] = 1
    starts = np.concatenate([np.zeros((batch, 1), int), np.cumsum(counts, axis=1)], axis=1).astype(np.int32)
    call, _ = problem(((1, 5),) * requests)
    call = dataclasses.replace(call, query=ArraySpec((batch, tokens, 4, 8), "float32"))
    items, count = jax.jit(lambda starts: schedule.make_items(call, starts, tokens, tile))(starts)
    assert int(count) <= items.base.shape[0] == schedule.max_items(batch, tokens, requests, tile)
    owner = np.full((batch, tokens), -1)
    for request, base, low, high in np.stack(items, axis=1)[: int(count)]:
        assert 0 <= low < high <= tile
        assert base >= 0
        assert base + (1 if high - low == 1 else tile) <= tokens
        assert high - low > 1 or low == 0
        own = owner[request // requests, base + low : base + high]
        assert (own == -1).all()
        own[:] = request % requests
    wanted = [np.concatenate([np.repeat(np.arange(requests), row), np.full(tokens - row.sum(), -1)]) for row in counts]
    np.testing.assert_array_equal(owner, wanted)
    request, known = schedule.owned(jnp.asarray(starts), tokens)
    np.testing.assert_array_equal(np.where(known, request, -1), wanted)


# Numbers


@pytest.mark.parametrize(
    ("tiles", "arrays", "options"),
    [
        (
            config.Config(8, 4, 2),
            {"sinks": (4, 2), "alibi": True, "tree": 5, "trees": True, "k_scale": (2,), "v_scale": (2,), "spare_tokens": 3},
            {"sliding_window": 7, "logits_soft_cap": 3.0},
        ),
        (config.Config(8, 2), {"head_size": 160, "heads": 2, "key_heads": 1}, {}),
        (config.Config(16, 2), {"layout": "hptd", "key_heads": 1, "value_size": 5}, {"layout": "hptd"}),
        (
            config.Config(8, 2),
            {"layout": "packed", "stored": "int8", "k_scale": (2,), "v_scale": (), "garbage": 10**6},
            {"layout": "packed"},
        ),
    ],
    ids=["everything", "wide", "heads-first", "packed-int8"],
)
def test_numbers_without_races(tiles, arrays, options):
    """Many steps for every item, and items of both kinds one after the other."""
    call, inputs = problem(MIX, options=options, **arrays)
    with interpreted(detect_races=True):
        outputs = jax.block_until_ready(jax.jit(lambda inputs: kernel.forward(call, inputs, tiles))(inputs))
        assert not tpu_races()
    check(call, inputs, outputs)


def test_one_compilation_for_every_mix_of_lengths():
    """Prompts, chunks, single steps, empty requests and tokens that nobody owns are data; so are pages that are not there."""
    call, inputs = problem(((4, 16),) * 4, sinks=(4,))
    traced, rng = [], np.random.default_rng(1)

    @jax.jit
    def run(inputs):
        traced.append(None)
        return kernel.forward(call, inputs, config.Config(8, 2))

    tables = rng.permutation(call.pages.pages)[:16].reshape(4, 4).astype(np.int32)
    tables = np.concatenate([tables, np.full((4, 1), -1, np.int32)], axis=1)
    pages = jnp.nan_to_num(inputs.key_pages), jnp.nan_to_num(inputs.value_pages)
    inputs = inputs._replace(key_pages=pages[0], value_pages=pages[1])
    mixes = (
        ([4, 4, 4, 4], [16, 5, 4, 9], None),
        ([1, 1, 1, 1], [16, 1, 0, 7], (0, 2)),
        ([0, 13, 0, 1], [16, 16, 0, 1], (1, 1)),
        ([0, 0, 0, 0], [3, 0, 0, 1], None),
    )
    with interpreted():
        for new, lengths, missing in mixes:
            given = tables.copy()
            if missing is not None:
                given[missing] = call.pages.pages
            mixed = inputs._replace(
                query_start_loc=jnp.asarray([np.concatenate([[0], np.cumsum(new)])], jnp.int32),
                kv_lens=jnp.asarray([lengths], jnp.int32),
                block_tables=jnp.asarray(given)[None],
            )
            outputs = run(mixed)
            check(call, mixed, outputs)
            assert (np.asarray(outputs.out)[0, sum(new) :] == 0).all()
            assert np.isneginf(np.asarray(outputs.lse)[0, sum(new) :]).all()
    assert len(traced) == 1 and run._cache_size() == 1


def test_what_is_not_finite_reaches_exactly_the_tokens_that_see_it():
    call, inputs = problem(((6, 8), (1, 5)), heads=2, key_heads=1)
    table = np.asarray(inputs.block_tables)[0]
    places = [(table[0][1], 1), (table[1][0], 2)]  # keys 5 and 2
    with interpreted():
        run = jax.jit(lambda inputs: kernel.forward(call, inputs, config.Config(8, 2)))
        for name, value in (("value_pages", np.nan), ("value_pages", np.inf), ("key_pages", np.nan)):
            pages = getattr(inputs, name)
            for page, place in places:
                pages = pages.at[0, page, place].set(value)
            out = np.asarray(run(inputs._replace(**{name: pages})).out)[0]
            broken = ~np.isfinite(out).reshape(7, -1)
            wanted = np.array([False] * 3 + [True] * 4)  # tokens 0 ... 5 of request 0 are at positions 2 ... 7
            np.testing.assert_array_equal(broken.all(axis=1), wanted)
            np.testing.assert_array_equal(broken.any(axis=1), wanted)
            np.testing.assert_allclose(out[~wanted], exact(call, inputs).out[0][~wanted], atol=1e-5)


def test_bfloat16_is_as_exact_as_its_products():
    call, inputs = problem(MIX, options={"layout": "phtd"}, layout="phtd", sinks=(4,))
    inputs = inputs._replace(
        **{name: getattr(inputs, name).astype(jnp.bfloat16) for name in ("query", "key_pages", "value_pages")}
    )
    wide = dict.fromkeys(("query", "key_pages", "value_pages"), "bfloat16")
    call = dataclasses.replace(
        call, **{name: dataclasses.replace(getattr(call, name), dtype=dtype) for name, dtype in wide.items()}
    )
    with interpreted():
        outputs = jax.jit(lambda inputs: kernel.forward(call, inputs, config.Config(8, 4)))(inputs)
    assert outputs.out.dtype == jnp.bfloat16
    check(call, inputs, outputs, 2e-2)


# The public forms


def ragged(version):
    """Arguments of a public ragged function: three requests in use of four, and what the others hold is no matter."""
    rng, size, key_heads = np.random.default_rng(3), 16, 2
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    starts, lengths = jnp.array([0, 1, 6, 8, 99]), jnp.array([7, 9, 2, 1000])
    tables = jnp.asarray(np.concatenate([rng.permutation(12).reshape(4, 3)[:3], np.full((1, 3), -5)]).astype(np.int32))
    queries = normal(10, 4, size)
    if version == 2:
        function, arrays = ejkernel.ragged_page_attention_v2, (queries, normal(12, 4, 2 * key_heads, size))
        return function, (*arrays, lengths, tables, starts, jnp.array([3])), {"softmax_aux": normal(4)}
    new = normal(10, key_heads, size), normal(10, key_heads, size)
    cache = normal(12, 4, key_heads, 2, 2 * size)
    described = lengths, tables.reshape(-1), starts, jnp.array([1, 1, 3])
    return ejkernel.ragged_page_attention_v3, (queries, *new, cache, *described), {"sliding_window": 4}


@pytest.mark.parametrize("version", [2, 3])
def test_ragged_forms_are_xlas(version):
    function, arrays, options = ragged(version)
    wanted = jax.jit(functools.partial(function, platform="xla", **options))(*arrays)
    with ejkernel.use(target=V6E), interpreted():
        run = jax.jit(functools.partial(function, platform="pallas", **options))
        lowered = run.lower(*arrays).as_text(debug_info=True)
        found = run(*arrays)
    assert "ejkernel.paged_attention[pallas.tpu]" in lowered
    assert ("ejkernel.paged_cache_update[pallas.tpu]" in lowered) == (version == 3)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(("version", "calls"), [(2, 1), (3, 2)])
def test_ragged_forms_lower_for_tpu(version, calls):
    function, arrays, options = ragged(version)
    run = jax.jit(functools.partial(function, platform="pallas", **options))
    with ejkernel.use(target=V6E):
        text = run.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == calls
    assert text.count("output_operand_aliases = [#stablehlo.output_operand_alias") == calls


def test_shard_map_checks_varying_axes():
    """Heads are split over a mesh, and what describes the requests is not."""
    function, arrays, options = ragged(3)
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    none, heads = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "model")
    cache = jax.sharding.PartitionSpec(None, None, "model")
    sharded = jax.shard_map(
        functools.partial(function, platform="pallas", **options),
        mesh=mesh,
        in_specs=(heads, heads, heads, cache, none, none, none, none),
        out_specs=(heads, cache),
    )
    with ejkernel.use(target=V6E):
        text = jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2


# What is refused, and which tiles are taken


def a_call(tokens=64, requests=64, width=256, *, page_size=16, heads=32, key_heads=8, size=128, dtype="bfloat16", **changes):
    specs = {
        "query": ArraySpec((1, tokens, heads, size), dtype),
        "key_pages": ArraySpec((1, 4096, page_size, key_heads, size), dtype),
        "value_pages": ArraySpec((1, 4096, page_size, key_heads, size), dtype),
        "query_start_loc": ArraySpec((1, requests + 1), "int32"),
        "kv_lens": ArraySpec((1, requests), "int32"),
        "block_tables": ArraySpec((1, requests, width), "int32"),
        "softmax_scale": 0.1,
    }
    return PagedAttentionCall(**{**specs, **changes})


def test_supports_refuses_with_numbers():
    def ask(target=V6E, **changes):
        return capability.supports(a_call(**changes), target)

    assert ask() is None
    assert "needs a TPU" in ask(target=Target("gpu", ""))
    assert "query is float16, needs float32 or bfloat16" in ask(dtype="float16")
    assert "softmax_aux is float16" in ask(softmax_aux=ArraySpec((1, 32, 1), "float16"))
    assert "numbers, at most 229376 fit into SMEM" in ask(requests=256, width=1024)
    assert "bytes of VMEM, above 16777216" in ask(target=Target("tpu", "TPU v4"), page_size=4096)
    assert ask(qq_bias=ArraySpec((1, 1, 64, 64), "float32"), tokens=4096) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_config_fits(kind):
    """By the model of VMEM; that the model says enough is for the compiler to show, in `test_tpu_paged_compiled`."""
    target = Target("tpu", kind)
    for page_size in (16, 64, 256):
        for tokens, size, key_heads, dtype in ((64, 128, 8, "bfloat16"), (8192, 256, 8, "float32"), (2048, 64, 32, "bfloat16")):
            call = a_call(tokens, page_size=page_size, size=size, key_heads=key_heads, dtype=dtype)
            if capability.supports(call, target) is not None:
                assert memory_of(target) == SMALLEST
                assert page_size == 256
                continue
            space = config.search_space(call, target)
            assert config.heuristic(call, target) in space
            for chosen in space:
                assert config.vmem_bytes(call, chosen) <= memory_of(target).vmem, chosen
                assert chosen.pages_per_block * page_size % 8 == 0


def test_the_heuristic_follows_the_mix():
    decode, prefill = config.heuristic(a_call(), V6E), config.heuristic(a_call(4096, 4), V6E)
    assert (decode.block_q, decode.pages_per_block, decode.cores) == (1, 32, 1)
    assert prefill.block_q == 128
    assert config.heuristic(a_call(page_size=256), V6E).pages_per_block == 2
    assert config.heuristic(a_call(), Target("tpu", "TPU v5p")).cores == 2


def test_config_names_a_bad_value():
    with pytest.raises(ValueError, match=r"block_q: got 12, expected 1, or a power of two from 8 on"):
        config.Config(12, 1)
    with pytest.raises(ValueError, match=r"pages_per_block: got 0, expected at least 1"):
        config.Config(8, 0)
