"""Native sparse attention: the gated sum of attention over block means, over blocks that queries choose, and over a window."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.explanation import capturing
from ejkernel.compositions.block_means import attend_means
from ejkernel.compositions.mesh import over_mesh, with_rows
from ejkernel.compositions.native_sparse_decode import decode_branches
from ejkernel.errors import invalid
from ejkernel.operations.common.options import as_count
from ejkernel.operations.common.pages import check_row_lengths
from ejkernel.operations.common.scale import as_scale, scaled
from ejkernel.operations.common.selected import NOTHING, check_integers
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.forms import add_packed, check_cum_seqlens, packed
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION, is_concrete
from ejkernel.operations.native_sparse_attention.forms import blocks_of
from ejkernel.operations.native_sparse_attention.interface import OPERATION as _SELECTED
from ejkernel.operations.native_sparse_selection.interface import OPERATION as _SELECTION
from ejkernel.utils.checks import check_array
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.tracing import is_traced


def native_sparse(arrays: dict[str, Any], options: dict[str, Any], *, in_specs: Any, **run: Any) -> Any:
    """`native_sparse_attention` with its arguments as `split` gives them."""
    query, key, kv_lens, block_counts = (arrays[name] for name in ("query", "key", "kv_lens", "block_counts"))
    bind.check_query_key_value(query, key, arrays["value"])
    window_size = as_count("window_size", options["window_size"], 0)
    _check_gates(arrays, window_size)
    counts = _as_counts(block_counts, query.shape[:2] + key.shape[2:3])
    _check_lengths(query, key, arrays["cu_seqlens"], kv_lens)
    if isinstance(counts, int):
        arrays["block_counts"] = None
    block_size = as_count("block_size", options["block_size"], 1)
    scale = options["softmax_scale"]
    if arrays["block_indices"] is None:
        count = _most_blocks(counts, key.shape[1], block_size)
    else:
        count = counts if isinstance(counts, int) else None
    options |= {
        "count": count,
        "block_size": block_size,
        "window_size": window_size,
        "softmax_scale": scale if is_traced(scale) else as_scale(scale, query.shape[3]),
    }
    if kv_lens is not None:
        in_specs = with_rows(in_specs, tuple(arrays)[:-1])
    return over_mesh(_branches, arrays, options, in_specs=in_specs, **run)


def _check_gates(arrays: dict[str, Any], window_size: int) -> None:
    """Gates are `[B,T,H]`, and one of the window needs a window."""
    if arrays["g_swa"] is not None and not window_size:
        raise invalid("g_swa", "a gate", "None without a window", remedy="pass window_size=")
    rows = tuple(arrays["query"].shape[:3])
    for name in ("g_cmp", "g_slc", "g_swa"):
        if (gate := arrays[name]) is not None:
            check_array(name, gate)
            if tuple(gate.shape) != rows:
                raise invalid(name, f"shape {tuple(gate.shape)}", f"[B,T,H] = {rows}")


def _as_counts(block_counts: Any, rows: tuple[int, ...]) -> Any:
    """An int, or integers `[B,T,K]`."""
    if getattr(block_counts, "ndim", 0) == 0:
        return as_count("block_counts", block_counts, 0)
    check_integers("block_counts", block_counts)
    if tuple(block_counts.shape) != tuple(rows):
        raise invalid("block_counts", f"shape {tuple(block_counts.shape)}", f"an int, or [B,T,K] = {tuple(rows)}")
    return block_counts


def _most_blocks(counts: Any, length: int, block_size: int) -> int:
    """The most blocks that a query may read. Counts that are traced say nothing, and then it is all blocks."""
    every = -(-length // block_size)
    if isinstance(counts, int):
        return min(counts, every)
    return min(max(int(counts.max()), 0), every) if is_concrete(counts) and counts.size else every


def _check_lengths(query: Any, key: Any, cu_seqlens: Any, kv_lens: Any) -> None:
    """Keys of a cache, for one query per row; or as many as queries, of sequences that may be packed."""
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
    softmax_scale: Any,
    platform: Any,
    cfg: Any,
) -> Any:
    """The gated sum, on checked arguments."""
    parts: list[tuple[Any, Any]] = []
    computed, dtype = block_indices is None, query.dtype
    if not capturing():
        query, key, value = bind.in_one_dtype(query, key, value)
        query, softmax_scale = scaled(query, softmax_scale, query.shape[3])
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
            scale=softmax_scale,
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
            scale=softmax_scale,
            platform=platform,
        )
        parts += [(g_cmp, compressed)] if g_cmp is not None else []
    arrays = {"query": query, "key": key, "value": value, "block_indices": block_indices, "cu_seqlens": cu_seqlens}
    options: dict[str, Any] = {"block_size": block_size, "softmax_scale": softmax_scale, "is_distinct": computed}
    (options if block_counts is None else arrays)["block_counts"] = count if block_counts is None else block_counts
    parts.append((g_slc, _SELECTED.invoke(arrays, options, platform=platform, cfg=cfg)))
    if window_size:
        parts.append((g_swa, _window(query, key, value, cu_seqlens, window_size, softmax_scale, platform)))
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
    positions = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    keys, out, lse = attend_means(query, key, value, blocks, block_size, positions, cu_seqlens, scale=scale, platform=platform)
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


def _window(query: Any, key: Any, value: Any, cu_seqlens: Any, size: int, scale: Any, platform: Any) -> Any:
    """Causal attention over the last tokens."""
    arrays = {"query": query, "key": key, "value": value}
    options = {"causal": True, "sliding_window": (size - 1, 0), "softmax_scale": scale}
    if cu_seqlens is not None:
        add_packed(arrays, options, cu_seqlens, None, layout="bthd")
    return _FLASH_ATTENTION.invoke(arrays, options, form=None if cu_seqlens is None else packed, platform=platform)


def _gated_sum(parts: list[tuple[Any, Any]]) -> Any:
    """`sum of gate * out`, in float32 at least, in the outputs' dtype."""
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1]
    dtype = parts[0][1].dtype
    wide = accumulator(dtype)
    terms = [out.astype(wide) if gate is None else gate.astype(wide)[..., None] * out.astype(wide) for gate, out in parts]
    return functools.reduce(operator.add, terms).astype(dtype)
