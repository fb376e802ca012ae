"""Blocks of keys and their means (Yuan et al., Native Sparse Attention, 2025)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.flash_attention.forms import _tokens  # pyright: ignore[reportPrivateUsage]
from ejkernel.operations.mean_pooling.interface import OPERATION as _MEAN_POOLING
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.integers import as_int32


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
    cumulative = as_int32(cu_seqlens)
    starts = jnp.where(used, cumulative[owner] + numbers * block_size, cumulative[-1])
    entries = first[jnp.maximum(segments, 0)]
    return Blocks(starts, jnp.where(used, owner, -1), numbers, segments, positions // block_size, entries)


def block_means(x: Any, block_size: int, blocks: Blocks, cu_seqlens: Any) -> Any:
    """Means `[B,n,K,D]` of `[B,T,K,D]`, summed in float32. Those of incomplete blocks are never read."""
    batch, length, heads, size = x.shape
    if cu_seqlens is not None:
        bounds = jnp.concatenate([blocks.starts, as_int32(cu_seqlens[-1:])])
        return _MEAN_POOLING.invoke({"x": x, "cu_seqlens": bounds}, {})[None]
    if not length:
        return x  # no blocks; a mesh has no rule for a reshape of nothing
    x = jnp.pad(x, [(0, 0), (0, -length % block_size), (0, 0), (0, 0)])
    wide = accumulator(x.dtype)
    return jnp.mean(x.reshape(batch, -(-length // block_size), block_size, heads, size), axis=2, dtype=wide).astype(x.dtype)
