"""Latent attention over pages: against dense attention over the latents, one compilation, the cache in place, stored scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import (
    MultiLatentRaggedPageAttention,
    MultiLatentRaggedPageAttentionV2,
    flash_mla,
    multi_latent_ragged_page_attention,
    multi_latent_ragged_page_attention_v2,
)
from ejkernel.utils.tolerance import FORWARD, check_close

HEADS, SIZE, ROTARY, PAGE, PACKING, CHANNELS = 3, 12, 4, 8, 2, 256
REQUESTS, ENTRIES, TOKENS, PAGES = 4, 3, 16, 14


def step(lengths: list[tuple[int, int]], seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Requests `(new, keys)`; the rows behind them are not in use and hold nonsense."""
    rng = np.random.default_rng(seed)
    used = len(lengths)
    starts = np.concatenate([[0], np.cumsum([new for new, _ in lengths]), np.full(REQUESTS - used, 77)])
    tables = rng.permutation(PAGES)[: REQUESTS * ENTRIES]
    cache = np.zeros((PAGES, PAGE, CHANNELS), np.float32)
    cache[..., :SIZE] = rng.standard_normal((PAGES, PAGE, SIZE))
    cache[..., 128 : 128 + ROTARY] = rng.standard_normal((PAGES, PAGE, ROTARY))
    normal = {
        "queries_nope": (TOKENS, HEADS, SIZE),
        "queries_pe": (TOKENS, HEADS, ROTARY),
        "keys_values": (TOKENS, SIZE),
        "keys_pe": (TOKENS, ROTARY),
    }
    return {
        **{name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in normal.items()},
        "kv_cache": jnp.asarray(cache.reshape(PAGES, PAGE // PACKING, PACKING, CHANNELS), dtype),
        "kv_lens": np.array([*(keys for _, keys in lengths), *[10**6] * (REQUESTS - used)], np.int32),
        "block_tables": tables.astype(np.int32),
        "query_start_loc": starts.astype(np.int32),
        "distribution": np.array([0, 0, used], np.int32),
    }


def expected(
    arrays: dict, lengths: list[tuple[int, int]], window: int | None = None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """Out and cache, request by request: write the rows, gather all of the request's, attend with `flash_mla` absorbed by hand."""
    values = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    cache = values["kv_cache"].reshape(PAGES, PAGE, CHANNELS).copy()
    out = np.zeros((TOKENS, HEADS, SIZE))
    for r, (new, keys) in enumerate(lengths):
        table = np.asarray(arrays["block_tables"]).reshape(REQUESTS, ENTRIES)[r]
        start = int(arrays["query_start_loc"][r])
        at = np.arange(keys)
        page, offset = table[at // PAGE], at % PAGE
        fresh = slice(keys - new, keys)
        rows = slice(start, start + new)
        cache[page[fresh], offset[fresh]] = 0
        cache[page[fresh], offset[fresh], :SIZE] = values["keys_values"][rows]
        cache[page[fresh], offset[fresh], 128 : 128 + ROTARY] = values["keys_pe"][rows]
        own = jnp.asarray(cache[page, offset], jnp.float32)[None]
        eye = jnp.eye(SIZE)[:, None]
        found = flash_mla(
            jnp.asarray(values["queries_nope"][rows], jnp.float32)[None],
            own[..., :SIZE],
            eye,
            eye,
            b_q=jnp.asarray(values["queries_pe"][rows], jnp.float32)[None],
            b_k=own[..., 128 : 128 + ROTARY],
            causal=True,
            causal_alignment="bottom_right",
            sliding_window=None if window is None else (window - 1, None),
            **options,
        )
        out[rows] = np.asarray(found[0])
    return out, cache.reshape(arrays["kv_cache"].shape)


MIXES = [[(1, 5), (1, 9), (1, 1)], [(7, 7), (1, 20), (5, 9), (3, 3)], [(0, 4), (16, 24)], [(1, 1)], []]


@pytest.mark.parametrize("function", [multi_latent_ragged_page_attention, multi_latent_ragged_page_attention_v2])
def test_mixed_batches(function):
    for seed, lengths in enumerate(MIXES):
        arrays = step(lengths, seed)
        out, cache = function(*arrays.values(), softmax_scale=0.3, platform="xla")
        wanted, wanted_cache = expected(arrays, lengths, softmax_scale=0.3)
        check_close(f"{lengths}", out, wanted, FORWARD["float32"], 1e-1)
        assert np.array_equal(np.asarray(cache), wanted_cache.astype(np.float32))


@pytest.mark.parametrize(("options", "named"), [({"sliding_window": 3}, {"window": 3}), ({"logits_soft_cap": 0.5},) * 2])
def test_options(options, named):
    lengths = MIXES[1]
    arrays = step(lengths)
    out, _ = multi_latent_ragged_page_attention(*arrays.values(), **options, mask_value=-1.0, platform="xla")
    scale = (SIZE + ROTARY) ** -0.5
    check_close("output", out, expected(arrays, lengths, **named, softmax_scale=scale)[0], FORWARD["float32"])
    plain, _ = multi_latent_ragged_page_attention(*arrays.values(), platform="xla")
    assert np.abs(out - plain).max() > 1e-2


def test_one_compilation_serves_fifty_mixes():
    rng, traces = np.random.default_rng(0), []

    @jax.jit
    def run(*arrays):
        traces.append(None)
        return multi_latent_ragged_page_attention(*arrays, softmax_scale=0.3, platform="xla")

    for seed in range(50):
        lengths, room = [], TOKENS
        for _ in range(rng.integers(0, REQUESTS + 1)):
            new = int(rng.integers(0, min(room, 9) + 1))
            lengths.append((new, int(rng.integers(max(new, 1), ENTRIES * PAGE + 1))))
            room -= new
        arrays = step(lengths, seed)
        out, _ = run(*arrays.values())
        if seed % 10 == 0:
            check_close(f"{lengths}", out, expected(arrays, lengths, softmax_scale=0.3)[0], FORWARD["float32"], 1e-1)
    assert len(traces) == 1 and run._cache_size() == 1


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_the_donated_cache_is_written_in_place(dtype):
    """The program aliases the cache and holds no second one, whatever its size. XLA on CPU has no float8 and widens it to float16,
    cache and all."""
    arrays = step(MIXES[0])
    cache = jax.ShapeDtypeStruct((4096, PAGE // PACKING, PACKING, CHANNELS), dtype)
    names = tuple(arrays)

    def run(cache, others):
        given = {**others, "kv_cache": cache}
        return multi_latent_ragged_page_attention(*(given[name] for name in names), k_scale=0.5, platform="xla")

    others = {name: array for name, array in arrays.items() if name != "kv_cache"}
    compiled = jax.jit(run, donate_argnums=0).lower(cache, others).compile()
    memory, size = compiled.memory_analysis(), cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < (4.1 * size if dtype == "float8_e4m3fn" else size / 8)


@pytest.mark.parametrize(("dtype", "scale", "error"), [("int8", 0.03, 0.02), ("float8_e4m3fn", 0.5, 0.05)])
def test_stored_scales(dtype, scale, error):
    """Rows are stored divided by k_scale; what was stored before counts times it; values share it unless v_scale says otherwise."""
    lengths = MIXES[1]
    arrays = step(lengths)
    stored = arrays["kv_cache"] / scale
    stored = jnp.round(stored).astype(dtype) if dtype == "int8" else stored.astype(dtype)
    args = tuple({**arrays, "kv_cache": stored}.values())
    out, cache = multi_latent_ragged_page_attention(*args, softmax_scale=0.3, k_scale=scale, platform="xla")
    assert cache.dtype == dtype
    wanted, wanted_cache = expected(arrays, lengths, softmax_scale=0.3)
    assert np.abs(np.asarray(out) - wanted).max() < error * np.abs(wanted).max()
    assert np.abs(np.asarray(cache, np.float64) * scale - wanted_cache).max() < error * np.abs(wanted_cache).max()
    doubled, _ = multi_latent_ragged_page_attention(
        *args, softmax_scale=0.15, k_scale=scale, v_scale=2 * scale, q_scale=jnp.float32(2.0), platform="xla"
    )
    check_close("v_scale", doubled, 2 * np.asarray(out, np.float64), FORWARD["float32"])


def test_gradients_reach_queries_rows_and_cache():
    """Central differences along one direction through the update and the attention."""
    arrays = step(MIXES[1])
    moving = ("queries_nope", "queries_pe", "keys_values", "keys_pe", "kv_cache")
    rng = np.random.default_rng(5)
    weights = jnp.asarray(rng.standard_normal((TOKENS, HEADS, SIZE)), jnp.float32)

    @jax.jit
    def loss(values):
        return jnp.vdot(multi_latent_ragged_page_attention(*{**arrays, **values}.values(), platform="xla")[0], weights)

    values = {name: arrays[name] for name in moving}
    gradients = jax.jit(jax.grad(loss))(values)
    for name in moving:
        direction = rng.standard_normal(values[name].shape).astype(np.float32)
        if name == "kv_cache":
            direction[..., SIZE:128] = direction[..., 128 + ROTARY :] = 0
        ends = [loss({**values, name: values[name] + step * direction}) for step in (1e-2, -1e-2)]
        numeric, found = (ends[0] - ends[1]) / 2e-2, jnp.vdot(gradients[name], direction)
        assert found == pytest.approx(float(numeric), rel=2e-2, abs=2e-2), name


def test_inside_the_callers_shard_map():
    """Heads split, everything else whole, without a check of varying axes: as the client calls it."""
    lengths = MIXES[1]
    arrays = step(lengths)
    arrays |= {name: jnp.concatenate([arrays[name]] * 2, axis=1)[:, :4] for name in ("queries_nope", "queries_pe")}
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    heads = P(None, "tp", None)
    specs = tuple(heads if name.startswith("queries") else P() for name in arrays)
    mapped = jax.shard_map(
        lambda *given: multi_latent_ragged_page_attention(*given),
        mesh=mesh,
        in_specs=specs,
        out_specs=(heads, P()),
        check_vma=False,
    )
    out, cache = jax.jit(mapped)(*arrays.values())
    wanted, wanted_cache = multi_latent_ragged_page_attention(*arrays.values())
    check_close("output", out, np.asarray(wanted, np.float64), FORWARD["float32"])
    assert (cache == wanted_cache).all()


def test_class_forms_and_explain():
    arrays = step(MIXES[0])
    one, two = (form()(*arrays.values())[0] for form in (MultiLatentRaggedPageAttention, MultiLatentRaggedPageAttentionV2))
    assert (one == two).all()
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays.values()]
    decision = ejkernel.explain("multi_latent_ragged_page_attention", *specs).forward
    assert (decision.operation, decision.chosen.id) == ("latent_paged_attention", "xla")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache": jnp.zeros((PAGES, 4, 2, 16))}, r"kv_cache: got 16 channels, expected 128 \+ 128: latents of 12"),
        ({"keys_pe": jnp.zeros((3, ROTARY))}, r"keys_pe: got shape \(3, 4\)"),
        ({"keys_values": jnp.zeros((TOKENS, 2, SIZE))}, "keys_values: got shape .* with 3 axes, expected 2 axes"),
        ({"block_tables": jnp.zeros(7, jnp.int32)}, "block_tables: got 7 entries, expected the same number for each of the 4"),
        ({"distribution": jnp.zeros(2, jnp.int32)}, r"distribution: got shape \(2,\)"),
    ],
)
def test_errors(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        multi_latent_ragged_page_attention(*{**step(MIXES[0]), **change}.values())
