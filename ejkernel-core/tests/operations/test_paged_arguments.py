"""What the functions on paged caches refuse, and that the message names argument, got and expected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.paged_attention.interface import as_window

QUERY = np.ones((3, 4, 8), np.float32)
NEW = np.ones((3, 2, 8), np.float32)
CACHE = np.ones((5, 3, 2, 8), np.float32)
DESCRIBED = {
    "query_start_loc": np.array([0, 1, 3], np.int32),
    "kv_lens": np.array([4, 6], np.int32),
    "block_tables": np.zeros((2, 3), np.int32),
}
ATTENTION = {"query": QUERY, "key_pages": CACHE, "value_pages": CACHE, **DESCRIBED}
UPDATE = {"key": NEW, "value": NEW, "key_pages": CACHE, "value_pages": CACHE, **DESCRIBED}

BOTH = [
    ({"layout": "nhd"}, ValueError, "layout: got 'nhd', expected one of pthd, phtd, hptd, interleaved"),
    ({"key_pages": CACHE[0]}, ValueError, r"key_pages: got shape \(3, 2, 8\) with 3 axes, expected 4 axes"),
    ({"key_pages": CACHE.astype(np.int32)}, TypeError, "key_pages: got dtype int32, expected a floating type of two bytes"),
    ({"value_pages": CACHE[:4]}, ValueError, r"value_pages: got shape \(4, 3, 2, 8\), expected \[pages, page_size, K, D\]"),
    ({"value_pages": CACHE.astype(np.float16)}, TypeError, "value_pages: got dtype float16, expected the key pages' float32"),
    (
        {"value_pages": None},
        TypeError,
        "value_pages: got None, expected an array; only layouts interleaved, packed, side_by_side",
    ),
    ({"layout": "interleaved"}, ValueError, "value_pages: got an array, expected None; layout 'interleaved' holds"),
    ({"layout": "phtd"}, ValueError, r"layout='phtd' reads the cache as \[pages, K, page_size, D\]"),
    ({"query_start_loc": np.array([0, 3])}, ValueError, r"query_start_loc: got shape \(2,\), expected \[R \+ 1\] = \[3\]"),
    ({"kv_lens": np.array([1.0, 2.0])}, TypeError, "kv_lens: got dtype float64, expected integers"),
    (
        {"block_tables": np.zeros((1, 3), np.int32)},
        ValueError,
        "block_tables: got 1 rows, expected one for each of the 2 requests",
    ),
    ({"k_scale": np.ones(3, np.float32)}, ValueError, r"k_scale: got shape \(3,\), expected a scalar or \[K\] with K = 2"),
]


@pytest.mark.parametrize(("name", "arguments"), [("paged_attention", ATTENTION), ("paged_cache_update", UPDATE)])
@pytest.mark.parametrize(("change", "error", "message"), BOTH)
def test_both_refuse(name: str, arguments: Any, change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        get_operation(name).canonicalise(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": QUERY[0]}, ValueError, r"query: got shape \(4, 8\) with 2 axes, expected 3 axes"),
        (
            {"query": QUERY[:, :3]},
            ValueError,
            "query: got 3 heads, expected a multiple of the 2 key heads; layout='pthd' reads",
        ),
        ({"query": QUERY[:, :, :6]}, ValueError, "query: got head size 6, expected the pages' 8; layout='pthd' reads"),
        ({"alibi_slopes": np.ones(2, np.float32)}, ValueError, r"alibi_slopes: got shape \(2,\), expected \(4,\) = \[H\]"),
        (
            {"qq_bias": np.ones((3, 2), np.float32)},
            ValueError,
            r"qq_bias: got shape \(3, 2\), expected \[Q, Q\] or \[R, Q, Q\]",
        ),
        ({"qq_bias": np.ones((3, 2, 2), np.float32)}, ValueError, "with R = 2 requests"),
        ({"softmax_aux": np.ones(2, np.float32)}, ValueError, r"softmax_aux: got shape \(2,\), expected \[H\], \[H, n\]"),
        ({"sliding_window": 0}, ValueError, "sliding_window: got 0, expected a value >= 1"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: got 0.0, expected a value > 0"),
        ({"causal": 1}, TypeError, "causal: got 1, expected True or False"),
        ({"key_heads": 1}, ValueError, "key_heads: got 1, expected the 2 heads of the pages"),
    ],
)
def test_attention_refuses(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        get_operation("paged_attention").canonicalise(**{**ATTENTION, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": NEW[:2]}, ValueError, r"value: got shape \(2, 2, 8\), expected 3 tokens and 2 heads as the key"),
        ({"key": NEW[:, :1], "value": NEW[:, :1]}, ValueError, "key: got 1 heads of size 8, expected 2 of size 8; layout="),
        ({"key": NEW.astype(np.int8)}, TypeError, "key: got dtype int8, expected a floating type"),
    ],
)
def test_update_refuses(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        get_operation("paged_cache_update").canonicalise(**{**UPDATE, **change})


def test_windows_count_keys():
    assert [as_window(w) for w in (None, 1, 7, (6, 0), (6, None), (None, 0))] == [None, 1, 7, 7, 7, None]


PUBLIC = {
    "queries": jnp.asarray(QUERY),
    "key_cache": jnp.asarray(CACHE),
    "value_cache": jnp.asarray(CACHE),
    **{name: jnp.asarray(array) for name, array in DESCRIBED.items()},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kv_lens": jnp.array([4, 13])},
            r"kv_lens: got values in \[4, 13\], expected values in \[0, 9\], what 3 pages of 3 tokens",
        ),
        ({"query_start_loc": jnp.array([0, 2, 1])}, r"query_start_loc: got \[0, 2, 1\], expected 0, then ascending values"),
        ({"query_start_loc": jnp.array([0, 2, 4])}, "of at most 3 = tokens"),
        ({"query_start_loc": jnp.array([1, 2, 3])}, "expected 0, then ascending"),
    ],
)
def test_known_values_are_checked(change: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ejkernel.unified_attention(**{**PUBLIC, **change})


def test_forms_refuse():
    cache, flat = PUBLIC["key_cache"], PUBLIC["key_cache"].reshape(15, 2, 8)
    query, lens, tables = PUBLIC["queries"][:2], PUBLIC["kv_lens"], PUBLIC["block_tables"]
    with pytest.raises(
        TypeError, match=r"sliding_window: got 4, expected a pair \(left, right\); \(3, 0\) for the last 4 keys"
    ):
        ejkernel.ragged_decode_attention(query, cache[:2], cache[:2], lens, lens, sliding_window=4)
    with pytest.raises(ValueError, match="page_size: got 4, expected a divisor of the 15 tokens of key_buffer"):
        ejkernel.decode_attention(query, flat, flat, tables, lens, page_size=4)
    with pytest.raises(ValueError, match=r"attn_scale: got 2\.0, expected None beside softmax_scale"):
        ejkernel.page_attention(query, cache, cache, lens, tables, softmax_scale=1.0, attn_scale=2.0)
    packed = cache.reshape(5, 3, 2, 1, 8)
    described = (lens, tables.reshape(-1), PUBLIC["query_start_loc"], jnp.array([0, 2, 2]))
    new = jnp.asarray(NEW)
    with pytest.raises(ValueError, match=r"q_scale: got 0\.5, expected None; queries are not quantised"):
        ejkernel.ragged_page_attention_v3(PUBLIC["queries"], new, new, packed, *described, q_scale=0.5)
    with pytest.raises(
        ValueError, match="kv_cache: got 2 heads of 8 channels, expected 4 heads or more of at least 8 channels"
    ):
        ejkernel.ragged_page_attention_v3(PUBLIC["queries"], new, new, packed, *described)
    with pytest.raises(TypeError, match="vmem_limit_bytes: got 'much', expected int, or None"):
        ejkernel.ragged_page_attention_v3(PUBLIC["queries"], new, new, packed, *described, vmem_limit_bytes="much")
    with pytest.raises(ValueError, match="compute_dtype: got 'int8', expected a floating dtype"):
        ejkernel.ragged_page_attention_v2(
            PUBLIC["queries"], cache, *described[:1], tables, described[2], 2, compute_dtype="int8"
        )


def _serving() -> dict[str, dict[str, Any]]:
    """Right arguments of the public functions, by their own names."""
    lens, tables, starts = (PUBLIC[name] for name in ("kv_lens", "block_tables", "query_start_loc"))
    query, cache, new = PUBLIC["queries"], PUBLIC["key_cache"], jnp.asarray(NEW)
    packed, flat = jnp.concatenate([cache, cache], 2)[:, :, None], cache.reshape(15, 2, 8)
    latent = {"queries_nope": query, "queries_pe": query, "keys_values": new[:, 0], "keys_pe": new[:, 0]}
    distributed = {"kv_lens": lens, "block_tables": tables.reshape(-1), "query_start_loc": starts}
    distributed["distribution"] = jnp.array([0, 2, 2])
    return {
        "unified_attention": PUBLIC,
        "page_attention": {
            "query": query[:2], "key_cache": cache.swapaxes(1, 2), "value_cache": cache.swapaxes(1, 2), "context_lens": lens,
            "block_tables": tables,
        },
        "prefill_page_attention": {
            "query": query, "key_cache": cache.transpose(2, 0, 1, 3), "value_cache": cache.transpose(2, 0, 1, 3),
            "context_len": lens[:1], "page_indices": tables[0],
        },
        "ragged_page_attention_v2": {
            "queries": query, "kv_pages": packed[:, :, 0], "context_lens": lens, "block_tables": tables,
            "query_start_loc": starts, "num_seqs": 2,
        },
        "decode_attention": {
            "query": query[:2], "key_buffer": flat, "value_buffer": flat, "req_to_tokens": tables, "seq_lens": lens,
            "page_size": 3,
        },
        "ragged_decode_attention": {
            "query": query[:2], "key": cache[:2], "value": cache[:2], "sequence_start": lens * 0, "sequence_end": lens // 2
        },
        "paged_cache_update": {
            "keys": new, "values": new, "key_cache": cache, "value_cache": cache, "kv_lens": lens, "block_tables": tables,
            "query_start_loc": starts,
        },
        "chunked_prefill_paged_decode": {**PUBLIC, "keys": new, "values": new},
        "ragged_page_attention_v3": {"queries": query, "keys": new, "values": new, "kv_cache": packed, **distributed},
        "multi_latent_ragged_page_attention": {**latent, "kv_cache": jnp.zeros((5, 3, 1, 256)), **distributed},
    }  # fmt: skip


@pytest.mark.parametrize("function", sorted(_serving()))
def test_messages_say_the_name_that_the_caller_uses(function: str):
    right = _serving()[function]
    for name, value in right.items():
        if name == "page_size":
            continue
        with pytest.raises(TypeError, match=rf"^{name}: got None(Type)?, expected an array"):
            getattr(ejkernel, function)(**{**right, name: None})
        if isinstance(value, int):
            continue
        with pytest.raises((ValueError, TypeError), match=rf"^{name}: got"):
            getattr(ejkernel, function)(**{**right, name: value[None]})
        with pytest.raises(TypeError, match=rf"^{name}: got dtype"):
            getattr(ejkernel, function)(**{**right, name: value.astype(jnp.complex64)})


WRONG = [
    ("unified_attention", {"layout": ["pthd"]}, r"layout: got \['pthd'\], expected one of pthd"),
    ("unified_attention", {"cfg": (1, 2)}, r"cfg: got \(1, 2\), expected the config dataclass"),
    ("unified_attention", {"mesh": 3, "in_specs": (), "out_specs": None}, r"mesh: got int, expected a jax\.sharding\.Mesh"),
    ("page_attention", {"block_size": 2}, r"block_size: got 2, expected the 3 tokens of a page of key_cache; layout='phtd' reads"),
    ("page_attention", {"layout": "pthd"}, r"query: got 4 heads, .* 3 key heads; layout='pthd' .*; with layout='phtd' it is"),
    ("page_attention", {"scale": 1.0, "attn_scale": 1.0}, "scale: got 1.0, expected None beside attn_scale; .* softmax_scale"),
    ("page_attention", {"num_splits": "two"}, "num_splits: got 'two', expected int or float"),
    ("prefill_page_attention", {"layout": "pthd"}, "query: got 4 heads, .* 3 key heads; .* with layout='hptd' it is"),
    ("prefill_page_attention", {"context_len": 10}, r"context_len: got values in \[10, 10\], expected values in \[0, 9\]"),
    ("prefill_page_attention", {"context_len": jnp.array(-1)}, r"context_len: got values in \[-1, -1\]"),
    ("ragged_page_attention_v2", {"num_seqs": -1}, "num_seqs: got -1, expected at most 2 requests in use"),
    ("ragged_page_attention_v2", {"num_seqs": jnp.array([3])}, "num_seqs: got 3, expected at most 2 requests in use"),
    ("ragged_page_attention_v2", {"num_seqs": [2]}, "num_seqs: got list, expected an array"),
    ("ragged_page_attention_v3", {"distribution": jnp.array([0, 0, 3])}, "distribution: got 3, expected at most 2"),
    ("ragged_page_attention_v3", {"kv_lens": np.array([4, 10])}, r"kv_lens: got values in \[4, 10\], expected .* \[0, 9\]"),
    ("ragged_page_attention_v3", {"queries": jnp.ones((2, 4, 8)), "query_start_loc": jnp.array([0, 1, 2])}, "keys: got 3 tokens"),
    ("chunked_prefill_paged_decode", {"keys": jnp.ones((4, 2, 8)), "values": jnp.ones((4, 2, 8))}, "keys: got 4 tokens"),
    ("decode_attention", {"page_size": 0}, "page_size: got 0, expected a value >= 1"),
    ("decode_attention", {"page_size": None}, "page_size: got None, expected an int"),
    ("ragged_decode_attention", {"value": jnp.ones((2, 2, 2, 8))}, r"value: got shape \(2, 2, 2, 8\), expected the 3 tokens"),
    ("ragged_decode_attention", {"sliding_window": np.int64(3)}, r"sliding_window: got 3, .* \(2, 0\) for the last 3 keys"),
    ("multi_latent_ragged_page_attention", {"kv_lens": jnp.array([4, 10])}, r"kv_lens: got values in \[4, 10\]"),
    ("multi_latent_ragged_page_attention", {"distribution": jnp.array([0, 0, 3])}, "distribution: got 3, expected at most 2"),
    ("multi_latent_ragged_page_attention", {"query_start_loc": jnp.array([0, 2, 1])}, r"query_start_loc: got \[0, 2, 1\]"),
    ("multi_latent_ragged_page_attention", {"keys_values": jnp.ones((3, 8), int)}, "keys_values: got dtype int32"),
    ("multi_latent_ragged_page_attention", {"keys_pe": jnp.ones((2, 8))}, r"keys_pe: got shape \(2, 8\)"),
    ("multi_latent_ragged_page_attention", {"q_scale": jnp.ones(2)}, r"q_scale: got shape \(2,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "change", "message"), WRONG)
def test_public_functions_refuse(function: str, change: Any, message: str):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        getattr(ejkernel, function)(**{**_serving()[function], **change})


@pytest.mark.parametrize("function", sorted(_serving()))
def test_explained_from_shapes_alone(function: str):
    right = _serving()[function]
    shapes = {
        name: value if isinstance(value, int) else jax.ShapeDtypeStruct(value.shape, value.dtype)
        for name, value in right.items()
    }
    explained = ejkernel.explain(function, **shapes).forward.operation
    expected = {"paged_cache_update": "paged_cache_update", "multi_latent_ragged_page_attention": "latent_paged_attention"}
    assert explained == expected.get(function, "paged_attention")
