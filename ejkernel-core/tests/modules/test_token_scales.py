"""Caches in which each stored row of a key head has a scale of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import ejkernel
from ejkernel.operations.paged_attention.cases import cache_of

ORDERS = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (2, 0, 1, 3)}
DTYPES = {"int8": 1 / 254, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
"""dtype -> the largest error of a stored row, as a share of its largest magnitude."""
REQUESTS = ((3, 3), (2, 2), (1, 1))
DESCRIBED, USED = cache_of(np.random.default_rng(0), REQUESTS, page_size=2)
DESCRIBED = {name: jnp.asarray(array) for name, array in DESCRIBED.items()}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def new_rows() -> tuple[jax.Array, jax.Array]:
    """Rows whose magnitudes differ by up to a million: one scale for all of them would lose the small ones."""
    sizes = 10.0 ** jnp.arange(-3.0, 3.0)
    return normal(6, 2, 8) * sizes[:, None, None], normal(6, 2, 4, seed=1) * sizes[::-1, None, None]


def written(dtype: str, layout: str) -> Any:
    keys, values = new_rows()
    caches = (jnp.full((*USED.shape, 2, size), 7, dtype).transpose(ORDERS[layout]) for size in (8, 4))
    scales = {name: jnp.full((*USED.shape, 2), jnp.nan) for name in ("k_scale_cache", "v_scale_cache")}
    return ejkernel.paged_cache_update(keys, values, *caches, **DESCRIBED, **scales, layout=layout)


def stored(cache: Any, scales: Any, layout: str) -> Any:
    """The rows of the cache in the order of the tokens, multiplied by their scales."""
    rows = cache.transpose(np.argsort(ORDERS[layout])).astype(jnp.float32) * scales[..., None]
    tables, places = DESCRIBED["block_tables"], []
    for request, (count, _) in enumerate(REQUESTS):
        places += [(tables[request, token // 2], token % 2) for token in range(count)]
    return jnp.stack([rows[place] for place in places])


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_stored_with_their_scales(dtype, layout):
    key_cache, value_cache, k_scale, v_scale = written(dtype, layout)
    assert (key_cache.dtype, value_cache.dtype) == (dtype, dtype)
    for rows, cache, scales in zip(new_rows(), (key_cache, value_cache), (k_scale, v_scale), strict=True):
        largest = jnp.abs(rows).max(axis=-1, keepdims=True)
        assert (jnp.abs(stored(cache, scales, layout) - rows) <= largest * DTYPES[dtype] * 1.01).all()
        assert (jnp.isnan(scales) == ~jnp.asarray(USED)[..., None]).all()  # what no token owns is not touched
    untouched = key_cache.transpose(np.argsort(ORDERS[layout]))[~USED]
    assert (untouched.astype(jnp.float32) == 7).all()


def test_rows_of_zeros_have_a_scale_that_is_no_zero():
    rows = jnp.zeros((6, 2, 8))
    cache, scales = jnp.full((*USED.shape, 2, 8), 7, jnp.int8), jnp.zeros((*USED.shape, 2))
    key_cache, _, k_scale, _ = ejkernel.paged_cache_update(
        rows, rows, cache, cache, **DESCRIBED, k_scale_cache=scales, v_scale_cache=scales
    )
    assert (k_scale[USED] == 1).all()
    assert (key_cache[USED] == 0).all()


@pytest.mark.parametrize("layout", ORDERS)
def test_attention_reads_what_was_written(layout):
    key_cache, value_cache, k_scale, v_scale = written("int8", layout)
    query = normal(6, 4, 8, seed=3)
    found = ejkernel.unified_attention(
        query, key_cache, value_cache, **DESCRIBED, k_scale=k_scale, v_scale=v_scale, layout=layout
    )
    key, value = (
        jnp.where(USED[..., None, None], cache.transpose(np.argsort(ORDERS[layout])).astype(jnp.float32) * scales[..., None], 0)
        for cache, scales in ((key_cache, k_scale), (value_cache, v_scale))
    )
    wanted = ejkernel.unified_attention(query, key, value, **DESCRIBED)
    assert jnp.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("kind", ["rows", "heads", "whole"])
@pytest.mark.parametrize("layout", ORDERS)
def test_scales_are_split_over_a_mesh_as_their_cache(layout, kind):
    key_cache, value_cache, *scales = written("int8", layout)
    given = {"rows": scales, "heads": [jnp.array([0.01, 0.02])] * 2, "whole": [0.01, 0.02]}[kind]
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    heads, cache = PartitionSpec(None, "tp"), PartitionSpec(*("tp" if axis == 2 else None for axis in ORDERS[layout]))
    over = {"mesh": mesh, "in_specs": (heads, cache, cache, None, None, None), "out_specs": heads}

    def run(**over: Any) -> Any:
        described = {**DESCRIBED, "k_scale": given[0], "v_scale": given[1]}
        return ejkernel.unified_attention(normal(6, 4, 8, seed=3), key_cache, value_cache, **described, layout=layout, **over)

    assert jnp.allclose(run(**over), run(), atol=1e-5)


ROWS = jnp.asarray(np.random.default_rng(5).integers(-127, 128, (2, 12, 2, 8)), jnp.int8)
ROW_SCALES = jnp.asarray(np.random.default_rng(6).uniform(0.01, 0.03, (2, 12, 2)), jnp.float32)
DEQUANTISED = ROWS.astype(jnp.float32) * ROW_SCALES[..., None]


def test_a_dense_cache():
    query, bounds = normal(2, 4, 8), (jnp.array([1, 3]), jnp.array([12, 7]))
    found = ejkernel.ragged_decode_attention(query, ROWS, ROWS, *bounds, k_scale=ROW_SCALES, v_scale=ROW_SCALES)
    assert jnp.allclose(found, ejkernel.ragged_decode_attention(query, DEQUANTISED, DEQUANTISED, *bounds), atol=1e-5)
    whole = ejkernel.ragged_decode_attention(query, ROWS, ROWS, *bounds, k_scale=0.02, v_scale=jnp.array([0.01, 0.03]))
    factors = jnp.array([0.01, 0.03])[None, None, :, None]
    floats = ROWS.astype(jnp.float32)
    assert jnp.allclose(whole, ejkernel.ragged_decode_attention(query, floats * 0.02, floats * factors, *bounds), atol=1e-5)


def test_a_flat_buffer():
    query, tables, lengths = normal(2, 4, 8), jnp.array([[0, 1, 2], [5, 3, 4]]), jnp.array([5, 6])
    scales = {"k_scale": ROW_SCALES[0], "v_scale": ROW_SCALES[0]}
    found = ejkernel.decode_attention(query, ROWS[0], ROWS[0], tables, lengths, page_size=2, **scales)
    wanted = ejkernel.decode_attention(query, DEQUANTISED[0], DEQUANTISED[0], tables, lengths, page_size=2)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.allclose(one, other, atol=1e-5)


def test_other_platforms_are_refused_with_the_field():
    key_cache, value_cache, k_scale, _ = written("int8", "pthd")
    given = {**DESCRIBED, "k_scale": k_scale}
    with ejkernel.use(target="gpu:9.0"):
        described = ejkernel.explain("unified_attention", normal(6, 4, 8), key_cache, value_cache, **given)
    assert described.forward.chosen.platform == "xla"
    assert "key_token_scale" in str(described)


WRONG = {
    "one of the two": ({"k_scale_cache": jnp.zeros((*USED.shape, 2))}, ValueError, "^v_scale_cache: got None"),
    "another shape": (
        dict.fromkeys(("k_scale_cache", "v_scale_cache"), jnp.zeros((3, 2))),
        ValueError,
        "^k_scale_cache: got shape",
    ),
    "two kinds of scales": (
        {**dict.fromkeys(("k_scale_cache", "v_scale_cache"), jnp.zeros((*USED.shape, 2))), "k_scale": 1.0},
        ValueError,
        "^k_scale: got a scale, expected None beside k_scale_cache",
    ),
    "scales that would be written": (
        {"k_scale": jnp.zeros((*USED.shape, 2))},
        ValueError,
        "^k_scale: got shape .*k_scale_cache=",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), WRONG.values(), ids=WRONG)
def test_scales_that_do_not_fit(given, error, message):
    rows, cache = normal(6, 2, 8), jnp.zeros((*USED.shape, 2, 8), jnp.int8)
    with pytest.raises(error, match=message):
        ejkernel.paged_cache_update(rows, rows, cache, cache, **DESCRIBED, **given)


def test_floating_caches_need_no_scales():
    rows, cache, scales = normal(6, 2, 8), jnp.zeros((*USED.shape, 2, 8)), jnp.zeros((*USED.shape, 2))
    with pytest.raises(TypeError, match=r"^k_scale_cache: got a cache of scales for float32 pages, .*leave out k_scale_cache"):
        ejkernel.paged_cache_update(rows, rows, cache, cache, **DESCRIBED, k_scale_cache=scales, v_scale_cache=scales)


def test_attention_refuses_scales_of_another_shape():
    cache = jnp.zeros((*USED.shape, 2, 8), jnp.int8)
    with pytest.raises(ValueError, match=r"^k_scale: got shape .*expected \[pages, page_size, K\] = "):
        ejkernel.unified_attention(normal(6, 4, 8), cache, cache, **DESCRIBED, k_scale=jnp.zeros((1, 2, 2)))
