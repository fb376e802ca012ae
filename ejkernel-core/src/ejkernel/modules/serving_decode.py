"""One decoding step over caches without a page table of their own."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._dispatch.explanation import capturing
from ejkernel._pipeline.arguments import public, split
from ejkernel.call.partition import mesh_of
from ejkernel.call.records import Bound
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.options import as_count
from ejkernel.operations.common.pages import check_lengths
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_attention.first_keys import traced_limits
from ejkernel.utils.checks import check_array, check_shape
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import refuse_traced

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
    page_size = as_count("page_size", page_size, 1)
    if getattr(req_to_tokens, "ndim", 0) == 2:
        room = req_to_tokens.shape[1] * page_size
        check_lengths("seq_lens", seq_lens, room, f"what {req_to_tokens.shape[1]} entries of {page_size} tokens hold")
    options |= {"page_size": page_size, "sliding_window": _paged.window_of(sliding_window)}
    options |= {"return_lse": True, "form": _flat_buffer}
    names = {"kv_lens": "seq_lens", "block_tables": "req_to_tokens"}
    derived = functools.partial(_paged.scale_specs, "pthd")
    with argument_names(key_pages="key_buffer", value_pages="value_buffer", **names):
        return over_mesh(_paged.attend, arrays, options, positional=tuple(arrays)[:5], derived=derived, **run)


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
    if sliding_window is not None and not isinstance(sliding_window, (tuple, list)):
        refuse_traced("sliding_window", sliding_window, "a pair (left, right)")
        width = as_count("sliding_window", sliding_window, 1)
        remedy = f"({width - 1}, 0) for the last {width} keys"
        raise wrong_type("sliding_window", width, "a pair (left, right)", remedy=remedy)
    if getattr(key, "ndim", 0) == 4:
        for name, bounds in (("sequence_start", sequence_start), ("sequence_end", sequence_end)):
            check_lengths(name, bounds, key.shape[1], "the keys of each row")
    options |= {"sliding_window": _paged.window_of(sliding_window), "form": _dense_cache}
    derived = functools.partial(_paged.scale_specs, "pthd")
    with argument_names(key_pages="key", value_pages="value"):
        return over_mesh(_attend_sequences, arrays, options, positional=tuple(arrays)[:6], derived=derived, **run)


def _attend_sequences(**given: Any) -> Any:
    """`paged_attention` of all sequences at once, or of each alone on a mesh: pages in common are not split."""
    own = {name: given[name] for name in ("query", "key", "value", "sequence_start", "sequence_end")}
    _check_sequences(**own)
    if capturing() or not own["query"].shape[0] or mesh_of(own) is None:
        return _paged.attend(**given)
    own |= {name: given[name] for name in ("k_scale", "v_scale") if getattr(given[name], "ndim", 0) == 3}
    return jax.vmap(lambda one: _paged.attend(**{**given, **{name: x[None] for name, x in one.items()}})[0])(own)


def _flat_buffer(
    *, key_pages: Any, value_pages: Any, page_size: int = 1, k_scale: Any = None, v_scale: Any = None, **rest: Any
) -> Bound:
    def paged(name: str, buffer: Any) -> Any:
        check_array(name, buffer, ndim=3, floating=False)
        if buffer.shape[0] % page_size:
            raise invalid("page_size", page_size, f"a divisor of the {buffer.shape[0]} tokens of {name}")
        return buffer.reshape(buffer.shape[0] // page_size, page_size, *buffer.shape[1:])

    return _paged.one_token_each(
        key_pages=paged("key_buffer", key_pages),
        value_pages=paged("value_buffer", value_pages),
        k_scale=_of_rows("k_scale", k_scale, key_pages.shape[:1], "[tokens, K]", page_size),
        v_scale=_of_rows("v_scale", v_scale, key_pages.shape[:1], "[tokens, K]", page_size),
        **rest,
    )


def _of_rows(name: str, scale: Any, rows: tuple[int, ...], meaning: str, page_size: int) -> Any:
    """A scale of each stored row `[*rows, K]` by pages; any other as it is."""
    if len(getattr(scale, "shape", ())) != len(rows) + 1:
        return scale
    check_shape(name, scale, (*rows, scale.shape[-1]), meaning)
    return scale.reshape(math.prod(rows) // page_size, page_size, scale.shape[-1])


def _check_sequences(*, query: Any, key: Any, value: Any, sequence_start: Any, sequence_end: Any) -> None:
    """Of `ragged_decode_attention`: shapes and types of what each sequence has of its own."""
    one_axis_more = getattr(query, "ndim", 0) == 4
    if one_axis_more and query.shape[1] != 1:
        raise invalid("query", f"{query.shape[1]} tokens per sequence", "[B, H, D] or [B, 1, H, D]")
    check_array("query", query, ndim=4 if one_axis_more else 3)
    for name, array in (("key", key), ("value", value)):
        check_array(name, array, ndim=4, floating=False)
        if array.shape[0] != query.shape[0]:
            raise invalid(name, f"batch size {array.shape[0]}", f"the query's {query.shape[0]}")
        if array.shape[1:3] != key.shape[1:3]:
            raise invalid(name, f"shape {tuple(array.shape)}", f"the {key.shape[1]} tokens and {key.shape[2]} heads of the key")
    for name, array in (("sequence_start", sequence_start), ("sequence_end", sequence_end)):
        check_array(name, array, ndim=1, floating=False)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise wrong_type(name, f"dtype {array.dtype}", "integers")
        check_shape(name, array, tuple(query.shape[:1]), "[B]")


def _dense_cache(
    *,
    query: Any,
    key: Any,
    value: Any,
    sequence_start: Any,
    sequence_end: Any,
    sliding_window: Any = None,
    chunk_size: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rest: Any,
) -> Bound:
    """Every token of the cache is a page of its own, so that a sequence may start anywhere: also where a traced window does."""
    one_axis_more = query.ndim == 4
    query = query[:, 0] if one_axis_more else query
    batch, length = key.shape[:2]
    start, end = (jnp.clip(as_int32(x), 0, length) for x in (sequence_start, sequence_end))
    window, chunk = traced_limits(sliding_window, chunk_size, causal=True)
    first = start
    if window is not None or chunk is not None:
        if chunk_size is not None:
            chunk = as_count("chunk_size", chunk_size, 1) if chunk is None else chunk
            first = start + jnp.maximum(end - 1 - start, 0) // chunk * chunk
        if window is not None:
            first, sliding_window = jnp.maximum(first, end - window), None
        chunk_size = None

    def rows(cache: Any) -> Any:
        if batch * length == 0:  # of explicit shardings JAX cannot merge such axes
            return jnp.zeros((0, 1, *cache.shape[2:]), cache.dtype)
        return cache.reshape(batch * length, 1, *cache.shape[2:])

    tokens = jnp.arange(length, dtype=jnp.int32)
    bound = _paged.one_token_each(
        query=query,
        key_pages=rows(key),
        value_pages=rows(value),
        kv_lens=jnp.maximum(end - first, 0),
        block_tables=jnp.arange(batch, dtype=jnp.int32)[:, None] * length + first[:, None] + tokens[None],
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        k_scale=_of_rows("k_scale", k_scale, (batch, length), "[B, S, K]", 1),
        v_scale=_of_rows("v_scale", v_scale, (batch, length), "[B, S, K]", 1),
        **rest,
    )
    finish = (lambda outputs: bound.finish(outputs)[:, None]) if one_axis_more else bound.finish
    return Bound(bound.call, bound.inputs, finish)


DecodeAttention = class_api("DecodeAttention", decode_attention)
RaggedDecodeAttention = class_api("RaggedDecodeAttention", ragged_decode_attention)
