"""Writing new tokens into paged caches, alone and followed by attention over what was written."""

from __future__ import annotations

import functools
from typing import overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import pick, public, split
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names, invalid
from ejkernel.modules._class_api import class_api
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_cache_update.interface import OPERATION as _PAGED_CACHE_UPDATE
from ejkernel.operations.paged_cache_update.token_scales import update_with_token_scales
from ejkernel.utils.checks import check_array

__all__ = [
    "ChunkedPrefillPagedDecode",
    "PagedCacheUpdate",
    "RaggedPageAttentionv3",
    "chunked_prefill_paged_decode",
    "paged_cache_update",
    "ragged_page_attention_v3",
]


@overload
def paged_cache_update(
    keys: t.NewKeys,
    values: t.NewValues,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    k_scale: t.CacheScale | None = None,
    v_scale: t.CacheScale | None = None,
    layout: t.CacheLayout = "pthd",
    k_scale_cache: None = None,
    v_scale_cache: None = None,
    platform: t.Platforms = None,
) -> tuple[t.NewKeyPages, t.NewValuePages]: ...


@overload
def paged_cache_update(
    keys: t.NewKeys,
    values: t.NewValues,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    k_scale: None = None,
    v_scale: None = None,
    layout: t.CacheLayout = "pthd",
    k_scale_cache: t.ScalePages,
    v_scale_cache: t.ScalePages,
    platform: t.Platforms = None,
) -> tuple[t.NewKeyPages, t.NewValuePages, t.NewScalePages, t.NewScalePages]: ...


@public()
def paged_cache_update(
    keys: t.NewKeys,
    values: t.NewValues,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    k_scale: t.CacheScale | None = None,
    v_scale: t.CacheScale | None = None,
    layout: t.CacheLayout = "pthd",
    k_scale_cache: t.ScalePages | None = None,
    v_scale_cache: t.ScalePages | None = None,
    platform: t.Platforms = None,
) -> tuple[t.NewKeyPages, t.NewValuePages] | tuple[t.NewKeyPages, t.NewValuePages, t.NewScalePages, t.NewScalePages]:
    """Store the new tokens of every request: token t of a request with q new ones at position `kv_len - q + t` of its pages.

    Under `jax.jit` with the caches donated (`donate_argnums`), the pages are written in place.

    Args:
        keys: `[N, K, D]`, new tokens of all requests one after the other; floating, or in the cache's own dtype.
        values: `[N, K, V]`.
        key_cache: `[pages, page_size, K, D]`: floating, int8, float8_e4m3fn or float8_e5m2.
        value_cache: `[pages, page_size, K, V]` in the same dtype.
        kv_lens: int `[R]`, tokens of each request after the update.
        block_tables: int `[R, W]`, the pages of each request in order. Tokens for which it has no page, or one outside of the
            cache, are dropped.
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens; tokens past the last one are dropped.
        k_scale: keys are divided by it before they are stored, a number, a scalar array or `[K]`; None is 1. Values beyond the
            range of int8 or float8 become its ends.
        v_scale: the same for values.
        k_scale_cache: float `[pages, page_size, K]` in every layout, beside int8 or float8 caches and in place of the scales: each
            new row of a key head is stored divided by its own scale, its largest magnitude over the largest number of the cache's
            dtype, and the scale is stored here. Attention reads it as its `k_scale`.
        v_scale_cache: the same for values; both or neither.
        layout: of the caches: "pthd" as above, "phtd" for `[pages, K, page_size, D]`, "hptd" for `[K, pages, page_size, D]`.

    Returns:
        The caches; after them those of scales, where they are given. Gradients reach keys, values, scales and what was not
        overwritten, unless pages are int8 or float8.

    Source: Kwon et al., PagedAttention, 2023.
    """
    arrays = pick(
        locals(),
        "key=keys value=values key_pages=key_cache value_pages=value_cache kv_lens block_tables query_start_loc k_scale v_scale",
    )
    _paged.check_known("kv_lens", kv_lens, block_tables, key_cache, layout)
    names = {"key": "keys", "value": "values", "key_pages": "key_cache", "value_pages": "value_cache"}
    if k_scale_cache is not None or v_scale_cache is not None:
        if k_scale_cache is None or v_scale_cache is None:
            missing = "k_scale_cache" if k_scale_cache is None else "v_scale_cache"
            raise invalid(missing, None, "an array, as the scales of keys and values are stored together")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise invalid(name, "a scale", f"None beside {name}_cache", remedy="each row has its own")
        with argument_names(**names):
            return update_with_token_scales(
                **pick(arrays, "key value key_pages value_pages"),
                k_scale_cache=k_scale_cache,
                v_scale_cache=v_scale_cache,
                described=pick(arrays, "kv_lens block_tables query_start_loc"),
                layout=layout,
                platform=platform,
            )
    with argument_names(**names):
        return _PAGED_CACHE_UPDATE.invoke(arrays, {"layout": layout}, platform=platform)


@public("alibi_slopes", "softmax_aux")
def chunked_prefill_paged_decode(
    queries: t.TokenQueries,
    keys: t.NewKeys,
    values: t.NewValues,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    alibi_slopes: t.Slopes | None = None,
    softmax_aux: t.Sinks | None = None,
    softmax_scale: t.Scalar | None = None,
    causal: t.Flag = True,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    k_scale: t.CacheScale | None = None,
    v_scale: t.CacheScale | None = None,
    layout: t.CacheLayout = "pthd",
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> tuple[t.TokenAttended, t.NewKeyPages, t.NewValuePages]:
    """One step of continuous batching: `paged_cache_update`, then `unified_attention` over what it wrote.

    Args:
        queries: `[N, H, D]`, new tokens of all requests one after the other, chunks of prompts and single steps in any mix.
        keys: `[N, K, D]`.
        values: `[N, K, V]`.
        key_cache: `[pages, page_size, K, D]`; donate it and value_cache to `jax.jit` to have them written in place.
        value_cache: `[pages, page_size, K, V]`.
        kv_lens: int `[R]`, tokens of each request after the update.
        block_tables: int `[R, W]`.
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens.
        alibi_slopes: see `unified_attention`, as are softmax_aux, softmax_scale, causal, sliding_window, chunk_size,
            logits_soft_cap and precision.
        k_scale: keys are stored divided by it and read multiplied by it; see `paged_cache_update`, as for v_scale and layout.
        cfg: config override for the attention.
        mesh, in_specs, out_specs: see `unified_attention`; three results.

    Returns:
        `[N, H, V]` in the queries' dtype, and the two caches.

    Source: Agrawal et al., SARATHI, 2023; Yu et al., Orca (continuous batching), 2022.
    """
    arrays, options, run = split(
        locals(),
        "query=queries key=keys value=values key_pages=key_cache value_pages=value_cache kv_lens block_tables query_start_loc "
        "alibi_slopes softmax_aux k_scale v_scale",
    )
    _paged.check_known("kv_lens", kv_lens, block_tables, key_cache, layout)
    options["sliding_window"] = _paged.window_of(sliding_window)
    derived = functools.partial(_paged.scale_specs, layout)
    with argument_names(query="queries", key="keys", value="values", key_pages="key_cache", value_pages="value_cache"):
        return over_mesh(_paged.separate_caches, arrays, options, positional=tuple(arrays)[:10], derived=derived, **run)


@public("softmax_aux")
def ragged_page_attention_v3(
    queries: t.TokenQueries,
    keys: t.NewKeys,
    values: t.NewKeys,
    kv_cache: t.PackedPages,
    kv_lens: t.ContextLengths,
    block_tables: t.FlatBlockTables,
    query_start_loc: t.QueryStarts,
    distribution: t.Distribution,
    *,
    softmax_aux: t.Sinks | None = None,
    softmax_scale: t.Scalar | None = None,
    logits_soft_cap: t.Number | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    k_scale: t.CacheScale | None = None,
    v_scale: t.CacheScale | None = None,
    q_scale: None = None,
    vmem_limit_bytes: int | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> tuple[t.SameTokenOutput, t.NewPackedPages]:
    """`chunked_prefill_paged_decode` over one cache in the packed layout of TPU kernels.

    Args:
        queries: `[N, H, D]`, new tokens of all requests one after the other.
        keys: `[N, K, D]`.
        values: `[N, K, D]`.
        kv_cache: `[pages, page_size, C / p, p, E]`: C heads in groups of p, k0, v0, k1, v1, ..., of which the first 2 K are in use;
            E >= D channels, of which the first D are. A cache that has room for K but not for 2 K heads, and E >= 2 D, holds keys
            and values side by side in the channels of one head (TPU kernels do so for D = 64): there E must be 2 D. Written in
            place under `jax.jit` with donation; what is not in use stays as it is.
        kv_lens: int `[R]`, tokens of each request after the update.
        block_tables: int `[R * W]`, the pages of request 0, then those of request 1, ...
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens.
        distribution: int `[3]`: decoding requests are those before its first entry, prompts those before its second; requests from
            its third on are not in use, whatever they hold. The first two are hints.
        softmax_aux: sinks, see `unified_attention`, as are softmax_scale (None means `1 / sqrt(D)`, not 1), logits_soft_cap,
            sliding_window and chunk_size.
        k_scale: keys are stored divided by it and read multiplied by it; see `paged_cache_update`, as for v_scale.
        q_scale: refused unless None: queries are multiplied in their own dtype.
        vmem_limit_bytes: hint: memory that a TPU kernel may use; never changes results.
        cfg: config override for the attention.
        mesh, in_specs, out_specs: see `unified_attention`; two results.

    Returns:
        `[N, H, D]` in the queries' dtype, and the cache.

    Source: Jiang et al., Ragged Paged Attention, kernels for TPU, 2025 (the layout of the cache).
    """
    arrays, options, run = split(
        locals(),
        "queries keys values kv_cache kv_lens block_tables query_start_loc distribution softmax_aux k_scale v_scale",
        own="q_scale vmem_limit_bytes",
    )
    if q_scale is not None:
        raise invalid("q_scale", q_scale, "None", remedy="queries are not quantised; k_scale and v_scale belong to the cache")
    _paged.check_hints(vmem_limit_bytes=(vmem_limit_bytes, int))
    check_array("queries", queries, ndim=3)
    check_array("kv_cache", kv_cache, ndim=5, floating=False)
    sizes = {"tokens": queries.shape[0], "page_size": kv_cache.shape[1]}
    _paged.check_distributed(query_start_loc, kv_lens, block_tables, distribution, **sizes)
    options["sliding_window"] = _paged.window_of(sliding_window)
    derived = functools.partial(_paged.scale_specs, "packed")
    with argument_names(query="queries", key="keys", value="values", key_pages="kv_cache"):
        return over_mesh(_paged.packed_cache, arrays, options, positional=tuple(arrays)[:9], derived=derived, **run)


PagedCacheUpdate = class_api("PagedCacheUpdate", paged_cache_update)
ChunkedPrefillPagedDecode = class_api("ChunkedPrefillPagedDecode", chunked_prefill_paged_decode)
RaggedPageAttentionv3 = class_api("RaggedPageAttentionv3", ragged_page_attention_v3)
