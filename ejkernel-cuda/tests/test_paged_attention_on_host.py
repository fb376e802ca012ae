"""`paged_attention` on this host: core's named cases and problems of its own, every page dtype, any number of workers."""

from __future__ import annotations

import dataclasses
from typing import Any

import host_calls
import host_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.paged_attention import cases, reference
from ejkernel.operations.paged_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.testing.problem import fields_refused
from ejkernel.utils.tolerance import FORWARD
from ejkernel_cuda import _library
from ejkernel_cuda._plugin import ejkernel_plugin
from ejkernel_cuda.paged_attention import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
pytestmark = [
    pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing())),
    pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13"),
]


@pytest.fixture(autouse=True)
def calls_answered_here(monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", host_calls.answered)
    monkeypatch.setattr(kernel, "handler", lambda name: name)


def bound(case: Any, dtype: str) -> Any:
    arrays = case.arrays(np.random.default_rng(7))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    return OPERATION.canonicalise(**made, **case.options)


def check(call: Any, inputs: Any, cfg: Any = None, exact: Any = None) -> Any:
    """Against float64, within core's tolerances; the results."""
    call = dataclasses.replace(call, return_lse=True)
    got = kernel.forward(call, inputs, cfg or config.FORWARD.heuristic(call, H200))
    exact = exact or reference.forward(call, widened(inputs))
    tolerance = FORWARD[call.query.dtype]
    for result, wanted, limit in ((got.out, exact.out, tolerance), (got.lse, exact.lse, FORWARD["float32"])):
        result = np.asarray(result, np.float64)
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(wanted))
        sure = np.isfinite(wanted)
        np.testing.assert_array_equal(result[~sure], wanted[~sure])
        difference = np.abs(result[sure] - wanted[sure])
        assert np.linalg.norm(difference) <= limit.norm * np.linalg.norm(wanted[sure])
        assert difference.max(initial=0.0) <= limit.element * np.abs(wanted[sure]).max(initial=0.0)
    return got


def problem(requests: Any, dtype: str = "bfloat16", seed: int = 0, **options: Any) -> Any:
    """A problem whose unused page slots hold NaN if the dtype has one; `options` of the call and of the arrays."""
    named = {
        name: options.pop(name)
        for name in ("softmax_scale", "causal", "sliding_window", "logits_soft_cap", "key_heads_in_use")
        if name in options
    }
    layout = {"layout": options["layout"]} if "layout" in options else {}
    arrays = cases._arrays(requests, **options)(np.random.default_rng(seed))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    if "key_heads_in_use" in named:
        named["key_heads"] = named.pop("key_heads_in_use")
    return OPERATION.canonicalise(**made, **layout, **named)


def refused(call: Any) -> bool:
    return capability.supports_forward(call, H200) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases.CASES if not c.is_benchmark])
def test_cases(case, dtype):
    made = bound(case, dtype)
    unknown = fields_refused(ejkernel_plugin(), "paged_attention", made.call)
    if case.name in ("everything", "alibi", "tree", "chunks-of-pages") or case.name.startswith("prompts"):
        assert unknown or refused(made.call)
        return
    if unknown:
        assert unknown <= {"first_keys", "key_token_scale", "value_token_scale"}
        return
    assert not refused(made.call)
    check(made.call, made.inputs)


@pytest.mark.parametrize("tile_key_heads", [1, 2])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [5, 48, 64, 80, 128])
def test_tile_key_heads(size, stored, tile_key_heads):
    """Also heads that need scalar loads; with sinks and scales per head."""
    own = {"sinks": (8,), "k_scale": (4,), "v_scale": (4,)}
    requests = ((1, 300), (1, 0), (2, 70), (1, 1))
    made = problem(requests, heads=8, key_heads=4, page_size=16, head_size=size, stored=stored, **own)
    check(made.call, made.inputs, config.PagedAttentionConfig(3, 5, tile_key_heads))


@pytest.mark.parametrize(("workers", "stages"), [(1, 2), (2, 8), (3, 2), (7, 4), (50, 3), (200, 2)])
def test_stream_k_with_tile_key_heads(workers, stages):
    """The single request has more partial results per tile than a lane of the combine kernel loads at once."""
    for requests in (LENGTHS, ((1, 2500),)):
        made = problem(requests, heads=8, key_heads=4, page_size=16, head_size=64, stored="float8_e4m3fn")
        check(made.call, made.inputs, config.PagedAttentionConfig(stages, workers, 2))


@pytest.mark.parametrize("group", [1, 8, 9, 17])
@pytest.mark.parametrize("layout", ["pthd", "phtd", "hptd", "interleaved", "packed", "side_by_side"])
def test_layouts_with_tile_key_heads(layout, group):
    size = 96 if group in (1, 8) else 32  # with and without swapped A and B
    options = {"layout": layout, "head_size": size, "page_size": 8, "stored": "int8", "sliding_window": 150}
    made = problem(((1, 270), (2, 9)), heads=4 * group, key_heads=4, **options)
    check(made.call, made.inputs, config.PagedAttentionConfig(3, 5, 2))


LENGTHS = ((1, 300), (1, 64), (1, 0), (1, 1), (1, 129), (0, 40), (1, 65))


def tma_problem(requests: Any = LENGTHS, key_heads: int = 4, **options: Any) -> Any:
    """A problem whose pages TMA can load."""
    usual = {"heads": 4 * key_heads, "page_size": 16, "stored": "float8_e4m3fn"}
    return problem(requests, key_heads=key_heads, head_size=128, **{**usual, **options})


def tma_config(stages: int, workers: int, tile_key_heads: int = 4) -> config.PagedAttentionConfig:
    return config.PagedAttentionConfig(stages, workers, tile_key_heads, tma=True)


@pytest.mark.parametrize("tile_key_heads", [1, 2, 4])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("workers", [1, 3, 7, 50])
def test_tma(workers, stored, tile_key_heads):
    """From one worker with whole tiles to one per step; with sinks and scales per head."""
    own = {"sinks": (16,), "k_scale": (4,), "v_scale": (4,)}
    made = tma_problem(((1, 300), (1, 0), (2, 70), (1, 1), (0, 9), (1, 32)), stored=stored, **own)
    check(made.call, made.inputs, tma_config(3, workers, tile_key_heads))


@pytest.mark.parametrize("tile_key_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 128])
def test_tma_page_sizes(page_size, tile_key_heads):
    """TMA boxes of 8, 16 and 32 tokens; boxes without a visible key are not loaded."""
    for window in (None, 150):
        made = tma_problem(((1, 500), (1, 17), (2, 258)), page_size=page_size, sliding_window=window)
        check(made.call, made.inputs, tma_config(2, 9, tile_key_heads))


@pytest.mark.parametrize("layout", ["pthd", "phtd", "interleaved", "packed", "side_by_side"])
@pytest.mark.parametrize("tile_key_heads", [1, 2, 4])
def test_tma_layouts(tile_key_heads, layout):
    made = tma_problem(((1, 270), (2, 9)), layout=layout, page_size=8)
    if tile_key_heads in config.tma_tile_key_heads(made.call, H200):
        check(made.call, made.inputs, tma_config(3, 5, tile_key_heads))
    else:
        assert layout == "phtd" and tile_key_heads > 1
        with pytest.raises(jax.errors.JaxRuntimeError, match="token strides above head strides"):
            kernel.forward(made.call, made.inputs, tma_config(3, 5, tile_key_heads))


@pytest.mark.parametrize("padded", [3, 16])
def test_tma_padded_heads(padded):
    """Rows that are not aligned to 16 bytes use cp.async."""
    made = tma_problem(((1, 70), (1, 9)), layout="interleaved", padded_heads=1, padded_size=padded, key_heads_in_use=4)
    chosen = config.FORWARD.heuristic(made.call, H200)
    assert chosen.tma == (padded == 16)
    check(made.call, made.inputs, chosen)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("key_heads", "tile_key_heads"), [(1, 1), (3, 1), (6, 2), (8, 4)])
def test_tma_group_sizes(key_heads, tile_key_heads, group):
    made = tma_problem(((1, 330), (1, 20)), key_heads, heads=group * key_heads, sinks=(group * key_heads, 2))
    check(made.call, made.inputs, tma_config(3, 4, tile_key_heads))


@pytest.mark.parametrize("stages", config.STAGES)
@pytest.mark.parametrize("workers", [2, 12])
def test_tma_stages(workers, stages):
    made = tma_problem(((1, 700), *LENGTHS))
    check(made.call, made.inputs, tma_config(stages, workers))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 63, 64, 65, 1000])
def test_tma_windows(window, causal):
    made = tma_problem(((1, 300), (3, 66), (3, 3), (2, 1)), sliding_window=window, causal=causal)
    check(made.call, made.inputs, tma_config(3, 4))


def test_tma_pages_outside_the_cache():
    made = tma_problem(((1, 80), (1, 40)), page_size=8)
    tables = np.asarray(made.inputs.block_tables).copy()
    tables[0, 0, 2], tables[0, 0, 5], tables[0, 1, :5] = -1, 10**6, 10**9
    got = check(made.call, made.inputs._replace(block_tables=jnp.asarray(tables)), tma_config(2, 3))
    assert not np.asarray(got.out[0, 1]).any()


@pytest.mark.parametrize("scale", [3000.0, -2.0, 0.0])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_tma_extreme_logits(cap, scale):
    made = tma_problem(((1, 200), (1, 70)), softmax_scale=scale, logits_soft_cap=cap)
    check(made.call, made.inputs, tma_config(2, 5))


def test_tma_batch():
    """Members with pages, lengths and tables of their own, as `vmap` folds them."""
    made = [tma_problem(((1, 300), (1, 30), (2, 71)), seed=seed, k_scale=(4,)) for seed in (1, 2)]
    one = [reference.forward(dataclasses.replace(each.call, return_lse=True), widened(each.inputs)) for each in made]
    inputs = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *(each.inputs for each in made))

    def folded(spec: ArraySpec) -> ArraySpec:
        return dataclasses.replace(spec, shape=(2, *spec.shape[1:]))

    specs = {name: value for name, value in vars(made[0].call).items() if isinstance(value, ArraySpec)}
    call = dataclasses.replace(made[0].call, **{name: folded(spec) for name, spec in specs.items()})
    exact = jax.tree.map(lambda *arrays: np.concatenate(arrays), *one)
    check(call, inputs, tma_config(3, 7), exact)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_tma_every_byte(stored):
    """All 256 of a type, as keys and as values, in every channel: each query looks at one key."""
    numbers = np.arange(256, dtype=np.uint8).reshape(2, 128).view(jnp.dtype(stored))
    pages = jnp.asarray(np.stack([np.roll(numbers, shift, axis=1) for shift in range(0, 128, 16)]).reshape(16, 1, 1, 128))
    pages = jnp.concatenate([pages, jnp.zeros((16, 7, 1, 128), stored)], axis=1)
    described = (jnp.arange(17), jnp.ones(16, jnp.int32), jnp.arange(16)[:, None])
    query = jnp.broadcast_to(jnp.eye(128, dtype=jnp.bfloat16)[::16], (16, 8, 128))
    made = OPERATION.canonicalise(query, pages, pages, *described, softmax_scale=1.0)
    got = kernel.forward(dataclasses.replace(made.call, return_lse=True), made.inputs, tma_config(2, 5, 1))
    held = np.asarray(pages[:, 0, 0], np.float32)
    clean = np.isfinite(held).all(-1)
    np.testing.assert_array_equal(np.asarray(got.out, np.float32)[0][clean], np.repeat(held[clean][:, None], 8, 1))
    np.testing.assert_allclose(np.asarray(got.lse)[0][clean], held[clean][:, ::16], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 16, 50, 200])
def test_stream_k_workers(workers):
    """From one worker to more workers than steps; results differ by rounding only."""
    made = problem(LENGTHS, sinks=(4,), page_size=16, head_size=64)
    check(made.call, made.inputs, config.PagedAttentionConfig(3, workers))


@pytest.mark.parametrize("tile_key_heads", [1, 2])
@pytest.mark.parametrize("workers", [2, 7, 50, 200])
def test_partial_results_per_warp(workers, tile_key_heads):
    """With swapped A and B, each warp writes its own partial result of a split tile."""
    for requests in (LENGTHS, ((1, 2500),)):
        made = problem(requests, heads=12, key_heads=4, page_size=16, head_size=96, sinks=(12,), stored="float8_e4m3fn")
        check(made.call, made.inputs, config.PagedAttentionConfig(3, workers, tile_key_heads))


@pytest.mark.parametrize("stored", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("workers", [2, 7, 50])
def test_logits_far_below_zero(workers, stored):
    """A lane without a partial result adds weight 0, not that of a logit of 0."""
    made = problem(((1, 300), (1, 5), (1, 2500)), page_size=16, head_size=128, softmax_scale=20.0, stored=stored)
    pages = made.inputs.key_pages
    far = made.inputs._replace(
        query=-jnp.abs(made.inputs.query), key_pages=jnp.abs(pages.astype(jnp.float32)).astype(pages.dtype)
    )
    got = check(made.call, far, config.PagedAttentionConfig(3, workers))
    assert np.asarray(got.lse).max() < -500


@pytest.mark.parametrize("workers", [3, 100, 250])
def test_more_requests_than_a_warp_has_lanes(workers):
    """The combine kernel then finds split tiles in the workers' records; with fewer requests it computes them."""
    made = problem([(1, 1 + 37 * i % 300) for i in range(40)], page_size=16, head_size=64)
    check(made.call, made.inputs, config.PagedAttentionConfig(2, workers))


@pytest.mark.parametrize("stages", config.STAGES)
def test_stages(stages):
    made = problem(LENGTHS, page_size=16, head_size=64)
    check(made.call, made.inputs, config.PagedAttentionConfig(stages, 3))


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        *((None, size) for size in (128, 192, 256)),
        *((stored, size) for stored in ("int8", "float8_e4m3fn", "float8_e5m2") for size in (48, 64, 80, 128, 256)),
    ],
)
def test_types_of_pages_and_sizes_of_heads(stored, size):
    scales = {"k_scale": (2,), "v_scale": ()} if stored else {}
    made = problem(((1, 600), (1, 3), (2, 70)), page_size=16, head_size=size, stored=stored, **scales)
    check(made.call, made.inputs, config.PagedAttentionConfig(2, 5))


@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100, 128, 256])
def test_pages_of_any_size(page_size, stored):
    """Steps of bytes are twice as long, and begin within a block where a window does."""
    made = problem(((1, 500), (1, 17), (2, 258)), page_size=page_size, head_size=16, sliding_window=150, stored=stored)
    check(made.call, made.inputs, config.PagedAttentionConfig(4, 9))


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 1), (8, 1), (9, 1), (16, 1), (17, 1), (40, 2), (7, 7)])
@pytest.mark.parametrize("stored", [None, "float8_e5m2"])
def test_groups_of_any_size(heads, key_heads, stored):
    """Also of 8, which leave half of a tile empty, and of 9."""
    scales = {"sinks": (heads, 2), "k_scale": (key_heads,)}
    made = problem(((1, 330), (1, 20)), heads=heads, key_heads=key_heads, page_size=16, stored=stored, **scales)
    check(made.call, made.inputs, config.PagedAttentionConfig(2, 5))


@pytest.mark.parametrize("stored", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["pthd", "phtd", "hptd", "interleaved", "packed", "side_by_side"])
@pytest.mark.parametrize("size", [5, 32])
def test_layouts(layout, size, stored):
    """Of heads that accesses of 16 bytes fit, and of others."""
    made = problem(((1, 270), (2, 9)), layout=layout, head_size=size, page_size=8, stored=stored)
    check(made.call, made.inputs)


@pytest.mark.parametrize("size", [(24, 8), (8, 24), (64, 200)])
def test_values_of_another_size(size):
    made = problem(((1, 70), (2, 9)), head_size=size[0], value_size=size[1], page_size=8)
    check(made.call, made.inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "stored"), [*((window, None) for window in (1, 2, 63, 64, 65, 1000, 2**40)), (1, "int8"), (129, "int8")]
)
def test_windows(window, stored, causal):
    requests = (1, 300), (3, 66), (3, 3), (2, 1)
    made = problem(requests, page_size=16, sliding_window=window, causal=causal, stored=stored)
    check(made.call, made.inputs, config.PagedAttentionConfig(3, 4))


def test_new_tokens_of_one_request_alone():
    """A request may own all tokens, another none: lengths are data."""
    made = problem(((8, 90), (0, 5)), page_size=16)
    assert not refused(made.call)
    check(made.call, made.inputs, config.PagedAttentionConfig(2, 6))


def test_pages_that_are_not_in_the_cache_are_not_seen():
    made = problem(((1, 80), (1, 40)), page_size=8)
    tables = np.asarray(made.inputs.block_tables).copy()
    tables[0, 0, 2], tables[0, 0, 5], tables[0, 1, :5] = -1, 10**6, 10**9
    inputs = made.inputs._replace(block_tables=jnp.asarray(tables))
    got = check(made.call, inputs, config.PagedAttentionConfig(2, 3))
    assert not np.asarray(got.out[0, 1]).any()
    assert np.isneginf(np.asarray(got.lse[0, 1])).all()


def test_extreme_logits():
    made = problem(((1, 200), (1, 70)), page_size=16, softmax_scale=3000.0)
    check(made.call, made.inputs, config.PagedAttentionConfig(2, 5))
    capped = dataclasses.replace(made.call, logits_soft_cap=30.0)
    check(capped, made.inputs, config.PagedAttentionConfig(2, 5))
    for scale in (0.0, -2.0):
        check(dataclasses.replace(made.call, softmax_scale=scale), made.inputs, config.PagedAttentionConfig(2, 5))


def test_a_visible_nan_shows_in_its_head_alone():
    made = problem(((1, 70), (1, 40)), page_size=8)
    pages = np.asarray(made.inputs.value_pages, np.float32).copy()
    pages[0, int(made.inputs.block_tables[0, 0, 4]), 3, 1] = np.nan
    inputs = made.inputs._replace(value_pages=jnp.asarray(pages, jnp.bfloat16))
    got = kernel.forward(made.call, inputs, config.PagedAttentionConfig(2, 5))
    found = np.isnan(np.asarray(got.out, np.float32)).all(-1)[0]
    np.testing.assert_array_equal(found, [[False, False, True, True], [False] * 4])


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_byte(stored):
    """All 256 of a type, as values of one key each."""
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16)
    numbers = bits.view(jnp.dtype(stored))
    values = jnp.asarray(numbers.reshape(16, 1, 1, 16))
    keys = jnp.zeros((16, 1, 1, 16), stored)
    described = (jnp.arange(17), jnp.ones(16, jnp.int32), jnp.arange(16)[:, None])
    made = OPERATION.canonicalise(jnp.ones((16, 1, 16), jnp.bfloat16), keys, values, *described)
    got = kernel.forward(made.call, made.inputs, config.PagedAttentionConfig(2, 5)).out
    np.testing.assert_array_equal(np.asarray(got, np.float32).reshape(16, 16), np.asarray(numbers, np.float32))


@pytest.mark.parametrize("power", [-120, -90, 0, 90])
@pytest.mark.parametrize("stored", ["int8", "float8_e5m2"])
def test_queries_beyond_float16_with_one_byte_pages(stored, power):
    """Products of bytes are of float16, which holds no such queries of bfloat16 as they are; rows differ in size, too."""
    made = problem(((1, 70), (1, 9)), page_size=8, stored=stored, softmax_scale=2.0 ** min(-power, 99) * 0.1, k_scale=(2,))
    factors = jnp.asarray([1.0, 2.0**-6, 2.0**3, 0.0], jnp.bfloat16)[None, None, :, None] * jnp.asarray(
        2.0**power, jnp.bfloat16
    )
    check(made.call, made.inputs._replace(query=made.inputs.query * factors), config.PagedAttentionConfig(2, 5))


def test_nonfinite_query_with_one_byte_pages():
    """An infinity among large numbers: as in the reference, there is no number to give, and other rows do not see it."""
    made = problem(((1, 20), (1, 9)), page_size=8, stored="int8")
    query = np.asarray(made.inputs.query, np.float32) * 2.0**60
    query[0, 0, 1, 3], query[0, 1, 2, 5] = np.inf, np.nan
    inputs = made.inputs._replace(query=jnp.asarray(query, jnp.bfloat16))
    call = dataclasses.replace(made.call, softmax_scale=2.0**-60)
    found = np.isnan(np.asarray(kernel.forward(call, inputs, config.PagedAttentionConfig(2, 5)).out, np.float32))
    np.testing.assert_array_equal(found.all(-1)[0], [[False, True, False, False], [False, False, True, False]])
    np.testing.assert_array_equal(found.any(-1), found.all(-1))


@pytest.mark.parametrize("room", [16, 65, 129])
def test_keys_of_every_byte(room):
    """Products with a unit query of each channel give back what a key holds there, in kernels for wide heads, too."""
    for stored in ("float8_e4m3fn", "float8_e5m2", "int8"):
        numbers = np.arange(256, dtype=np.uint8).reshape(16, 16).view(jnp.dtype(stored))
        keys = jnp.asarray(np.repeat(numbers[:, None, None], 1, 1))
        described = (jnp.arange(17), jnp.ones(16, jnp.int32), jnp.arange(16)[:, None])
        query = jnp.broadcast_to(jnp.eye(16, dtype=jnp.bfloat16), (16, 16, 16))
        values = jnp.zeros((16, 1, 1, room), stored)
        made = OPERATION.canonicalise(query, keys, values, *described, softmax_scale=1.0, return_lse=True)
        lse = np.asarray(kernel.forward(made.call, made.inputs, config.PagedAttentionConfig(2, 5)).lse[0])
        wanted = np.asarray(numbers, np.float32)
        for key, row in enumerate(wanted):  # a NaN reaches every product of its key
            np.testing.assert_allclose(lse[key], np.full(16, np.nan) if not np.isfinite(row).all() else row, rtol=1e-6)


def test_batch_members_have_their_own_requests():
    made = problem(((1, 70), (2, 9)), page_size=8, sinks=(4,), k_scale=(2,))
    inputs = made.inputs
    two = inputs._replace(
        query=jnp.concatenate([inputs.query, inputs.query[:, ::-1]]),
        key_pages=jnp.concatenate([inputs.key_pages, inputs.key_pages[:, ::-1]]),
        kv_lens=jnp.stack([inputs.kv_lens[0], inputs.kv_lens[0] - 3]),
        softmax_aux=jnp.concatenate([inputs.softmax_aux, inputs.softmax_aux + 1]),
        key_scale=jnp.concatenate([inputs.key_scale, 2 * inputs.key_scale]),
    )
    # Reversed pages need reversed tables.
    tables = jnp.concatenate([inputs.block_tables, inputs.key_pages.shape[1] - 1 - inputs.block_tables])
    values = jnp.concatenate([inputs.value_pages, inputs.value_pages[:, ::-1]])
    for both in (two._replace(block_tables=tables, value_pages=values),):
        specs = {name: ArraySpec.of(value) for name, value in both._asdict().items() if value is not None}
        check(dataclasses.replace(made.call, **specs), both, config.PagedAttentionConfig(2, 5))


def test_the_same_bits_every_time():
    made = problem(LENGTHS, page_size=16, head_size=64)
    runs = [kernel.forward(made.call, made.inputs, config.PagedAttentionConfig(3, 7)).out for _ in range(2)]
    np.testing.assert_array_equal(*(np.asarray(run).view(np.uint16) for run in runs))


@pytest.mark.parametrize("empty", ["tokens", "requests", "table", "pages"])
def test_nothing_to_read(empty):
    requests = 0 if empty == "requests" else 2
    query = jnp.ones((0 if empty == "tokens" else requests, 4, 8), jnp.bfloat16)
    pages = jnp.ones((0 if empty == "pages" else 3, 4, 2, 8), jnp.bfloat16)
    described = (
        jnp.minimum(jnp.arange(requests + 1), len(query)),
        jnp.full(requests, 3, jnp.int32),
        jnp.zeros((requests, 0 if empty == "table" else 1), jnp.int32),
    )
    made = OPERATION.canonicalise(query, pages, pages, *described, jnp.ones(4, jnp.bfloat16))
    got = kernel.forward(dataclasses.replace(made.call, return_lse=True), made.inputs, config.PagedAttentionConfig(2, 5))
    assert got.out.shape == (1, len(query), 4, 8)
    assert not np.asarray(got.out).any()
    np.testing.assert_allclose(np.asarray(got.lse), np.ones((1, len(query), 4)))


@pytest.mark.parametrize("field", sorted(set(cases.TOGGLES) - {"precision", "return_lse"}))
def test_no_field_is_ignored(field):
    """Changing one changes the result, or the call is refused. Products of two bytes are exact at every precision."""
    toggle = cases.TOGGLES[field]
    base = next(case for case in cases.CASES if case.name == toggle.case)

    def arrays(rng: np.random.Generator) -> dict[str, Any]:
        return {name: value for name, value in base.arrays(rng).items() if name != toggle.drop}

    changed = dataclasses.replace(base, arrays=arrays, options={**base.options, **toggle.options})
    both = [bound(case, "bfloat16") for case in (base, changed)]
    if any(refused(made.call) for made in both):
        assert field in ("alibi_slopes", "qq_bias")
        return
    first, second = (np.asarray(check(made.call, made.inputs).out, np.float32) for made in both)
    assert first.shape != second.shape or not np.array_equal(first, second)


def test_starts_that_do_not_ascend_write_nowhere_else():
    """Their results mean nothing, but guards stay whole and the kernels end."""
    made = problem(((2, 90), (1, 30), (1, 40)), page_size=8)
    for starts in ([0, 4, 1, 4], [3, 0, 9, -5], [-(2**31), 2**31 - 1, -1, 2]):
        inputs = made.inputs._replace(query_start_loc=jnp.asarray([starts], jnp.int32))
        assert kernel.forward(made.call, inputs, config.PagedAttentionConfig(2, 5)).out.shape == made.call.query.shape
