"""Latent attention over a paged cache, for serving: store the new latents, then attend."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._dispatch.explanation import capturing
from ejkernel._pipeline.arguments import pick, public
from ejkernel.call.records import Bound
from ejkernel.errors import argument_names, invalid
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import LatentServingOptions
from ejkernel.operations.common.options import as_number
from ejkernel.operations.latent_paged_attention.interface import OPERATION as _LATENT_PAGED_ATTENTION
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_cache_update.interface import OPERATION as _PAGED_CACHE_UPDATE
from ejkernel.utils.checks import check_array, check_compute, check_shape

__all__ = [
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionV2",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
]

_LANES = 128


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
    described = "kv_lens block_tables query_start_loc distribution"
    attended = pick(locals(), f"queries_nope queries_pe {described} q_scale k_scale v_scale")
    new = pick(locals(), f"keys_values keys_pe k_scale {described}")
    if mask_value is not None:
        as_number("mask_value", mask_value)
    for name, array, rank in (("keys_values", keys_values, 2), ("keys_pe", keys_pe, 2), ("kv_cache", kv_cache, 4)):
        check_array(name, array, ndim=rank, floating=False)
    for name, array in (("keys_values", keys_values), ("keys_pe", keys_pe)):
        if array.dtype != kv_cache.dtype:
            check_compute(name, array)
    check_array("queries_nope", queries_nope, ndim=3)
    check_array("queries_pe", queries_pe, ndim=3)
    tokens, heads, _ = queries_nope.shape
    check_shape("queries_pe", queries_pe, (tokens, heads, queries_pe.shape[2]), "[N, H, e] with the N and H of queries_nope")
    check_shape("keys_values", keys_values, (tokens, keys_values.shape[1]), "[N, r] with the N of queries_nope")
    check_shape("keys_pe", keys_pe, (tokens, keys_pe.shape[1]), "[N, e] with the N of queries_nope")
    page_size = kv_cache.shape[1] * kv_cache.shape[2]
    _paged.check_distributed(query_start_loc, kv_lens, block_tables, distribution, tokens=tokens, page_size=page_size)
    options = _paged.settings(
        softmax_scale=softmax_scale, sliding_window=_paged.window_of(sliding_window), logits_soft_cap=logits_soft_cap
    )
    with argument_names(query_nope="queries_nope", query_pe="queries_pe", key_pages="kv_cache", pages="kv_cache"):
        updated: Any = kv_cache
        if not capturing():  # an explanation is asked of the attention
            stored = {"kv_cache": kv_cache, **new}
            updated = _PAGED_CACHE_UPDATE.invoke(stored, {}, form=_store, platform=platform, cfg=_for_update(cfg))
        attended["kv_cache"] = updated
        out = _LATENT_PAGED_ATTENTION.invoke(attended, options, form=_attend, platform=platform, cfg=cfg)
    return out, updated


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


def _for_update(cfg: Any) -> Any:
    """A portable config is for both steps, one of an implementation for the attention alone."""
    return cfg if "paged_cache_update" in getattr(cfg, "operations", ()) else None


def _rounded_up(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _described(
    kv_cache: Any, kv_lens: Any, block_tables: Any, query_start_loc: Any, distribution: Any
) -> tuple[Any, dict[str, Any]]:
    """The cache as `[P, page_size, C]`, and the requests that are in use."""
    pages, groups, packing, channels = kv_cache.shape
    described = _paged.distributed(query_start_loc, kv_lens, block_tables, distribution)
    return kv_cache.reshape(pages, groups * packing, channels), described


def _store(*, kv_cache: Any, keys_values: Any, keys_pe: Any, k_scale: Any = None, **requests: Any) -> Bound:
    """Canonicalise the update of one array of pages: a cache whose values have no channels."""
    size, rotary = keys_values.shape[1], keys_pe.shape[1]
    _check_channels(kv_cache, size, rotary)
    widths = _rounded_up(size) - size, _rounded_up(rotary) - rotary
    parts = [jnp.pad(part, ((0, 0), (0, width))) for part, width in zip((keys_values, keys_pe), widths, strict=True)]
    rows = jnp.concatenate(parts, axis=-1)[:, None]
    pages, described = _described(kv_cache, **requests)
    pages = pages[:, :, None]
    bound = _PAGED_CACHE_UPDATE.canonicalise(
        key=rows, value=rows[..., :0], key_pages=pages, value_pages=pages[..., :0], k_scale=k_scale, **described
    )
    return Bound(bound.call, bound.inputs, lambda outputs: bound.finish(outputs)[0].reshape(kv_cache.shape))


def _attend(
    *,
    kv_cache: Any,
    queries_nope: Any,
    queries_pe: Any,
    kv_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    distribution: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **options: Any,
) -> Bound:
    size = queries_nope.shape[2]
    _check_channels(kv_cache, size, queries_pe.shape[2])
    pages, described = _described(kv_cache, kv_lens, block_tables, query_start_loc, distribution)
    if q_scale is not None and jnp.size(q_scale) != 1:
        raise invalid("q_scale", f"shape {jnp.shape(q_scale)}", "a number or a scalar array")
    factors = [jnp.asarray(scale, jnp.float32) for scale in (q_scale, k_scale) if scale is not None]
    return _LATENT_PAGED_ATTENTION.canonicalise(
        queries_nope,
        queries_pe,
        pages,
        **described,
        k_scale=None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1],
        v_scale=k_scale if v_scale is None else v_scale,
        pe_offset=_rounded_up(size),
        **options,
    )


def _check_channels(kv_cache: Any, size: int, rotary: int) -> None:
    need = _rounded_up(size), _rounded_up(rotary)
    if kv_cache.shape[3] != sum(need):
        meaning = f"{need[0]} + {need[1]}: latents of {size} and rotary parts of {rotary}, each rounded up to {_LANES}"
        raise invalid("kv_cache", f"{kv_cache.shape[3]} channels", meaning)


MultiLatentRaggedPageAttention = class_api("MultiLatentRaggedPageAttention", multi_latent_ragged_page_attention)
MultiLatentRaggedPageAttentionV2 = class_api("MultiLatentRaggedPageAttentionV2", multi_latent_ragged_page_attention_v2)
