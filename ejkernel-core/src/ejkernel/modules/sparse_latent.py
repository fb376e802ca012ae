"""Latent attention over tokens that an indexer chooses."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.sparse_latent import sparse_latent
from ejkernel.modules._class_api import class_api

__all__ = ["DeepSeekAttention", "deepseek_attn"]


@public("b_q", "b_k")
def deepseek_attn(
    query: t.LatentQueries,
    key_value: t.Latents,
    w_kc: t.KeyProjection,
    w_vc: t.ValueProjection,
    query_index: t.IndexQueries,
    key_index: t.IndexKeys,
    index_weights: t.IndexWeights,
    *,
    b_q: t.RotaryQueries | None = None,
    b_k: t.RotaryKeys | None = None,
    index_topk: t.Count = 2048,
    softmax_scale: t.Scalar | None = None,
    index_softmax_scale: t.Scalar | None = None,
    causal: t.Flag = True,
    kv_lens: t.RowLengths | None = None,
    key_index_scale: t.IndexKeyScales | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.LatentAttended:
    """DeepSeek sparse attention: latent attention over the index_topk tokens that an indexer ranks highest.

    The indexer's score of token s for query t is `I = sum_h index_weights[t,h] relu(index_softmax_scale * query_index[t,h] .
    key_index[s])`; the largest are kept, the earlier one of equals. Over those, with c = key_value,
    `out[t,h] = softmax_s(softmax_scale * (q_nope[t,h] . (c[s] w_kc) + q_rope[t,h] . b_k[s])) . (c[s] w_vc)`.
    Keys and values are never formed: w_kc is applied to the query and w_vc to the result. The choice passes no gradient, so
    those of query_index, key_index and index_weights are 0; the loss that trains an indexer is not part of this.

    Args:
        query: `[B, T, H, D]`, float32, bfloat16, float16 or float64. D is d_nope; or d_nope + d_rope, the rope part last, when
            b_k is given without b_q.
        key_value: latents `[B, T, r]`; or a cache `[B, S, r]` with kv_lens, of which the last tokens in use are those of the query.
        w_kc: `[r, K, d_nope]`; query head h reads key head `h // (H // K)`.
        w_vc: `[r, K, V]`.
        query_index: `[B, T, I, E]`; float8_e4m3fn too, where index_weights are multiplied by what it was divided by.
        key_index: `[B, T, E]`, or `[B, S, E]`, in query_index's dtype.
        index_weights: `[B, T, I]`.
        b_q: rope part of the queries `[B, T, H, d_rope]`, or `[B, T, d_rope]` shared by the heads. Needs b_k.
        b_k: rope part of the keys `[B, T, d_rope]`, or `[B, S, d_rope]`, shared by the heads.
        index_topk: tokens per query; all that there are if there are fewer.
        softmax_scale: None = `1 / sqrt(d_nope + d_rope)`.
        index_softmax_scale: > 0, so it does not change which scores are largest; None = `1 / sqrt(E)`.
        causal: a query sees tokens up to its own; False: all.
        kv_lens: int `[B]`, for decoding: tokens of each row in its cache, the T new ones included. Query t is token
            `kv_lens - T + t`; what stands in the cache after the tokens in use is not read. One new token reads index_topk latents
            of its cache and the indexer's keys, nothing else. None: the S = T tokens are those of the queries.
        key_index_scale: factor on the scores of each token, `[B, T]` or `[B, S]`: what its key_index was divided by. None = 1.
        platform: None or "auto", one platform, or several in order of preference; of the indexer too.
        cfg: config override for the chosen implementation of the attention.
        mesh: run inside `jax.shard_map` on this mesh; batch and heads may be split (w_kc and w_vc along K, or whole for K = 1).
        in_specs: one PartitionSpec or None for each array up to b_k, in order; kv_lens and
            key_index_scale are split as the rows of query are.
        out_specs: PartitionSpec of the result.

    Returns:
        `[B, T, H, V]` in the query's dtype.

    Source: DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1; DeepSeek-V2, 2024, section 2.1 (latent attention).
    """
    arrays, options, run = split(
        locals(),
        "query key_value w_kc w_vc query_index key_index index_weights b_q b_k kv_lens key_index_scale",
    )
    return sparse_latent(arrays, options, **run)


DeepSeekAttention = class_api("DeepSeekAttention", deepseek_attn)
