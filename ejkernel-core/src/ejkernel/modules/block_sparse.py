"""Softmax attention that skips the tiles that its mask leaves empty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel.call.traced import split_traced
from ejkernel.compositions import sharded as _sharded
from ejkernel.compositions.frameworks import no_attention_function
from ejkernel.masks import MaskInfo
from ejkernel.modules._class_api import class_api
from ejkernel.operations.block_sparse_attention.interface import OPERATION as _BLOCK_SPARSE_ATTENTION
from ejkernel.operations.block_sparse_attention.layout import (
    BlockSparseLayout,
    MaskBuilder,
    as_predicate_or_map,
    block_sparse_layout,
    one_layout,
)
from ejkernel.operations.common.options import as_flag
from ejkernel.utils.checks import check_array

__all__ = ["BlockSparseAttention", "BlockSparseLayout", "block_sparse_layout", "blocksparse_attention"]

_POSITIONAL = ("query", "key", "value", "softmax_aux", "bias")


@public(*_POSITIONAL[3:])
@no_attention_function("its arrays are [B, H, T, D]")
def blocksparse_attention(
    query: t.HeadQueries,
    key: t.HeadKeys,
    value: t.HeadValues,
    *,
    softmax_aux: t.Sinks | None = None,
    bias: t.Bias | None = None,
    mask_builder: MaskBuilder | t.TileMap | None = None,
    mask_info: MaskInfo | None = None,
    qkv_layouts: BlockSparseLayout | tuple[BlockSparseLayout] | list[BlockSparseLayout] | None = None,
    sliding_window: t.Window | None = None,
    chunk_size: t.TracedCount | None = None,
    causal: t.Flag | None = None,
    logits_soft_cap: t.Number | None = None,
    softmax_scale: t.Scalar | None = None,
    fused_backward: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.HeadAttended:
    """Exact softmax attention that computes only tiles with visible pairs: `softmax(mask(cap(scale * q . k + bias))) . v`.

    The result is that of dense attention under the same mask; the work falls with the number of tiles that hold a visible pair.
    Everything said about visibility holds at once. A query that sees no key gives 0 and no gradient.

    Args:
        query: `[B, H, T, D]`: heads before tokens; any lengths and head sizes.
        key: `[B, K, S, D]`; query head h reads key head `h // (H // K)`.
        value: `[B, K, S, V]`.
        softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`, logits that take part in the softmax's denominator only; have gradients.
        bias: floating `[B|1, H|1, T|1, S|1]`; has a gradient. It does not decide which tiles are visited.
        mask_builder: a function `(query_positions, key_positions) -> bool` of int32 arrays that broadcast together, elementwise,
            made of operators that NumPy and JAX share, without traced arrays inside; define it once, for it is part of the key
            of the compiled program. Or a map bool `[n, tiles]` or `[B, n, tiles]` of the tiles to visit, in blocks of 128 x 128.
        mask_info: a `MaskInfo`; its segments, positions and dense mask may be traced.
        qkv_layouts: a layout made by `block_sparse_layout` (or a tuple of that one), which holds its mask: mask_info and
            mask_builder are then left out. Saves finding the tiles again in every layer.
        sliding_window: `(left, right)` keys around the query's position, inclusive, None = unlimited; an int w means (w, w).
        chunk_size: a query sees only keys of its own chunk of this many positions.
        causal: a query sees keys up to its own position. None means True, and with qkv_layouts what the layout says.
        logits_soft_cap: c > 0 turns logits into `c * tanh(logits / c)`.
        softmax_scale: factor on the products; None means `1 / sqrt(D)`.
        fused_backward: a hint for platforms that have two backward kernels; never changes a result.
        cfg: config override for the chosen implementation; blocks need not divide the lengths.
        mesh: run inside `jax.shard_map` on this mesh; batch and heads may be split. Masks and layouts are split along.
        in_specs: one PartitionSpec or None for each of query, key, value, softmax_aux, bias; the last two follow the query without.
        out_specs: PartitionSpec of the output.

    Returns:
        `[B, H, T, V]` in the query's dtype.

    Source: Child et al., Generating long sequences with sparse transformers, 2019; tiles as in Dao et al., FlashAttention, 2022,
        section 3.3.
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array, ndim=4)
    as_flag("fused_backward", fused_backward)
    causal = None if causal is None else as_flag("causal", causal)
    arrays = {name: _heads_after_tokens(array) for name, array in (("query", query), ("key", key), ("value", value))}
    arrays |= {name: array for name, array in (("softmax_aux", softmax_aux), ("bias", bias)) if array is not None}
    queries, keys = query.shape[2], key.shape[2]
    predicate, tile_map = as_predicate_or_map(mask_builder, None, None)
    if tile_map is not None and qkv_layouts is None:
        traced, held = split_traced({"sliding_window": sliding_window, "chunk_size": chunk_size})
        qkv_layouts = block_sparse_layout(
            queries,
            keys,
            mask_info=mask_info,
            mask_builder=tile_map,
            causal=causal is not False,
            **held,
        )
        sliding_window, chunk_size = traced.get("sliding_window"), traced.get("chunk_size")
        mask_builder = mask_info = causal = None
    structure = {"sliding_window": sliding_window, "chunk_size": chunk_size}
    if qkv_layouts is None:
        options = {"causal": causal is not False, "mask_builder": predicate, **structure}
        arrays |= {} if mask_info is None else {"mask_info": mask_info}
    else:
        layout = one_layout(qkv_layouts, queries, mask_info=mask_info, mask_builder=mask_builder)
        said = layout.mask_info.causal if causal is None else causal
        options = {"causal": said, "mask_builder": layout.mask_builder, **structure}
        arrays["mask_info"] = layout.mask_info
        if not layout.listed_by_rules or (layout.mask_info.causal and not said):
            # Without lists kernels of dense attention can run it, and others choose tiles that suit them.
            options |= {"q_blocksize": layout.q_blocksize, "kv_blocksize": layout.kv_blocksize}
            arrays["key_tiles"] = layout.key_tiles
            if sliding_window is chunk_size is None and said == layout.mask_info.causal and layout.mask_info.prefix is None:
                arrays["full_tiles"] = layout.full_tiles
    options |= {"logits_soft_cap": logits_soft_cap, "softmax_scale": softmax_scale}
    out = _sharded.invoke(
        _BLOCK_SPARSE_ATTENTION,
        arrays,
        options,
        positional=_POSITIONAL,
        mesh=mesh,
        in_specs=_heads_last(in_specs),
        out_specs=_swapped(out_specs),
        platform=platform,
        cfg=cfg,
    )
    return jnp.swapaxes(out, 1, 2)


def _heads_after_tokens(array: Any) -> Any:
    """`[B, H, T, D] -> [B, T, H, D]`, of arrays and of the shapes that `explain` is given."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((array.shape[0], array.shape[2], array.shape[1], array.shape[3]), array.dtype)
    return jnp.swapaxes(array, 1, 2)


def _heads_last(in_specs: Any) -> Any:
    """The specs of query, key and value for `[B, T, H, D]`."""
    if not isinstance(in_specs, (tuple, list)) or isinstance(in_specs, PartitionSpec):
        return in_specs
    return (*(_swapped(spec) for spec in in_specs[:3]), *in_specs[3:])


def _swapped(spec: Any) -> Any:
    if not isinstance(spec, PartitionSpec) or len(spec) < 2:
        return spec
    entries = (*spec, None)
    return PartitionSpec(entries[0], entries[2], entries[1], *entries[3:-1])


BlockSparseAttention = class_api("BlockSparseAttention", blocksparse_attention)
