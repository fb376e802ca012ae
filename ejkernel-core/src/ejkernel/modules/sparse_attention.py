"""Attention over blocks of keys that each query chooses."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import pick, public, split
from ejkernel.compositions.frameworks import refuses_masks
from ejkernel.compositions.native_sparse import native_sparse
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import DispatchOptions
from ejkernel.operations.native_sparse_attention.interface import OPERATION as _SELECTED

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
    arrays, options, run = split(locals(), "query key value g_cmp g_slc block_indices block_counts cu_seqlens g_swa kv_lens")
    return native_sparse(arrays, options, **run)


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


NativeSparseAttention = class_api("NativeSparseAttention", native_sparse_attention)
ApplyNativeSparseAttention = class_api("ApplyNativeSparseAttention", apply_native_sparse_attention)
