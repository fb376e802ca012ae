"""Latent attention over a paged cache, for serving: store the new latents, then attend."""

from __future__ import annotations

from typing import Unpack

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.latent_serving import attend_after_storing
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import DispatchOptions

__all__ = [
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionV2",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
]


class LatentServingOptions(DispatchOptions, total=False):
    """Of `multi_latent_ragged_page_attention`."""

    softmax_scale: t.Scalar | None
    sliding_window: t.Window | None
    logits_soft_cap: t.Number | None
    mask_value: t.Number | None
    q_scale: t.Scalar | None
    k_scale: t.Scalar | None
    v_scale: t.Scalar | None


@public()
def multi_latent_ragged_page_attention(
    queries_nope: t.LatentTokenQueries,
    queries_pe: t.RotaryTokenQueries,
    keys_values: t.NewLatents,
    keys_pe: t.NewRotaryKeys,
    kv_cache: t.LatentPages,
    kv_lens: t.ContextLengths,
    block_tables: t.FlatBlockTables,
    query_start_loc: t.QueryStarts,
    distribution: t.Distribution,
    *,
    softmax_scale: t.Scalar | None = None,
    sliding_window: t.Window | None = None,
    logits_soft_cap: t.Number | None = None,
    mask_value: t.Number | None = None,
    q_scale: t.Scalar | None = None,
    k_scale: t.Scalar | None = None,
    v_scale: t.Scalar | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.LatentTokenAttended, t.NewLatentPages]:
    """Store new latents in their pages, then absorbed latent attention: `softmax(cap(scale * (q_nope . c + q_pe . k_pe))) . c`.

    Any mix of prompts, chunks of prompts and single steps; one compilation serves all of them. Token t of a request with q new
    tokens stands at position `kv_len - q + t` and sees the keys up to there.

    Args:
        queries_nope: `[N, H, r]`: queries after the key projection was moved to them (`q . w_kc^T`), new tokens of all requests
            one after the other.
        queries_pe: rotary parts `[N, H, e]`.
        keys_values: new latents `[N, r]`, in the queries' dtype.
        keys_pe: rotary parts of the new keys, shared by the heads, `[N, e]`.
        kv_cache: `[pages, page_size / p, p, C]`, where C is r rounded up to a multiple of 128, then e rounded up likewise: latents
            first, each part followed by zeros. Floating, int8, float8_e4m3fn or float8_e5m2. Donate it to `jax.jit` to have it
            written in place.
        kv_lens: int `[R]`, tokens of each request after this step, the new ones included.
        block_tables: int `[R * W]`, the pages of request 0, then those of request 1, ...
        query_start_loc: int `[R + 1]`, cumulative numbers of new tokens; tokens past the last one give 0 and are not stored.
        distribution: int `[3]`: decoding requests are those before its first entry, prompts those before its second; requests from
            its third on are not in use, whatever they hold. The first two are hints.
        softmax_scale: factor on the products; None means `1 / sqrt(r + e)`. Models want `1 / sqrt(d_nope + d_rope)` of the heads
            before absorption, which this function cannot know.
        sliding_window: w >= 1: only the last w keys, the query's own included.
        logits_soft_cap: c > 0 turns logits into `c * tanh(logits / c)`.
        mask_value: accepted for its callers; hidden keys have weight 0 exactly, whatever it is.
        q_scale: factor of what queries_nope and queries_pe hold; a number or scalar array; None is 1.
        k_scale: rows are stored divided by it and read multiplied by it; a number or scalar array; None is 1.
        v_scale: factor of the stored latents as values; None means k_scale, which is what they were divided by.
        cfg: config override for the attention.

    Returns:
        `[N, H, r]` in the queries' dtype, still to be multiplied with the value projection, and the cache.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.2 (absorption); Jiang et al., Ragged Paged Attention, 2025 (layout).
    """
    arrays, options, run = split(
        locals(),
        "queries_nope queries_pe keys_values keys_pe kv_cache kv_lens block_tables query_start_loc distribution q_scale k_scale "
        "v_scale",
    )
    return attend_after_storing(arrays, options, **run)


@public()
def multi_latent_ragged_page_attention_v2(
    queries_nope: t.LatentTokenQueries,
    queries_pe: t.RotaryTokenQueries,
    keys_values: t.NewLatents,
    keys_pe: t.NewRotaryKeys,
    kv_cache: t.LatentPages,
    kv_lens: t.ContextLengths,
    block_tables: t.FlatBlockTables,
    query_start_loc: t.QueryStarts,
    distribution: t.Distribution,
    **options: Unpack[LatentServingOptions],
) -> tuple[t.LatentTokenAttended, t.NewLatentPages]:
    """`multi_latent_ragged_page_attention` under the name of its second TPU kernel: the same arguments, cache and results.

    What differed there are the knobs of its config, of which each may be three numbers: for decoding, prompts and mixed batches.

    Args:
        queries_nope, queries_pe, keys_values, keys_pe, kv_cache, kv_lens, block_tables, query_start_loc, distribution, **options:
            see `multi_latent_ragged_page_attention`.

    Returns:
        `[N, H, r]` and the cache.

    Raises:
        ValueError, TypeError, NoKernelError: as there.

    Source: see `multi_latent_ragged_page_attention`.
    """
    described = (kv_lens, block_tables, query_start_loc, distribution)
    return multi_latent_ragged_page_attention(queries_nope, queries_pe, keys_values, keys_pe, kv_cache, *described, **options)


MultiLatentRaggedPageAttention = class_api("MultiLatentRaggedPageAttention", multi_latent_ragged_page_attention)
MultiLatentRaggedPageAttentionV2 = class_api("MultiLatentRaggedPageAttentionV2", multi_latent_ragged_page_attention_v2)
