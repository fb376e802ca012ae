"""Tile lists of a mask, built once and used by every layer that shares the mask."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel.call.arrays import ArraySpec
from ejkernel.errors import invalid, wrong_type
from ejkernel.masks import MaskInfo
from ejkernel.operations.block_sparse_attention import tiles
from ejkernel.operations.common.options import as_count, as_flag
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel.operations.flash_attention.visibility import Visibility, as_window

MaskBuilder = Callable[[Any, Any], Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("mask_info", "key_tiles", "full_tiles"),
    meta_fields=("q_blocksize", "kv_blocksize", "mask_builder", "listed_by_rules"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockSparseLayout:
    """A mask and the tiles of the score matrix that it leaves. A pytree; make it with `block_sparse_layout`.

    Attributes:
        mask_info: the mask, all that was said of it but `mask_builder`.
        key_tiles: int32 `[B|1, n, m]`: for each block of queries the blocks of keys that hold a visible pair, then -1; or
            `[B|1, H, n, m]`, of each head.
        full_tiles: bool, as key_tiles: all pairs of the tile are visible.
        q_blocksize, kv_blocksize: tokens in a block.
        mask_builder: a rule `(query_positions, key_positions) -> bool` that belongs to the mask, or None.
        listed_by_rules: the lists follow from `mask_info` without a dense mask, so that they can be made again at no cost.
    """

    mask_info: MaskInfo
    key_tiles: Any
    full_tiles: Any
    q_blocksize: int
    kv_blocksize: int
    mask_builder: MaskBuilder | None = None
    listed_by_rules: bool = False

    @property
    def counts(self) -> Any:
        """Tiles that each block of queries visits, int32 `[B|1, n]` or `[B|1, H, n]`."""
        return tiles.TileLists(self.key_tiles, self.full_tiles).counts

    def density(self, keys: int) -> Any:
        """The visited part of all tiles, with keys of this length."""
        return jnp.mean(self.counts) / -(-keys // self.kv_blocksize)


@public()
def block_sparse_layout(
    queries: t.Count,
    keys: t.Count | None = None,
    *,
    mask_info: MaskInfo | None = None,
    mask_builder: MaskBuilder | t.TileMap | None = None,
    causal: t.Flag = True,
    sliding_window: t.Window | None = None,
    chunk_size: t.Count | None = None,
    q_blocksize: t.Count = 128,
    kv_blocksize: t.Count = 128,
    per_head: t.Flag = False,
) -> BlockSparseLayout:
    """The tiles of a mask: build once, pass as `qkv_layouts` to `blocksparse_attention` in every layer.

    A tile is listed if it holds a visible pair of any head; with `per_head`, for each head. With a dense mask or a `mask_builder`
    every pair is looked at, in O(T S) time and O(q_blocksize S) memory; otherwise bounds of positions and segments decide, in
    O(T + S), and a tile that several rules only together leave empty may be listed too, which costs time and changes no result.

    Args:
        queries: T.
        keys: S; None means T.
        mask_info: a `MaskInfo`; may be traced.
        mask_builder: a function `(query_positions, key_positions) -> bool` of int32 arrays that broadcast together, elementwise,
            made of operators that NumPy and JAX share; or a map bool `[n, tiles]`, `[B, n, tiles]` or `[B|1, H, n, tiles]` of
            the tiles to visit, the last for each head.
        causal: a query sees keys up to its own position.
        sliding_window: `(left, right)`, inclusive; an int w means (w, w).
        chunk_size: only keys of the query's own chunk are visible.
        q_blocksize: queries of one tile; it need not divide T.
        kv_blocksize: keys of one tile.
        per_head: list the tiles of each head of a dense mask `[B, H, T, S]`: worth it where heads see different tiles.

    Returns:
        A `BlockSparseLayout`; all parts hold together (AND).

    Raises:
        ValueError: sizes that do not fit.
        TypeError: a wrong type.

    Source: Dong et al., Flex Attention: A programming model for generating optimized attention kernels, 2024 (block masks).
    """
    queries = as_count("queries", queries, 0)
    keys = queries if keys is None else as_count("keys", keys, 0)
    q_block, k_block = as_count("q_blocksize", q_blocksize, 1), as_count("kv_blocksize", kv_blocksize, 1)
    given = Visibility.of_mask_info(mask_info)
    batch = 1 if mask_info is None or mask_info.batch_size is None else mask_info.batch_size
    sizes = (batch, 1 if given.mask is None else given.mask.shape[1], queries, keys)
    unchecked: dict[str, Any] = {"causal": causal, "chunk_size": chunk_size}
    asked = Visibility(window=as_window(sliding_window), **unchecked)
    said = asked.checked(sizes) & given.checked(sizes)
    predicate, tile_map = as_predicate_or_map(mask_builder, -(-queries // q_block), -(-keys // k_block))
    if predicate is not None:
        tiles.check_predicate(predicate)
    by_head = as_flag("per_head", per_head) or (tile_map is not None and tile_map.ndim == 4)
    lists = _lists(said.aligned(None, queries, keys), queries, keys, predicate, tile_map, (q_block, k_block, by_head))
    by_rules = predicate is None and tile_map is None and said.mask is None
    return BlockSparseLayout(_as_mask_info(said, sizes), *lists, q_block, k_block, predicate, by_rules)


def as_predicate_or_map(builder: Any, blocks: int | None, tiles: int | None) -> tuple[MaskBuilder | None, Any]:
    """A `mask_builder` as a function or as a map of tiles, whichever it is."""
    if builder is None:
        return None, None
    if callable(builder):
        for cell in getattr(builder, "__closure__", None) or ():
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(cell.cell_contents)):
                remedy = "put what is only known at run time into mask_info: segments, positions or a dense mask"
                raise wrong_type("mask_builder", "a function that holds a traced array", "one that does not", remedy=remedy)
        return builder, None
    if not hasattr(builder, "dtype") or builder.dtype != bool:
        expected = "a function of positions, or a map bool [n, tiles], [B, n, tiles] or [B, H, n, tiles]"
        raise wrong_type("mask_builder", repr(builder), expected)
    found = builder[None] if len(builder.shape) == 2 else builder
    if len(found.shape) not in (3, 4) or (blocks is not None and tuple(found.shape[-2:]) != (blocks, tiles)):
        expected = f"[{blocks}, {tiles}], [B, {blocks}, {tiles}] or [B, H, {blocks}, {tiles}]"
        raise invalid("mask_builder", f"a map of shape {tuple(builder.shape)}", expected)
    return None, found


def _lists(
    said: Visibility, queries: int, keys: int, predicate: MaskBuilder | None, tile_map: Any, blocks: tuple[int, int, bool]
) -> tuple[Any, Any]:
    """`blocks`: queries and keys of a tile, and whether every head has lists."""
    if not queries or not keys:
        empty = np.zeros((1, -(-queries // blocks[0]), 0))
        return jnp.asarray(empty, jnp.int32), jnp.asarray(empty, bool)
    said = said.with_padding_as_segments(queries, keys)
    call = FlashAttentionCall(
        query=ArraySpec((1, queries, 1, 1), "float32"),
        key=ArraySpec((1, keys, 1, 1), "float32"),
        value=ArraySpec((1, keys, 1, 1), "float32"),
        mask=None if said.mask is None else ArraySpec.of(said.mask),
        softmax_scale=1.0,
        causal=said.causal,
        query_offset=said.query_offset,
        window=said.window,
        chunk_size=said.chunk_size,
        prefix=said.prefix,
    )
    names = ("mask", "query_segments", "key_segments", "query_positions", "key_positions")
    arrays = {name: array for name in names if (array := getattr(said, name)) is not None}
    return _listed(call, predicate, blocks, arrays, tile_map)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _listed(call: Any, predicate: Any, blocks: tuple[int, int, bool], arrays: Any, tile_map: Any) -> tuple[Any, Any]:
    inputs = FlashAttentionInputs(None, None, None, **arrays)
    some, every = tiles.tile_map(call, inputs, predicate, *blocks[:2], per_head=blocks[2])
    if tile_map is not None:
        ndim = max(some.ndim, tile_map.ndim)
        some, every, wanted = (x if x.ndim == ndim else x[:, None] for x in (some, every, tile_map))
        some, every = jnp.broadcast_arrays(some & wanted, every)
    lists = tiles.listed(some, every)
    return lists.key_tiles, lists.full_tiles


def _as_mask_info(said: Visibility, sizes: tuple[int, int, int, int]) -> MaskInfo:
    return MaskInfo(
        dense=said.mask,
        query_segments=said.query_segments,
        key_segments=said.key_segments,
        query_positions=said.query_positions,
        key_positions=said.key_positions,
        query_lengths=said.query_lengths,
        key_lengths=said.key_lengths,
        causal=said.causal,
        causal_offset=said.query_offset,
        window=said.window,
        chunk_size=said.chunk_size,
        prefix=said.prefix if said.causal else None,
        sizes=(None, sizes[2], sizes[3]),
    )


def one_layout(layouts: Any, queries: int, **others: Any) -> BlockSparseLayout:
    """That of a call with so many queries, which may come in a list of one; `others` are arguments that it replaces."""
    layout = layouts[0] if isinstance(layouts, (tuple, list)) and len(layouts) == 1 else layouts
    if not isinstance(layout, BlockSparseLayout):
        raise wrong_type("qkv_layouts", type(layouts).__name__, "a layout made by block_sparse_layout")
    for name, given in others.items():
        if given is not None:
            raise invalid(name, "given beside qkv_layouts", "None", remedy="build the layout with it: a layout holds its mask")
    blocks = -(-queries // layout.q_blocksize)
    if layout.key_tiles.shape[-2] != blocks:
        raise invalid(
            "qkv_layouts", f"a layout of {layout.key_tiles.shape[-2]} blocks of queries", f"{blocks} for T = {queries}"
        )
    return layout
