"""Attention over paged caches that hold the new tokens already."""

from __future__ import annotations

import functools
from typing import Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import PagedOptions, ShardingOptions
from ejkernel.operations.common.pages import INTERLEAVED
from ejkernel.operations.paged_attention import forms as _paged

__all__ = ["RaggedPageAttentionv2", "UnifiedAttention", "ragged_page_attention_v2", "unified_attention"]


class UnifiedAttentionOptions(PagedOptions, ShardingOptions, total=False):
    """Of `unified_attention`."""

    causal: t.Flag
    precision: t.PrecisionLike | None


@overload
def unified_attention(
    queries: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    alibi_slopes: t.Slopes | None = None,
    qq_bias: t.TreeBias | None = None,
    softmax_aux: t.Sinks | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[UnifiedAttentionOptions],
) -> t.TokenAttended: ...


@overload
def unified_attention(
    queries: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    alibi_slopes: t.Slopes | None = None,
    qq_bias: t.TreeBias | None = None,
    softmax_aux: t.Sinks | None = None,
    return_lse: Literal[True],
    **options: Unpack[UnifiedAttentionOptions],
) -> tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@overload
def unified_attention(
    queries: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    alibi_slopes: t.Slopes | None = None,
    qq_bias: t.TreeBias | None = None,
    softmax_aux: t.Sinks | None = None,
    return_lse: t.Flag,
    **options: Unpack[UnifiedAttentionOptions],
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@public("alibi_slopes", "qq_bias", "softmax_aux")
def unified_attention(
    queries: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    kv_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    *,
    alibi_slopes: t.Slopes | None = None,
    qq_bias: t.TreeBias | None = None,
    softmax_aux: t.Sinks | None = None,
    softmax_scale: t.Scalar | None = None,
    causal: t.Flag = True,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    layout: t.CacheLayout = "pthd",
    precision: t.PrecisionLike | None = None,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]:
    """Attention of packed new tokens, prompts and single steps in any mix, over a paged cache that holds their keys already.

    `L_ij = cap(softmax_scale * k_scale * q_i . k_j) + slope * (j - i) + qq_bias`; `out_i = v_scale * softmax_j(L_ij) . v_j`. Token
    t of a request with q new tokens is at position `kv_len - q + t`. One compiled program serves every mix of lengths.

    Args:
        queries: `[N, H, D]`, new tokens of all requests one after the other; float32, bfloat16 or float16.
        key_cache: `[pages, page_size, K, D]`; query head h reads key head `h // (H // K)`. Floating, int8, float8_e4m3fn or
            float8_e5m2.
        value_cache: `[pages, page_size, K, V]` in the same dtype.
        kv_lens: int `[R]`, tokens of each request in the cache, the new ones included. Of a request with more new tokens than
            that, the first ones stand before its first key and give 0.
        block_tables: int `[R, W]`, the pages of each request in order; entries beyond need may hold anything.
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens; tokens past the last one give 0.
        alibi_slopes: `[H]`: key j gains `slope * (j - i)`.
        qq_bias: `[Q, Q]` or `[R, Q, Q]`: bias from new token i to new token j of the same request, counted from its first new
            one; -inf hides j (a tree of drafts). Tokens from Q on have none.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`, logits that take part in the softmax's denominator only.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        causal: False lets a new token see every token of its request.
        sliding_window: w: the last w tokens, the query's own included; `(left, right)` means `left + 1`.
        chunk_size: only keys of the token's own chunk of so many positions are visible (Llama 4); a multiple of page_size, causal,
            without qq_bias.
        logits_soft_cap: c > 0 turns scaled products into `c * tanh(product / c)`.
        k_scale: factor of the stored keys: a number, a scalar array, `[K]`, or in every layout `[pages, page_size, K]`, one for
            each stored row, which `paged_cache_update` may have written; None is 1.
        v_scale: the same for values.
        layout: of the caches: "pthd" as above, "phtd" for `[pages, K, page_size, D]`, "hptd" for `[K, pages, page_size, D]`.
        precision: of the matrix products; None for the full precision of the dtype.
        return_lse: return the log-sum-exp too.
        mesh: run inside `jax.shard_map` on this mesh; heads may be split.
        in_specs: one PartitionSpec or None for each array up to softmax_aux, in order.
        out_specs: PartitionSpec of the output, or a pair of them with `return_lse`.

    Returns:
        `[N, H, V]` in the queries' dtype; with `return_lse` also float32 `[N, H]`, natural logarithm, sinks included.

    Source: Kwon et al., Efficient memory management for large language model serving with PagedAttention, 2023.
    """
    arrays, options, run = split(
        locals(),
        "query=queries key_pages=key_cache value_pages=value_cache kv_lens block_tables query_start_loc alibi_slopes qq_bias "
        "softmax_aux k_scale v_scale",
    )
    _paged.check_known("kv_lens", kv_lens, block_tables, key_cache, layout)
    options["sliding_window"] = _paged.window_of(sliding_window)
    derived = functools.partial(_paged.scale_specs, layout)
    with argument_names(query="queries", key_pages="key_cache", value_pages="value_cache"):
        return over_mesh(_paged.attend, arrays, options, positional=tuple(arrays)[:9], derived=derived, **run)


@public("softmax_aux")
def ragged_page_attention_v2(
    queries: t.TokenQueries,
    kv_pages: t.InterleavedPages,
    context_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    query_start_loc: t.QueryStarts,
    num_seqs: t.RequestCount,
    *,
    softmax_aux: t.Sinks | None = None,
    softmax_scale: t.Scalar | None = None,
    logits_soft_cap: t.Number | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    compute_dtype: t.DTypeLike | None = None,
    optimized: bool = False,
    mask_value: t.Number | None = None,
    vmem_limit_bytes: int | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SameTokenOutput:
    """`unified_attention` over one cache whose key and value heads alternate: k0, v0, k1, v1, ...

    Args:
        queries: `[N, H, D]`, new tokens of all requests one after the other.
        kv_pages: `[pages, page_size, 2 K, D]`; holds the new tokens already.
        context_lens: int `[R]`, tokens of each request in the cache, the new ones included.
        block_tables: int `[R, W]`.
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens.
        num_seqs: int or int `[1]`, requests in use, at most R; what entries of others hold does not matter, their tokens give 0.
        softmax_aux: sinks, see `unified_attention`, as are softmax_scale, logits_soft_cap, sliding_window, chunk_size, k_scale and
            v_scale.
        compute_dtype: hint: the least precise dtype that is good enough for the products; never makes a result less precise than
            the inputs' own dtype does.
        optimized: hint: prefer a platform's faster variant, if it has two.
        mask_value: hint: the logit that a platform may give to hidden pairs; they have no weight whatever it is.
        vmem_limit_bytes: hint: memory that a TPU kernel may use.
        mesh, in_specs, out_specs: see `unified_attention`.

    Returns:
        `[N, H, D]` in the queries' dtype.

    Source: Jiang et al., Ragged Paged Attention, JAX's Pallas kernels for TPU, 2025 (the layout of the cache).
    """
    arrays, options, run = split(
        locals(),
        "query=queries key_pages=kv_pages kv_lens=context_lens block_tables query_start_loc num_seqs softmax_aux k_scale v_scale",
        own="compute_dtype optimized mask_value vmem_limit_bytes",
    )
    _paged.check_hints(
        optimized=(optimized, bool), mask_value=(mask_value, (int, float)), vmem_limit_bytes=(vmem_limit_bytes, int)
    )
    _paged.check_floating_dtype("compute_dtype", compute_dtype)
    _paged.check_known("context_lens", context_lens, block_tables, kv_pages, INTERLEAVED, num_seqs)
    window = _paged.window_of(sliding_window)
    options |= {"sliding_window": window, "layout": INTERLEAVED, "form": _paged.attend_active}
    derived = functools.partial(_paged.scale_specs, INTERLEAVED)
    with argument_names(query="queries", key_pages="kv_pages", kv_lens="context_lens"):
        return over_mesh(_paged.attend, arrays, options, positional=tuple(arrays)[:7], derived=derived, **run)


UnifiedAttention = class_api("UnifiedAttention", unified_attention)
RaggedPageAttentionv2 = class_api("RaggedPageAttentionv2", ragged_page_attention_v2)
