"""Attention over paged caches in the layouts of the older GPU package: one decoding step, and one chunk of a prompt."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import pick, public
from ejkernel.errors import argument_names, invalid
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import DispatchOptions, PagedOptions
from ejkernel.operations.common.options import as_count
from ejkernel.operations.common.pages import LAYOUTS, PageShape, known_values
from ejkernel.operations.paged_attention import forms as _paged

__all__ = ["PageAttention", "PrefillPageAttention", "page_attention", "prefill_page_attention"]


class PrefillOptions(PagedOptions, DispatchOptions, total=False):
    """Of `prefill_page_attention`."""

    attn_logits_soft_cap: t.Number | None
    softmax_aux: t.Sinks | None
    mask_value: t.Number | None


class PageAttentionOptions(PrefillOptions, total=False):
    """Of `page_attention`."""

    attn_scale: t.Scalar | None
    scale: t.Scalar | None
    alibi_slopes: t.Slopes | None
    block_size: t.Count | None
    max_context_len: t.Count | None
    num_splits: t.Count | None
    pages_per_compute_block: t.Count | None
    megacore_mode: str | None
    inline_seq_dim: t.Flag


@overload
def page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PageAttentionOptions],
) -> t.TokenAttended: ...


@overload
def page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    *,
    return_lse: Literal[True],
    **options: Unpack[PageAttentionOptions],
) -> tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@overload
def page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    *,
    return_lse: t.Flag,
    **options: Unpack[PageAttentionOptions],
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@public()
def page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_lens: t.ContextLengths,
    block_tables: t.BlockTables,
    *,
    softmax_scale: t.Scalar | None = None,
    attn_scale: t.Scalar | None = None,
    scale: t.Scalar | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    attn_logits_soft_cap: t.Number | None = None,
    softmax_aux: t.Sinks | None = None,
    alibi_slopes: t.Slopes | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    layout: t.CacheLayout = "phtd",
    block_size: t.Count | None = None,
    max_context_len: t.Count | None = None,
    num_splits: t.Count | None = None,
    pages_per_compute_block: t.Count | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: t.Flag = True,
    mask_value: t.Number | None = None,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]:
    """One decoding step: the last token of every request attends to its own pages.

    Args:
        query: `[R, H, D]`, one token per request.
        key_cache: `[pages, K, page_size, D]`, see layout; query head h reads key head `h // (H // K)`.
        value_cache: `[pages, K, page_size, V]`.
        context_lens: int `[R]`, tokens of each request in the cache, the current one included; 0 gives 0.
        block_tables: int `[R, W]`.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`. `attn_scale` and `scale` are other names for it.
        attn_scale, scale: see softmax_scale.
        sliding_window: w: the last w tokens; `(left, right)` means `left + 1`.
        chunk_size: see `unified_attention`.
        logits_soft_cap: c > 0. `attn_logits_soft_cap` is another name for it.
        attn_logits_soft_cap: see logits_soft_cap.
        softmax_aux: sinks, see `unified_attention`, as are alibi_slopes, k_scale, v_scale and return_lse.
        layout: "phtd" as above, "pthd" for `[pages, page_size, K, D]`, the layout of `unified_attention` and
            `paged_cache_update`, "hptd" for `[K, pages, page_size, D]`. It is never guessed from sizes.
        block_size: the page size of the cache, checked against it; None for whatever the cache has.
        max_context_len: hint: the longest context that a platform need expect; longer ones are computed all the same.
        num_splits: hint: into how many parts a platform may split a context; None or 0 lets it choose.
        pages_per_compute_block, megacore_mode, inline_seq_dim, mask_value: hints to kernels of TPUs. No hint changes the result.

    Returns:
        `[R, H, V]` in the query's dtype; with `return_lse` also float32 `[R, H]`.

    Source: Kwon et al., PagedAttention, 2023.
    """
    given = pick(
        locals(),
        "query key_pages=key_cache value_pages=value_cache kv_lens=context_lens block_tables softmax_aux alibi_slopes k_scale "
        "v_scale chunk_size layout return_lse platform cfg",
    )
    _check_hints(
        max_context_len=max_context_len,
        num_splits=num_splits,
        pages_per_compute_block=pages_per_compute_block,
        mask_value=mask_value,
    )
    _paged.check_hints(megacore_mode=(megacore_mode, str), inline_seq_dim=(inline_seq_dim, (bool, np.bool)))
    _paged.check_known("context_lens", context_lens, block_tables, key_cache, layout)
    _check_block_size(block_size, key_cache, layout)
    with argument_names(key_pages="key_cache", value_pages="value_cache", kv_lens="context_lens"):
        return _paged.attend(
            **given,
            softmax_scale=_one_of(softmax_scale=softmax_scale, attn_scale=attn_scale, scale=scale),
            sliding_window=_paged.window_of(sliding_window),
            logits_soft_cap=_one_of(logits_soft_cap=logits_soft_cap, attn_logits_soft_cap=attn_logits_soft_cap),
            form=_paged.one_token_each,
        )


@overload
def prefill_page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_len: t.RequestCount,
    page_indices: t.FlatBlockTables,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PrefillOptions],
) -> t.TokenAttended: ...


@overload
def prefill_page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_len: t.RequestCount,
    page_indices: t.FlatBlockTables,
    *,
    return_lse: Literal[True],
    **options: Unpack[PrefillOptions],
) -> tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@overload
def prefill_page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_len: t.RequestCount,
    page_indices: t.FlatBlockTables,
    *,
    return_lse: t.Flag,
    **options: Unpack[PrefillOptions],
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]: ...


@public()
def prefill_page_attention(
    query: t.TokenQueries,
    key_cache: t.KeyPages,
    value_cache: t.ValuePages,
    context_len: t.RequestCount,
    page_indices: t.FlatBlockTables,
    *,
    softmax_scale: t.Scalar | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    attn_logits_soft_cap: t.Number | None = None,
    softmax_aux: t.Sinks | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    layout: t.CacheLayout = "hptd",
    mask_value: t.Number | None = None,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.TokenAttended | tuple[t.TokenAttended, t.TokenLogSumExp]:
    """One chunk of one request's prompt attends to the request's pages, which hold the chunk already.

    Args:
        query: `[C, H, D]`, the last C tokens of the context.
        key_cache: `[K, pages, page_size, D]`, see layout; query head h reads key head `h // (H // K)`.
        value_cache: `[K, pages, page_size, V]`.
        context_len: int `[1]` or a scalar: tokens in the cache, the chunk included.
        page_indices: int `[W]`, the request's pages in order.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        sliding_window: w: the last w tokens, of each token of the chunk; `(left, right)` means `left + 1`.
        chunk_size: see `unified_attention`.
        logits_soft_cap: c > 0. `attn_logits_soft_cap` is another name for it.
        attn_logits_soft_cap: see logits_soft_cap.
        softmax_aux: sinks, see `unified_attention`, as are k_scale, v_scale and return_lse.
        layout: "hptd" as above, "phtd" for `[pages, K, page_size, D]`, "pthd" for `[pages, page_size, K, D]`, the layout of
            `unified_attention` and `paged_cache_update`. It is never guessed from sizes.
        mask_value: hint to kernels of TPUs; it does not change the result.

    Returns:
        `[C, H, V]` in the query's dtype; with `return_lse` also float32 `[C, H]`.

    Source: Agrawal et al., SARATHI: Efficient LLM inference by piggybacking decodes with chunked prefills, 2023.
    """
    given = pick(
        locals(),
        "query key_pages=key_cache value_pages=value_cache context_len page_indices softmax_aux k_scale v_scale softmax_scale "
        "chunk_size layout return_lse platform cfg",
    )
    _check_hints(mask_value=mask_value)
    known = known_values(context_len)
    if known is not None and known.size == 1 and getattr(page_indices, "ndim", 0) == 1:
        _paged.check_known("context_len", known.reshape(1), page_indices[None], key_cache, layout)
    names = {"kv_lens": "context_len", "block_tables": "page_indices"}
    with argument_names(key_pages="key_cache", value_pages="value_cache", **names):
        return _paged.attend(
            **given,
            sliding_window=_paged.window_of(sliding_window),
            logits_soft_cap=_one_of(logits_soft_cap=logits_soft_cap, attn_logits_soft_cap=attn_logits_soft_cap),
            form=_paged.one_request,
        )


def _one_of(**named: Any) -> Any:
    """The value of an argument that has several names, the first of which is its own."""
    own, *_ = named
    used = [name for name, value in named.items() if value is not None]
    if len(used) > 1:
        raise invalid(used[1], named[used[1]], f"None beside {used[0]}", remedy=f"they are names for one argument, {own}")
    return named[used[0]] if used else None


def _check_hints(**hints: Any) -> None:
    """Hints are numbers."""
    _paged.check_hints(**{name: (value, (int, float, np.number)) for name, value in hints.items()})


def _check_block_size(block_size: Any, cache: Any, layout: str) -> None:
    """A page size that the caller states must be the cache's."""
    if block_size is None or getattr(cache, "ndim", 0) != 4:
        return
    size = PageShape.of((1, *cache.shape), layout).page_size
    if as_count("block_size", block_size, 1) != size:
        remedy = f"layout={layout!r} reads the cache as {LAYOUTS[layout]}"
        raise invalid("block_size", block_size, f"the {size} tokens of a page of key_cache", remedy=remedy)


PageAttention = class_api("PageAttention", page_attention)
PrefillPageAttention = class_api("PrefillPageAttention", prefill_page_attention)
