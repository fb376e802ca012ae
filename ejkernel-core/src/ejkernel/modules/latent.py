"""Multi-head latent attention: keys and values are projections of one short latent vector per token."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.latent import latent
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_api

__all__ = ["FlashMLA", "MultiHeadLatentAttention", "flash_mla", "multi_head_latent_attention"]


@public("b_q", "b_k", "cu_seqlens")
def flash_mla(
    query: t.LatentQueries,
    key_value: t.Latents,
    w_kc: t.KeyProjection,
    w_vc: t.ValueProjection,
    *,
    b_q: t.RotaryQueries | None = None,
    b_k: t.RotaryKeys | None = None,
    softmax_scale: t.Scalar | None = None,
    causal: t.Flag = False,
    causal_alignment: t.CausalAlignment | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    mask_info: MaskInfo | None = None,
    bias: t.Bias | None = None,
    softmax_aux: t.Sinks | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    dropout_prob: t.Number = 0.0,
    dropout_seed: t.Seed | None = None,
    precision: t.PrecisionLike | None = None,
    absorbed: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.LatentAttended:
    """Latent attention: with `c = key_value`, keys are `[c . w_kc, b_k]`, values `c . w_vc`; softmax attention of query over them.

    Two forms of the same sum. The expanded one (default) makes keys and values of every head from the latents, which suits
    training and prefill. The absorbed one moves `w_kc` to the query and `w_vc` behind the weights, `(q . w_kc^T) . c` and
    `(sum_s p_s c_s) . w_vc`, so that all heads read one latent per token: it suits few queries over many keys.

    Args:
        query: `[B, T, H, d_nope]`, or `[B, T, H, d_nope + d_rope]` with b_k and without b_q.
        key_value: latents `[B, S, r]`.
        w_kc: `[r, K, d_nope]`; query head h reads head `h // (H // K)`.
        w_vc: `[r, K, V]`.
        b_q: rotary part of the query, `[B, T, H, d_rope]`, or `[B, T, d_rope]` for all heads.
        b_k: rotary part of the keys, shared by all heads, `[B, S, d_rope]`.
        softmax_scale: factor on the products; None means `1 / sqrt(d_nope + d_rope)`.
        causal: a query sees keys up to its own position.
        causal_alignment: see `flash_attention`.
        cu_seqlens: int `[R + 1]`, cumulative lengths of sequences packed into the tokens, B = 1.
        mask_info, bias, softmax_aux, sliding_window, chunk_size, logits_soft_cap, dropout_prob, dropout_seed, precision: see
            `flash_attention`.
        absorbed: compute the absorbed form.

    Returns:
        `[B, T, H, V]` in the query's dtype. All floating arguments have gradients.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1; the names of the arguments as in SGLang's and EasyDeL's latent attention.
    """
    arrays, options, run = split(
        locals(), "query key_value w_kc w_vc b_q b_k mask_info bias softmax_aux dropout_seed cu_seqlens"
    )
    return latent(arrays, options, **run)


multi_head_latent_attention = flash_mla
"""Another name of `flash_mla`."""

FlashMLA = class_api("FlashMLA", flash_mla)
MultiHeadLatentAttention = class_api("MultiHeadLatentAttention", flash_mla)
