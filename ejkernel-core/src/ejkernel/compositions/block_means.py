"""Attention over the means of blocks of keys, native sparse attention's compressed branch."""

from __future__ import annotations

from typing import Any

from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.native_sparse_attention.forms import Blocks, block_means


def attend_means(
    query: Any,
    key: Any,
    value: Any,
    blocks: Blocks,
    block_size: int,
    positions: Any,
    cu_seqlens: Any,
    *,
    scale: Any,
    platform: Any,
) -> tuple[Any, Any, Any]:
    """The keys' means, the output, and its log-sum-exp; a query at one of `positions` sees the blocks that end there or before."""
    keys, values = (block_means(x, block_size, blocks, cu_seqlens) for x in (key, value))
    ends = (blocks.starts + (block_size - 1))[None]
    arrays = {"query": query, "key": keys, "value": values, "query_positions": positions, "key_positions": ends}
    if cu_seqlens is not None:
        arrays |= {"query_segments": blocks.token_sequences[None], "key_segments": blocks.sequences[None]}
    options = {"causal": True, "softmax_scale": scale, "return_lse": True}
    out, lse = _FLASH_ATTENTION.invoke(arrays, options, platform=platform)
    return keys, out, lse
