"""Attention over blocks of keys that each query chooses."""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._dispatch.explanation import capturing
from ejkernel._pipeline.arguments import pick, public, split
from ejkernel.compositions.mesh import over_mesh, with_rows
from ejkernel.compositions.native_sparse_decode import decode_branches
from ejkernel.errors import invalid
from ejkernel.modules._class_api import class_api
from ejkernel.modules._frameworks import refuses_masks
from ejkernel.modules._options import DispatchOptions
from ejkernel.modules.dense_attention import flash_attention
from ejkernel.operations.common.options import as_count
from ejkernel.operations.common.pages import check_row_lengths
from ejkernel.operations.common.scale import as_scale, scaled
from ejkernel.operations.common.selected import NOTHING, check_integers
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.forms import check_cum_seqlens
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION, is_concrete
from ejkernel.operations.native_sparse_attention.forms import block_means, blocks_of
from ejkernel.operations.native_sparse_attention.interface import OPERATION as _SELECTED
from ejkernel.operations.native_sparse_selection.interface import OPERATION as _SELECTION
from ejkernel.utils.checks import check_array
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.tracing import is_traced

__all__ = [
    "ApplyNativeSparseAttention",
    "NativeSparseAttention",
    "apply_native_sparse_attention",
    "native_spare_attention",
    "native_sparse_attention",
]


@public("g_cmp", "g_slc", "block_indices", "block_counts", "cu_seqlens")
@refuses_masks("pack sequences with cu_seqlens, or use flash_attention")
def native_sparse_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    *,
    g_cmp: t.Gates | None = None,
    g_slc: t.Gates | None = None,
    block_indices: t.BlockIndices | None = None,
    block_counts: t.BlockCounts = 16,
    cu_seqlens: t.CumulativeLengths | None = None,
    block_size: t.Count = 64,
    window_size: t.Count = 0,
    g_swa: t.Gates | None = None,
    softmax_scale: t.Scalar | None = None,
    kv_lens: t.RowLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.Attended:
    """Causal attention in three branches: `out = g_cmp * compressed + g_slc * selected + g_swa * window`.

    The sequence is cut into blocks of block_size tokens. *compressed* attends to the means of the keys and values of every
    complete block, *selected* to the tokens of block_counts blocks, *window* to the last window_size tokens; each has a softmax
    of its own. Without block_indices a query selects, per key head: its own block, the one before, the first block, and then
    those with the largest weights in compressed attention, summed over the query heads of the key head; the earlier one of
    equals. No gradient passes through the choice.

    Args:
        query: `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        key: `[B, T, K, D]`; query head h reads key head `h // (H // K)`. With kv_lens a cache `[B, S, K, D]`.
        value: `[B, T, K, V]`; with kv_lens `[B, S, K, V]`.
        g_cmp: gate of the compressed branch `[B, T, H]`; None leaves the branch out of the sum.
        g_slc: gate of the selected branch `[B, T, H]`; None = 1.
        block_indices: integers `[B, T, K, S]`, used in place of the choice: block c of a query is the tokens from
            `c * block_size` on, counted from the start of its sequence. Negative numbers and blocks that begin after the query
            name nothing; a block named twice counts once.
        block_counts: how many blocks: an int, or integers `[B, T, K]`. Of given block_indices, the first so many count.
        cu_seqlens: integers `[n + 1]`, cumulative lengths of sequences packed along T; then B = 1. May be traced. Blocks begin
            with every sequence; queries past the last one give 0.
        block_size: tokens per block.
        window_size: keys of the window branch, the query's own included; 0 leaves the branch out.
        g_swa: gate of the window branch `[B, T, H]`; None = 1. Needs a window.
        softmax_scale: factor on the products of all branches; None = `1 / sqrt(D)`.
        kv_lens: int `[B]`, for decoding: tokens of each row in its cache, the new one included. Then T = 1 and S is free: the query
            is token `kv_lens - 1`, and what stands after it is not read. The selected and window branches read the tokens that they
            name alone. Means of blocks, for g_cmp and for the choice, are formed from the whole cache.
        platform: None or "auto", one platform, or several in order of preference; of every branch's attention.
        cfg: config override for the chosen implementation of the selected branch.
        mesh: run inside `jax.shard_map` on this mesh; batch and heads may be split.
        in_specs: one PartitionSpec or None for each array up to cu_seqlens, in order, and then g_swa; kv_lens is split as the
            rows of query are.
        out_specs: PartitionSpec of the result.

    Returns:
        `[B, T, H, V]` in the query's dtype. A query that sees nothing in a branch gets 0 from it.

    Source: Yuan et al., Native Sparse Attention, 2025 (with means as its compression).
    """
    arrays, options, run = split(
        locals(), "query key value g_cmp g_slc block_indices block_counts cu_seqlens g_swa kv_lens", "scale=softmax_scale"
    )
    bind.check_query_key_value(query, key, value)
    window_size = as_count("window_size", window_size, 0)
    if g_swa is not None and not window_size:
        raise invalid("g_swa", "a gate", "None without a window", remedy="pass window_size=")
    for name in ("g_cmp", "g_slc", "g_swa"):
        if (gate := arrays[name]) is not None:
            check_array(name, gate)
            if tuple(gate.shape) != tuple(query.shape[:3]):
                raise invalid(name, f"shape {tuple(gate.shape)}", f"[B,T,H] = {tuple(query.shape[:3])}")
    counts = _as_counts(block_counts, query.shape[:2] + key.shape[2:3])
    _check_lengths(query, key, cu_seqlens, kv_lens)
    if isinstance(counts, int):
        arrays["block_counts"] = None
    block_size = as_count("block_size", block_size, 1)
    options |= {
        "count": _most_blocks(counts, key.shape[1], block_size) if block_indices is None else _static(counts),
        "block_size": block_size,
        "window_size": window_size,
        "scale": softmax_scale if is_traced(softmax_scale) else as_scale(softmax_scale, query.shape[3]),
    }
    if kv_lens is not None:
        run["in_specs"] = with_rows(in_specs, tuple(arrays)[:-1])
    return over_mesh(_branches, arrays, options, **run)


@public("g_cmp", "g_slc", "block_indices", "block_counts", "block_size", "scale", "cu_seqlens")
@refuses_masks("pack sequences with cu_seqlens, or use flash_attention")
def native_spare_attention(
    q: t.Queries,
    k: t.Keys,
    v: t.Values,
    *,
    g_cmp: t.Gates | None = None,
    g_slc: t.Gates | None = None,
    block_indices: t.BlockIndices | None = None,
    block_counts: t.BlockCounts = 16,
    block_size: t.Count = 64,
    scale: t.Scalar | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    window_size: t.Count = 0,
    g_swa: t.Gates | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.Attended:
    """`native_sparse_attention` under its historical spelling, argument names and order.

    Args:
        q, k, v: `[B, T, H, D]`, `[B, T, K, D]`, `[B, T, K, V]`: query, key and value.
        scale: softmax_scale.
        g_cmp, g_slc, block_indices, block_counts, block_size, cu_seqlens, window_size, g_swa, platform, cfg: see
            `native_sparse_attention`.

    Returns:
        `[B, T, H, V]`.
    """
    given = pick(
        locals(),
        "query=q key=k value=v softmax_scale=scale g_cmp g_slc block_indices block_counts cu_seqlens block_size window_size g_swa "
        "platform cfg",
    )
    return native_sparse_attention(**given)


@overload
def apply_native_sparse_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    block_indices: t.BlockIndices,
    *,
    block_counts: t.BlockCounts | None = None,
    block_size: t.Count = 64,
    softmax_scale: t.Scalar | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[DispatchOptions],
) -> t.Attended: ...


@overload
def apply_native_sparse_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    block_indices: t.BlockIndices,
    *,
    block_counts: t.BlockCounts | None = None,
    block_size: t.Count = 64,
    softmax_scale: t.Scalar | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_lse: Literal[True],
    **options: Unpack[DispatchOptions],
) -> tuple[t.Attended, t.LogSumExp]: ...


@overload
def apply_native_sparse_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    block_indices: t.BlockIndices,
    *,
    block_counts: t.BlockCounts | None = None,
    block_size: t.Count = 64,
    softmax_scale: t.Scalar | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_lse: t.Flag,
    **options: Unpack[DispatchOptions],
) -> t.Attended | tuple[t.Attended, t.LogSumExp]: ...


@public("block_counts", "block_size", "softmax_scale", "cu_seqlens")
def apply_native_sparse_attention(
    query: t.Queries,
    key: t.Keys,
    value: t.Values,
    block_indices: t.BlockIndices,
    *,
    block_counts: t.BlockCounts | None = None,
    block_size: t.Count = 64,
    softmax_scale: t.Scalar | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_lse: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.Attended | tuple[t.Attended, t.LogSumExp]:
    """The selected branch alone: causal softmax attention over the tokens of the blocks that each query names.

    Args:
        query: `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        key: `[B, T, K, D]`; query head h reads key head `h // (H // K)`.
        value: `[B, T, K, V]`.
        block_indices: integers `[B, T, K, S]`; see `native_sparse_attention`.
        block_counts: how many of the S entries count: an int, integers `[B, T, K]`, or None for all.
        block_size: tokens per block.
        softmax_scale: factor on the products; None = `1 / sqrt(D)`.
        cu_seqlens: integers `[n + 1]`, cumulative lengths of packed sequences, with B = 1; may be traced.
        return_lse: return the log-sum-exp too.

    Returns:
        `[B, T, H, V]` in the query's dtype, 0 for a query that names no block; with `return_lse` also float32 `[B, T, H]`,
        natural logarithm, -inf there, differentiable.

    Source: Yuan et al., Native Sparse Attention, 2025, section 3.3.2.
    """
    arrays, options, run = split(locals(), "query key value block_indices cu_seqlens")
    if getattr(block_counts, "ndim", 0) > 0:
        arrays["block_counts"] = options.pop("block_counts")
    return _SELECTED.invoke(arrays, options, **run)


def _branches(
    *,
    query: Any,
    key: Any,
    value: Any,
    g_cmp: Any,
    g_slc: Any,
    block_indices: Any,
    block_counts: Any,
    cu_seqlens: Any,
    g_swa: Any,
    kv_lens: Any,
    count: int | None,
    block_size: int,
    window_size: int,
    scale: Any,
    platform: Any,
    cfg: Any,
) -> Any:
    """The gated sum, on checked arguments."""
    parts: list[tuple[Any, Any]] = []
    computed, dtype = block_indices is None, query.dtype
    if not capturing():
        query, key, value = bind.in_one_dtype(query, key, value)
        query, scale = scaled(query, scale, query.shape[3])
    if kv_lens is not None:
        found = decode_branches(
            query=query,
            key=key,
            value=value,
            block_indices=block_indices,
            block_counts=block_counts,
            kv_lens=kv_lens,
            compressed=g_cmp is not None,
            count=block_indices.shape[3] if count is None else count,
            block_size=block_size,
            window_size=window_size,
            scale=scale,
            platform=platform,
            cfg=cfg,
        )
        parts = [(gate, out) for gate, out in zip((g_cmp, g_slc, g_swa), found, strict=True) if out is not None]
        return _gated_sum(parts).astype(dtype)
    if computed and capturing():
        # The choice needs numbers, and what is explained is the branch that follows it.
        block_indices = jax.ShapeDtypeStruct((*key.shape[:3], count or 0), jnp.int32)
    elif computed or (g_cmp is not None and not capturing()):
        compressed, block_indices = _compressed(
            query,
            key,
            value,
            block_indices,
            block_counts,
            cu_seqlens,
            count=count,
            block_size=block_size,
            scale=scale,
            platform=platform,
        )
        parts += [(g_cmp, compressed)] if g_cmp is not None else []
    arrays = {"query": query, "key": key, "value": value, "block_indices": block_indices, "cu_seqlens": cu_seqlens}
    options: dict[str, Any] = {"block_size": block_size, "softmax_scale": scale, "is_distinct": computed}
    (options if block_counts is None else arrays)["block_counts"] = count if block_counts is None else block_counts
    parts.append((g_slc, _SELECTED.invoke(arrays, options, platform=platform, cfg=cfg)))
    if window_size:
        window = flash_attention(
            query,
            key,
            value,
            cum_seqlens_q=cu_seqlens,
            causal=True,
            sliding_window=(window_size - 1, 0),
            softmax_scale=scale,
            platform=platform,
        )
        parts.append((g_swa, window))
    return _gated_sum(parts).astype(dtype)


def _compressed(
    query: Any,
    key: Any,
    value: Any,
    block_indices: Any,
    block_counts: Any,
    cu_seqlens: Any,
    *,
    count: int | None,
    block_size: int,
    scale: float,
    platform: Any,
) -> tuple[Any, Any]:
    """Attention over block means, and the chosen blocks in place of missing indices."""
    blocks = blocks_of(query.shape[1], block_size, cu_seqlens)
    keys, values = (block_means(x, block_size, blocks, cu_seqlens) for x in (key, value))
    arrays = {
        "query": query,
        "key": keys,
        "value": values,
        "query_positions": jnp.arange(query.shape[1], dtype=jnp.int32)[None],
        "key_positions": (blocks.starts + (block_size - 1))[None],
    }
    if cu_seqlens is not None:
        arrays |= {"query_segments": blocks.token_sequences[None], "key_segments": blocks.sequences[None]}
    options = {"causal": True, "softmax_scale": scale, "return_lse": True}
    out, lse = _FLASH_ATTENTION.invoke(arrays, options, platform=platform)
    if block_indices is None:
        entries = keys.shape[1] if count is None else min(count, keys.shape[1])
        selection = {
            "query": query,
            "means": keys,
            "lse": lse,
            "own_blocks": jnp.where(blocks.token_sequences < 0, NOTHING, blocks.token_numbers)[None],
            "first_blocks": None if cu_seqlens is None else blocks.token_entries[None],
            "block_counts": block_counts,
        }
        block_indices = _SELECTION.invoke(selection, {"count": entries, "softmax_scale": scale}, platform=platform)
    return out, block_indices


def _gated_sum(parts: list[tuple[Any, Any]]) -> Any:
    """`sum of gate * out`, in float32 at least, in the outputs' dtype."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1]
    dtype = parts[0][1].dtype
    wide = accumulator(dtype)
    terms = [out.astype(wide) if gate is None else gate.astype(wide)[..., None] * out.astype(wide) for gate, out in parts]
    return functools.reduce(operator.add, terms).astype(dtype)


def _as_counts(block_counts: Any, rows: tuple[int, ...]) -> Any:
    """An int, or integers `[B,T,K]`."""
    if getattr(block_counts, "ndim", 0) == 0:
        return as_count("block_counts", block_counts, 0)
    check_integers("block_counts", block_counts)
    if tuple(block_counts.shape) != tuple(rows):
        raise invalid("block_counts", f"shape {tuple(block_counts.shape)}", f"an int, or [B,T,K] = {tuple(rows)}")
    return block_counts


def _static(counts: Any) -> int | None:
    return counts if isinstance(counts, int) else None


def _most_blocks(counts: Any, length: int, block_size: int) -> int:
    """The most blocks that a query may read. Counts that are traced say nothing, and then it is all blocks."""
    every = -(-length // block_size)
    if isinstance(counts, int):
        return min(counts, every)
    return min(max(int(counts.max()), 0), every) if is_concrete(counts) and counts.size else every


def _check_lengths(query: Any, key: Any, cu_seqlens: Any, kv_lens: Any) -> None:
    if kv_lens is not None:
        check_row_lengths(kv_lens, query, key, "key")
        if cu_seqlens is not None:
            raise invalid("cu_seqlens", "an array", "None beside kv_lens", remedy="a cache has a row for each sequence")
        if query.shape[1] != 1:
            raise invalid("query", f"{query.shape[1]} tokens", "1 with kv_lens", remedy="decode them one after the other")
        return
    if key.shape[1] != query.shape[1]:
        raise invalid("key", f"length {key.shape[1]}", f"the query's {query.shape[1]}")
    if cu_seqlens is None:
        return
    check_cum_seqlens("cu_seqlens", cu_seqlens, query.shape[1])
    if query.shape[0] != 1:
        raise invalid("query", f"batch {query.shape[0]}", "batch 1 with cu_seqlens", remedy="pack the sequences along T")


NativeSparseAttention = class_api("NativeSparseAttention", native_sparse_attention)
ApplyNativeSparseAttention = class_api("ApplyNativeSparseAttention", apply_native_sparse_attention)
