"""`paged_cache_update` on XLA and the functions that write: in place where donated, nothing but the new slots changed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

PAGES, PAGE, KEY_HEADS, SIZE, TOKENS, REQUESTS, ENTRIES = 150, 16, 2, 128, 8, 4, 8


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


NEW = spec(TOKENS, KEY_HEADS, SIZE)
DESCRIBED = (spec(REQUESTS, dtype="int32"), spec(REQUESTS, ENTRIES, dtype="int32"), spec(REQUESTS + 1, dtype="int32"))


def check_in_place(function: Any, cache_of: Any, caches: int, *more: jax.ShapeDtypeStruct) -> None:
    """With its first arguments donated, the program aliases them, copies no array of their size, and needs no more memory for
    more pages."""
    temporary = []
    for pages in (PAGES, 3 * PAGES):
        cache = cache_of(pages)
        donated = tuple(range(caches))
        compiled = jax.jit(function, donate_argnums=donated).lower(*[cache] * caches, *more).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert "input_output_alias" in text
        assert memory.alias_size_in_bytes == caches * cache.size * cache.dtype.itemsize
        moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose|convert|pad|concatenate)\(", text)
        assert moved
        assert cache.size not in {int(np.prod([int(n) for n in shape.split(",") if n])) for shape in moved}
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["pthd", "phtd", "hptd"])
def test_donated_caches_are_written_in_place(layout: str, dtype: str):
    def cache(pages: int) -> jax.ShapeDtypeStruct:
        shape = {"p": pages, "t": PAGE, "h": KEY_HEADS, "d": SIZE}
        return spec(*(shape[axis] for axis in layout), dtype=dtype)

    def update(key_cache: Any, value_cache: Any, keys: Any, values: Any, *described: Any) -> Any:
        return ejkernel.paged_cache_update(keys, values, key_cache, value_cache, *described, k_scale=0.5, layout=layout)

    check_in_place(update, cache, 2, NEW, NEW, *DESCRIBED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_continuous_batching_writes_in_place(dtype: str):
    def step(key_cache: Any, value_cache: Any, queries: Any, keys: Any, values: Any, *described: Any) -> Any:
        return ejkernel.chunked_prefill_paged_decode(queries, keys, values, key_cache, value_cache, *described)

    def cache(pages: int) -> jax.ShapeDtypeStruct:
        return spec(pages, PAGE, KEY_HEADS, SIZE, dtype=dtype)

    check_in_place(step, cache, 2, spec(TOKENS, 4, SIZE), NEW, NEW, *DESCRIBED)


@pytest.mark.parametrize(("dtype", "packing"), [("float32", 1), ("bfloat16", 2), ("int8", 4)])
def test_the_packed_cache_is_written_in_place(dtype: str, packing: int):
    lens, _, starts = DESCRIBED
    described = (lens, spec(REQUESTS * ENTRIES, dtype="int32"), starts, spec(3, dtype="int32"))

    def step(kv_cache: Any, queries: Any, keys: Any, values: Any, *described: Any) -> Any:
        return ejkernel.ragged_page_attention_v3(queries, keys, values, kv_cache, *described)

    def cache(pages: int) -> jax.ShapeDtypeStruct:
        return spec(pages, PAGE, 2 * KEY_HEADS // packing, packing, SIZE, dtype=dtype)

    check_in_place(step, cache, 1, spec(TOKENS, 4, SIZE), NEW, NEW, *described)


def small(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "keys": array(4, 2, 3),
        "values": array(4, 2, 3),
        "key_cache": array(5, 2, 2, 3),
        "value_cache": array(5, 2, 2, 3),
        "kv_lens": jnp.array([3, 4]),
        "block_tables": jnp.array([[4, 1], [0, 2]]),
        "query_start_loc": jnp.array([0, 1, 3]),
    }


def test_slots_out_of_range_are_dropped_and_nothing_else_changes():
    """Token 0 belongs to position 2 of pages (4, 1); the page of tokens 1 and 2 is missing; token 3 belongs to nobody."""
    arrays = small()
    tables = jnp.array([[4, 1], [0, 99]])
    keys, values = ejkernel.paged_cache_update(**{**arrays, "block_tables": tables})
    expected = arrays["key_cache"].at[1, 0].set(arrays["keys"][0])
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, arrays["value_cache"].at[1, 0].set(arrays["values"][0]))


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_one_byte_pages_round_to_nearest_and_saturate(dtype: str, largest: float):
    arrays = small()
    pages = {name: jnp.zeros((5, 2, 2, 3), dtype) for name in ("key_cache", "value_cache")}
    values = arrays["values"].at[0].set(jnp.array([[1e6, 1.0, 0.25], [3.0, 2.5, -0.5]]))
    scale = jnp.array([1.0, 0.5])
    _, stored = ejkernel.paged_cache_update(**{**arrays, **pages, "values": values}, k_scale=1.0, v_scale=scale)
    exact = {"int8": [[127, 1, 0], [6, 5, -1]]}.get(dtype, [[largest, 1, 0.25], [6, 5, -1]])
    np.testing.assert_array_equal(np.asarray(stored[1, 0], np.float32), exact)


def test_int8_cache_reads_back_within_half_a_step():
    arrays = small()
    pages = {name: jnp.zeros((5, 2, 2, 3), jnp.int8) for name in ("key_cache", "value_cache")}
    scale = float(jnp.max(jnp.abs(arrays["values"]))) / 127
    queries = jnp.zeros((4, 2, 3))
    described = {name: arrays[name] for name in ("kv_lens", "block_tables", "query_start_loc")}
    described["kv_lens"] = jnp.array([1, 2])
    out, *_ = ejkernel.chunked_prefill_paged_decode(
        queries, arrays["keys"], arrays["values"], *pages.values(), **described, k_scale=scale, v_scale=scale
    )
    expected = jnp.stack([arrays["values"][0], arrays["values"][1], arrays["values"][1:3].mean(0), jnp.zeros((2, 3))])
    assert 0 < float(jnp.max(jnp.abs(out - expected))) <= scale / 2


def test_gradients_pass_to_what_was_written_and_to_what_was_kept():
    arrays = small()
    weights = jnp.asarray(np.random.default_rng(5).standard_normal((5, 2, 2, 3)), jnp.float32)

    def loss(keys: Any, cache: Any) -> Any:
        return jnp.sum(weights * ejkernel.paged_cache_update(**{**arrays, "keys": keys, "key_cache": cache})[0])

    d_keys, d_cache = jax.grad(loss, argnums=(0, 1))(arrays["keys"], arrays["key_cache"])
    slots = [(1, 0), (2, 0), (2, 1)]
    np.testing.assert_array_equal(d_keys, jnp.stack([*(weights[slot] for slot in slots), jnp.zeros((2, 3))]))
    for slot in slots:
        weights = weights.at[slot].set(0)
    np.testing.assert_array_equal(d_cache, weights)
