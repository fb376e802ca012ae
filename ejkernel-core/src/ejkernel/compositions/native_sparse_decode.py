"""One decoding step of native sparse attention: attention over a few rows of a cache, for one query per row of the batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.explanation import capturing
from ejkernel.compositions.block_means import attend_means
from ejkernel.operations.common.selected import NOTHING, distinct
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.native_sparse_attention.forms import blocks_of
from ejkernel.operations.native_sparse_selection.interface import OPERATION as _SELECTION
from ejkernel.utils.integers import as_int32


def decode_branches(
    *,
    query: Any,
    key: Any,
    value: Any,
    block_indices: Any,
    block_counts: Any,
    kv_lens: Any,
    compressed: bool,
    count: int,
    block_size: int,
    window_size: int,
    scale: float,
    platform: Any,
    cfg: Any,
) -> tuple[Any, Any, Any]:
    """Outputs `[B,1,H,V]` of the compressed, selected and window branches; None for one that is not wanted.

    The selected and the window branch read the rows that they name, and no others. The compressed one, and the choice of blocks,
    need the means of all blocks, which are formed from the whole cache.

    Args:
        query: `[B,1,H,D]`, at position `kv_lens - 1`.
        key, value: caches `[B,S,K,D]`, `[B,S,K,V]`, of which the first kv_lens tokens of a row exist.
        block_indices: `[B,1,K,n]`, or None to choose them.
        block_counts: int32 `[B,1,K]`, how many of the indices count, or None for `count`.
        kv_lens: int32 `[B]`.
        compressed: whether that branch is wanted.
        count: the most blocks that a query reads.
        block_size, window_size, scale: as in `native_sparse_attention`.
        platform: of every branch.
        cfg: of the selected branch.
    """
    attend = functools.partial(_attend, scale=scale, platform=platform)
    if capturing():
        read = (count if block_indices is None else block_indices.shape[3]) * block_size
        return _explained(query, key, value, read, attend, cfg)
    position = as_int32(kv_lens) - 1
    summary = None
    if compressed or block_indices is None:
        blocks = blocks_of(key.shape[1], block_size, None)
        positions = position[:, None]
        keys, summary, lse = attend_means(
            query, key, value, blocks, block_size, positions, None, scale=scale, platform=platform
        )
        if block_indices is None:
            own = jnp.where(position < 0, NOTHING, position // block_size)[:, None]
            arrays = {"query": query, "means": keys, "lse": lse, "own_blocks": own, "block_counts": block_counts}
            options = {"count": min(count, keys.shape[1]), "softmax_scale": scale}
            # Every platform that has flash_attention runs the branches, but few select blocks: the default order does.
            block_indices = _SELECTION.invoke(arrays, options)
    selected = _selected(query, key, value, block_indices, block_counts, position, count, block_size, attend, cfg)
    window = None
    if window_size:
        tokens = position[:, None] - jnp.arange(window_size, dtype=jnp.int32)[None]
        keys, values = (jnp.take_along_axis(x, jnp.maximum(tokens, 0)[:, :, None, None], axis=1) for x in (key, value))
        window = attend(query, keys, values, tokens >= 0)
    return summary if compressed else None, selected, window


def _selected(
    query: Any,
    key: Any,
    value: Any,
    block_indices: Any,
    block_counts: Any,
    position: Any,
    count: int,
    block_size: int,
    attend: Any,
    cfg: Any,
) -> Any:
    """Attention of each group of query heads over the tokens of its key head's blocks; groups are rows of a larger batch."""
    batch, _, heads, size = query.shape
    key_heads, length = key.shape[2], key.shape[1]
    order = jnp.arange(block_indices.shape[3], dtype=jnp.int32)[None, None, None]
    counts = jnp.full((batch, 1, key_heads), count, jnp.int32) if block_counts is None else as_int32(block_counts)
    named = (block_indices >= 0) & (order < counts[..., None])
    blocks = distinct(jnp.where(named, as_int32(block_indices), NOTHING))[:, 0]
    tokens = blocks[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, None, None]
    seen = (blocks[..., None] >= 0) & (tokens <= position[:, None, None, None])
    flat = (batch, key_heads, blocks.shape[2] * block_size)
    tokens, seen = jnp.clip(tokens, 0, max(length - 1, 0)).reshape(flat), seen.reshape(flat)
    at = (jnp.arange(batch)[:, None, None], tokens, jnp.arange(key_heads)[None, :, None])
    keys, values = (x[at].reshape(batch * key_heads, flat[2], 1, x.shape[3]) for x in (key, value))
    grouped = query.reshape(batch * key_heads, 1, heads // key_heads, size)
    out = attend(grouped, keys, values, seen.reshape(batch * key_heads, flat[2]), cfg=cfg)
    return out.reshape(batch, 1, heads, value.shape[3])


def _attend(query: Any, key: Any, value: Any, seen: Any, *, scale: float, platform: Any, cfg: Any = None) -> Any:
    segments = jnp.where(seen, 0, -1).astype(jnp.int32)
    arrays = {"query": query, "key": key, "value": value, "key_segments": segments}
    return _FLASH_ATTENTION.invoke(arrays, {"softmax_scale": scale}, platform=platform, cfg=cfg)


def _explained(query: Any, key: Any, value: Any, tokens: int, attend: Any, cfg: Any) -> Any:
    """The selected branch from shapes alone."""
    batch, _, heads, size = query.shape
    key_heads = key.shape[2]
    rows = batch * key_heads
    shapes = ((rows, 1, heads // key_heads, size), (rows, tokens, 1, size), (rows, tokens, 1, value.shape[3]))
    arrays = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, (query, key, value), strict=True))
    return attend(*arrays, jnp.ones((rows, tokens), bool), cfg=cfg)
