"""A call as `flash_attention`'s kernels run it: the same masks, and lists of the tiles that hold visible pairs.

The kernels walk the caller's lists if their tiles divide the listed blocks. Otherwise, and with a bias, whose gradient looks at all
pairs, the lists become part of a dense mask; so does a `mask_builder`, which Triton cannot call. Lists are then made of the masks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel.operations.block_sparse_attention.interface import (
    BlockSparseAttentionCall,
    BlockSparseAttentionInputs,
    as_flash_attention,
    as_flash_call,
)
from ejkernel.operations.block_sparse_attention.tiles import TileLists, mapped, tile_map
from ejkernel.operations.flash_attention import pairs
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton.flash_attention.mask_params import Lists


def divisor(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size


def walks_lists(call: BlockSparseAttentionCall) -> bool:
    """Whether the kernels walk the caller's lists."""
    return call.key_tiles is not None and call.bias is None and min(map(divisor, call.blocks)) >= MIN_DOT_SIZE


def needs_mask(call: BlockSparseAttentionCall) -> bool:
    """Whether a dense mask has to be made."""
    return call.mask_builder is not None or (call.key_tiles is not None and not walks_lists(call))


def dense_call_of(call: BlockSparseAttentionCall) -> FlashAttentionCall:
    """The call of the kernels."""
    dense = as_flash_call(call)
    if not needs_mask(call):
        return dense
    given = (1, 1) if call.mask is None else call.mask.shape[:2]
    positions = (spec for spec in (call.query_positions, call.key_positions) if call.mask_builder is not None)
    lists = None if walks_lists(call) else call.key_tiles
    batch = max(given[0], *(1 if spec is None else spec.shape[0] for spec in (*positions, lists)))
    heads = max(given[1], lists.shape[1] if lists is not None and call.per_head_tiles else 1)
    return dataclasses.replace(dense, mask=ArraySpec((batch, heads, call.query.shape[1], call.key.shape[1]), "bool"))


def dense_problem(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs
) -> tuple[FlashAttentionCall, FlashAttentionInputs, Lists]:
    """Call, inputs and lists of the kernels."""
    dense_call = dense_call_of(call)
    _, dense = as_flash_attention(call, inputs)
    if needs_mask(call) and dense_call.mask is not None:
        dense = dense._replace(mask=_mask(call, inputs, dense_call.mask.shape))

    def lists(block_q: int, block_k: int, by_key: bool) -> tuple[Any, int]:
        blocks = call.blocks if walks_lists(call) else (block_q, block_k)
        some, every = _listed_maps(call, inputs) if walks_lists(call) else _maps(dense_call, dense, *blocks)
        lengths = call.query.shape[1], call.key.shape[1]
        whole = (jnp.arange(-(-length // block)) < length // block for length, block in zip(lengths, blocks, strict=True))
        whole_queries, whole_keys = whole
        # Tiles at an end of an array are masked: the others are read without a look at bounds.
        every = every & whole_queries[None, None, :, None] & whole_keys[None, None, None]
        if by_key:
            some, every, blocks = jnp.swapaxes(some, 2, 3), jnp.swapaxes(every, 2, 3), blocks[::-1]
        own, length = (block_k, lengths[1]) if by_key else (block_q, lengths[0])
        table = jnp.repeat(_table(some, every, blocks[1]), blocks[0] // own, axis=2)
        return table[:, :, : -(-length // own)], blocks[1]

    return dense_call, dense, lists


def _table(some: Any, every: Any, block: int) -> Any:
    """Rows of `Lists`: the full tiles come first."""
    every = some & every
    order = jnp.argsort(jnp.where(every, 0, jnp.where(some, 1, 2)), axis=-1, stable=True).astype(jnp.int32)
    full, visited = (jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32) * block for x in (every, some))
    none = jnp.zeros_like(full)
    return jnp.concatenate([none, none, full, visited, order], axis=-1)


def _listed_maps(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs) -> tuple[Any, Any]:
    """The caller's lists as maps `[b, 1 or h, n, m]`: the visited tiles, and those without a hidden pair."""
    key_tiles, full_tiles = inputs.key_tiles, inputs.full_tiles
    if not call.per_head_tiles:
        key_tiles, full_tiles = key_tiles[:, None], None if full_tiles is None else full_tiles[:, None]
    tiles = -(-call.key.shape[1] // call.blocks[1])
    some = mapped(TileLists(key_tiles, None), tiles)
    if full_tiles is None:
        return some, jnp.zeros_like(some)
    partial = jnp.where(full_tiles, -1, key_tiles)
    return some, ~(partial[..., None] == jnp.arange(tiles, dtype=jnp.int32)[None, None, None, None]).any(-2)


def _maps(call: FlashAttentionCall, inputs: FlashAttentionInputs, block_q: int, block_k: int) -> tuple[Any, Any]:
    """Of the masks `[b, 1 or h, n, m]`: tiles with a visible pair, and tiles with visible pairs only."""
    if call.mask is None:
        some, every = tile_map(call, inputs, None, block_q, block_k)
        return some[:, None], every[:, None]
    seen = pairs.visible(call, inputs, jnp)
    batch, heads, queries, keys = seen.shape
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, -queries % block_q), (0, -keys % block_k)))
    seen = seen.reshape(batch, heads, -(-queries // block_q), block_q, -(-keys // block_k), block_k)
    return seen.any((3, 5)), seen.all((3, 5))


def _pairs_of(tiles: Any, blocks: tuple[int, int]) -> Any:
    """A map of tiles `[b, h, n, m]` as a mask of pairs `[b, h, t, s]`."""
    return jnp.repeat(jnp.repeat(tiles, blocks[0], 2), blocks[1], 3)


def _mask(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, shape: tuple[int, ...]) -> Any:
    """The dense mask of this shape: the caller's own, the predicate and, if kernels do not walk them, the lists."""
    queries, keys = shape[2:]
    seen = jnp.ones((1, 1, 1, 1), bool) if inputs.mask is None else inputs.mask
    if call.mask_builder is not None:
        query, key = inputs.query_positions, inputs.key_positions
        query = jnp.arange(queries, dtype=jnp.int32)[None] + call.query_offset if query is None else query
        key = jnp.arange(keys, dtype=jnp.int32)[None] if key is None else key
        seen = seen & call.mask_builder(query[:, None, :, None], key[:, None, None, :])
    if inputs.key_tiles is not None and not walks_lists(call):
        some, every = (_pairs_of(tiles, call.blocks)[:, :, :queries, :keys] for tiles in _listed_maps(call, inputs))
        seen = some & (every | seen)  # full tiles are a promise: nothing hides a pair of theirs
    return jnp.broadcast_to(seen, shape)
