"""Blocks of keys: their means, and the choice of those that each query reads (Yuan et al., Native Sparse Attention, 2025)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import known_size
from ejkernel.call.partition import entries_of, explicit_mesh_of, placed_on, shards
from ejkernel.operations.common.ranking import largest, over_rows
from ejkernel.operations.flash_attention.forms import _tokens  # pyright: ignore[reportPrivateUsage]
from ejkernel.operations.mean_pooling.interface import OPERATION as _MEAN_POOLING
from ejkernel.utils.dtypes import accumulator

_NUMBERS = 2**24
"""Scores of blocks that are held at once."""


class Blocks(NamedTuple):
    """The blocks of all sequences in one row `[n]`, each sequence cut from its own start, and the tokens' places in them.

    Sequences are numbered; -1 is no sequence: tokens past the last one, and entries past the last block.
    """

    starts: Any
    """first token of each block `[n]`"""
    sequences: Any
    """sequence of each block `[n]`"""
    numbers: Any
    """of each block within its sequence `[n]`"""
    token_sequences: Any
    """`[t]`"""
    token_numbers: Any
    """of the block in which each token lies, within its sequence `[t]`"""
    token_entries: Any
    """where the blocks of each token's sequence begin in `[n]`, `[t]`"""


def blocks_of(length: int, block_size: int, cu_seqlens: Any) -> Blocks:
    """Where the blocks lie. With cu_seqlens there are as many entries as that many sequences of any lengths can need."""
    if cu_seqlens is None:
        numbers = jnp.arange(-(-length // block_size), dtype=jnp.int32)
        tokens = jnp.arange(length, dtype=jnp.int32)
        return Blocks(
            numbers * block_size,
            jnp.zeros_like(numbers),
            numbers,
            jnp.zeros_like(tokens),
            tokens // block_size,
            jnp.zeros_like(tokens),
        )
    sequences = cu_seqlens.shape[0] - 1
    most = min(length, (length + sequences * (block_size - 1)) // block_size)
    segments, positions, lengths = _tokens(cu_seqlens, length)
    first = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(-(-lengths // block_size), dtype=jnp.int32)])
    index = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(first, index, side="right").astype(jnp.int32) - 1, sequences)
    used = index < first[-1]
    numbers = jnp.where(used, index - first[owner], 0)
    cumulative = cu_seqlens.astype(jnp.int32)
    starts = jnp.where(used, cumulative[owner] + numbers * block_size, cumulative[-1])
    entries = first[jnp.maximum(segments, 0)]
    return Blocks(starts, jnp.where(used, owner, -1), numbers, segments, positions // block_size, entries)


def block_means(x: Any, block_size: int, blocks: Blocks, cu_seqlens: Any) -> Any:
    """Means `[B,n,K,D]` of `[B,T,K,D]`, summed in float32. Those of incomplete blocks are never read."""
    batch, length, heads, size = x.shape
    if cu_seqlens is not None:
        bounds = jnp.concatenate([blocks.starts, cu_seqlens[-1:].astype(jnp.int32)])
        return _MEAN_POOLING.invoke({"x": x, "cu_seqlens": bounds}, {})[None]
    if not length:
        return x  # no blocks; a mesh has no rule for a reshape of nothing
    x = jnp.pad(x, [(0, 0), (0, -length % block_size), (0, 0), (0, 0)])
    wide = accumulator(x.dtype)
    return jnp.mean(x.reshape(batch, -(-length // block_size), block_size, heads, size), axis=2, dtype=wide).astype(x.dtype)


def _split_alike(query: Any, means: Any, lse: Any) -> tuple[Any, Any, Any]:
    """On an explicit mesh, all of them as the query's batch and heads are, as far as key heads can follow."""
    mesh = explicit_mesh_of((query, means, lse))
    if mesh is None:
        return query, means, lse
    batch, _, heads, _ = entries_of(query)
    heads = heads if means.shape[2] % shards(heads, mesh) == 0 else ()
    split = (batch, (), heads, ())
    return placed_on(mesh, query, split), placed_on(mesh, means, split), placed_on(mesh, lse, split[:3])


@functools.partial(jax.jit, static_argnames=("block_size", "count", "scale"))
def chosen_blocks(
    query: Any, means: Any, lse: Any, blocks: Blocks, positions: Any = None, *, block_size: int, count: int, scale: float
) -> Any:
    """The `count` blocks of each query and key head, best first, int32 `[B,T,K,count]`; -1 where there are fewer.

    First its own block, the one before it and the first of its sequence; then by the weights that complete blocks have in
    compressed attention, summed over the query heads of the key head; the earlier one of equals.

    Args:
        query: `[B,T,H,D]`.
        means: of keys `[B,n,K,D]`.
        lse: of compressed attention `[B,T,H]`.
        blocks: where the blocks lie.
        positions: of the queries among the keys `[t]`; None: query t is token t.
        block_size: tokens per block.
        count: at most n.
        scale: factor on the products.
    """
    batch, length, heads, size = query.shape
    key_heads = means.shape[2]
    query, means, lse = _split_alike(*jax.lax.stop_gradient((query, means, lse)))
    groups = heads // key_heads
    query = query.reshape(batch, length, key_heads, groups, size)
    lse = lse.reshape(batch, length, key_heads, groups)
    wide = accumulator(query.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == query.dtype else jax.lax.Precision.DEFAULT
    last = blocks.starts + (block_size - 1)

    def tile(arrays: Any) -> Any:
        query, lse, sequence, number, entries, position = arrays
        logits = jnp.einsum("tbkgd,bnkd->tbkgn", query, means, precision=precision, preferred_element_type=wide) * scale
        same = (sequence[:, None] == blocks.sequences[None]) & (sequence[:, None] >= 0)
        complete = same & (last[None] <= position[:, None])
        weights = jnp.exp(logits - lse[..., None])
        weights = jnp.where(complete[:, None, None, None] & (weights >= 0), weights, 0)
        behind = number[:, None] - blocks.numbers[None]
        forced = jnp.where(blocks.numbers == 0, groups + 1, 0)
        forced = jnp.where(behind == 1, groups + 2, forced)
        forced = jnp.where(behind == 0, groups + 3, forced)[:, None, None]
        scores = jnp.where(forced > 0, forced, jnp.sum(weights, axis=3))
        scores = jnp.where((same & (behind >= 0))[:, None, None], scores, -1)
        best, entry = largest(scores, count)
        return jnp.where(best >= 0, entry - entries[:, None, None, None], -1)

    positions = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
    per_token = (blocks.token_sequences, blocks.token_numbers, blocks.token_entries, positions)
    arrays = (jnp.moveaxis(query, 1, 0), jnp.moveaxis(lse, 1, 0), *per_token)
    found = over_rows(tile, arrays, max(_NUMBERS // max(known_size(batch) * heads * means.shape[1], 1), 1))
    return jnp.moveaxis(found, 0, 1).astype(jnp.int32)
