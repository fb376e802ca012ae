"""One decoding step over caches without a page table of their own."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.decode import decode_rows, decode_slots
from ejkernel.modules._class_api import class_api

__all__ = ["DecodeAttention", "RaggedDecodeAttention", "decode_attention", "ragged_decode_attention"]


@public()
def decode_attention(
    query: t.TokenQueries,
    key_buffer: t.KeySlots,
    value_buffer: t.ValueSlots,
    req_to_tokens: t.BlockTables,
    seq_lens: t.ContextLengths,
    *,
    softmax_scale: t.Scalar | None = None,
    page_size: t.Count = 1,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    softmax_aux: t.Sinks | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> tuple[t.TokenAttended, t.TokenLogSumExp]:
    """One decoding step over a flat buffer of tokens, with the log-sum-exp that combines it with other parts of the context.

    Args:
        query: `[R, H, D]`, one token per request.
        key_buffer: `[tokens, K, D]`.
        value_buffer: `[tokens, K, V]`.
        req_to_tokens: int `[R, W]`: the slots of each request's tokens in order, or with page_size the pages of so many slots.
        seq_lens: int `[R]`, tokens of each request; 0 gives 0 and a log-sum-exp of -inf.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        page_size: slots per entry of req_to_tokens; the buffers hold whole pages.
        sliding_window: w: the last w tokens; `(left, right)` means `left + 1`.
        chunk_size: see `unified_attention`; a multiple of page_size.
        logits_soft_cap: c > 0.
        softmax_aux: sinks, see `unified_attention`, as are k_scale and v_scale.
        mesh: run inside `jax.shard_map` on this mesh; requests and heads may be split.
        in_specs: one PartitionSpec or None for each positional array, in order.
        out_specs: PartitionSpecs of the two results.

    Returns:
        `[R, H, V]` in the query's dtype, and float32 `[R, H]`, natural logarithm, sinks included.

    Source: Dao et al., Flash-Decoding for long-context inference, 2023.
    """
    arrays, options, run = split(
        locals(),
        "query key_pages=key_buffer value_pages=value_buffer block_tables=req_to_tokens kv_lens=seq_lens softmax_aux k_scale "
        "v_scale",
    )
    return decode_slots(arrays, options, **run)


@public("softmax_aux")
def ragged_decode_attention(
    query: t.DecodeQueries,
    key: t.CacheKeys,
    value: t.CacheValues,
    sequence_start: t.Lengths,
    sequence_end: t.Lengths,
    *,
    softmax_aux: t.Sinks | None = None,
    softmax_scale: t.Scalar | None = None,
    sliding_window: t.WindowPair | None = None,
    chunk_size: t.TracedCount | None = None,
    logits_soft_cap: t.Number | None = None,
    k_scale: t.StoredScale | None = None,
    v_scale: t.StoredScale | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.DecodeAttended:
    """One decoding step over a dense cache: query b, at `sequence_end[b] - 1`, sees keys from `sequence_start[b]` on.

    Args:
        query: `[B, H, D]`, or `[B, 1, H, D]`.
        key: `[B, S, K, D]`.
        value: `[B, S, K, V]`.
        sequence_start: int `[B]`, the first key of each sequence (left padding before it is never read).
        sequence_end: int `[B]`, one past the last key, at most S; an empty range gives 0.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        sliding_window: `(left, right)`, inclusive, so the last `left + 1` keys. An int is refused: here it has meant both w and
            2 w + 1 keys.
        chunk_size: only the keys of the query's own chunk of so many, counted from sequence_start, are visible.
        logits_soft_cap: c > 0.
        k_scale: factor of stored keys: a number, a scalar array, `[K]`, or `[B, S, K]` for each stored row; None is 1.
        v_scale: the same for values.
        mesh: run inside `jax.shard_map` on this mesh; batch and heads may be split.
        in_specs: one PartitionSpec or None for each array up to softmax_aux, in order.
        out_specs: PartitionSpec of the output.

    Returns:
        Like query, with the values' head size.

    Source: Dao et al., Flash-Decoding for long-context inference, 2023.
    """
    arrays, options, run = split(locals(), "query key value sequence_start sequence_end softmax_aux k_scale v_scale")
    return decode_rows(arrays, options, **run)


DecodeAttention = class_api("DecodeAttention", decode_attention)
RaggedDecodeAttention = class_api("RaggedDecodeAttention", ragged_decode_attention)
