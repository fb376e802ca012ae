"""The inverse of the lists of blocks, made on the device: for every tile of keys, the queries that read of it.

Every entry of a list is one visit. Visits are sorted by the first token of their block, so those that can touch a tile follow each
other; each tile's are cut into chunks of bounded length, and a program takes one chunk. The largest number of chunks depends on
shapes only. A query of very many others' interest, such as the first block, is thereby shared by many programs.

A row is a key head of a member of the batch.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.native_sparse_attention.interface import NativeSparseAttentionCall, NativeSparseAttentionInputs
from ejkernel_triton._jax_triton import call_kernel

_TILES = 128
"""Tiles of a program that finds their visits."""


class Visits(NamedTuple):
    """Sorted visits of all rows, and the chunks of them.

    Attributes:
        tokens: int32 `[rows * t * s]`, the queries.
        starts: int32 `[rows * t * s]`, first token of the block, plus `row * (t + 1)`; t for an entry that names nothing.
        tiles: int32 `[rows, chunks]`, the tile of a chunk, or the number of tiles for none.
        begin, end: int32 `[rows, chunks]`, among the visits.
        chunks_up_to: int32 `[rows, tiles]`, chunks of this tile and those before it.
    """

    tokens: Any
    starts: Any
    tiles: Any
    begin: Any
    end: Any
    chunks_up_to: Any


@triton.jit
def first_visit(p_starts, b_start, count, LEVELS: tl.constexpr):
    """How many of the sorted starts are below each of b_start, by bisection."""
    b_low = tl.zeros_like(b_start)
    b_high = tl.zeros_like(b_start) + count
    for _ in range(LEVELS):
        b_middle = b_low + (b_high - b_low) // 2
        b_below = tl.load(p_starts + b_middle, mask=b_middle < b_high, other=0) < b_start
        b_low = tl.where((b_middle < b_high) & b_below, b_middle + 1, b_low)
        b_high = tl.where((b_middle < b_high) & ~b_below, b_middle, b_high)
    return b_low


@triton.jit
def native_sparse_attention_visits_kernel(
    p_starts, length, count, tiles, p_begin, p_end,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The visits `[begin, end)` of each tile of keys: blocks that start less than a block before the tile, up to its last key."""
    programs = tl.cdiv(tiles, TILES)
    i_row = tl.program_id(0) // programs
    o_tile = tl.program_id(0) % programs * TILES + tl.arange(0, TILES)
    b_first = i_row * (length + 1)
    b_begin = first_visit(p_starts, b_first + tl.maximum(o_tile * KEYS - (BLOCK_SIZE - 1), 0), count, LEVELS)
    b_end = first_visit(p_starts, b_first + tl.minimum((o_tile + 1) * KEYS, length), count, LEVELS)
    o_out = i_row * tiles + o_tile
    tl.store(p_begin + o_out, b_begin, mask=o_tile < tiles)
    tl.store(p_end + o_out, b_end, mask=o_tile < tiles)


def touched_tiles(call: NativeSparseAttentionCall, keys: int) -> int:
    """Most tiles of so many keys among whose visits one entry can be."""
    block_size = min(call.block_size, call.query.shape[1])
    if call.sequence_starts is None and (block_size % keys == 0 or keys % block_size == 0):
        return max(block_size // keys, 1)
    return (block_size + keys - 2) // keys + 1


def max_chunks(call: NativeSparseAttentionCall, keys: int, chunk: int) -> int:
    """Most chunks of a row: each tile has one that is not full."""
    _, length, _, slots = call.block_indices.shape
    return -(-length // keys) + touched_tiles(call, keys) * length * slots // chunk


def visits_of(call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs, keys: int, chunk: int) -> Visits:
    """Visits of tiles of `keys` keys, in chunks of up to `chunk`."""
    batch, length, heads, slots = call.block_indices.shape
    rows, tiles = batch * heads, -(-length // keys)
    tokens, starts = _sorted(call, inputs, rows)
    shape = ((rows, tiles), jnp.int32)
    begin, end = call_kernel(
        native_sparse_attention_visits_kernel,
        (starts, length, rows * length * slots, tiles),
        (shape, shape),
        grid=rows * -(-tiles // _TILES),
        num_warps=4,
        BLOCK_SIZE=min(call.block_size, length),
        KEYS=keys,
        TILES=_TILES,
        LEVELS=(rows * length * slots).bit_length(),
    )
    counts = -(-(end - begin) // chunk)
    up_to = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    index = jnp.arange(max_chunks(call, keys, chunk), dtype=jnp.int32)
    tile = jnp.sum(up_to[:, None] <= index[None, :, None], axis=2, dtype=jnp.int32)
    known = jnp.minimum(tile, tiles - 1)

    def of_tile(values: Any) -> Any:
        return jnp.take_along_axis(values, known, axis=1)

    low = of_tile(begin) + (index[None] - of_tile(up_to - counts)) * chunk
    return Visits(tokens, starts, tile, low, jnp.minimum(low + chunk, of_tile(end)), up_to)


def _sorted(call: NativeSparseAttentionCall, inputs: NativeSparseAttentionInputs, rows: int) -> tuple[Any, Any]:
    """Queries of all entries, and the starts of their blocks, sorted by row and start, then by query."""
    _, length, _, slots = call.block_indices.shape
    blocks = jnp.swapaxes(inputs.block_indices, 1, 2)
    start = blocks * jnp.int32(min(call.block_size, length))
    if inputs.sequence_starts is not None:
        start = start + inputs.sequence_starts[:, None, :, None]
    start = jnp.where(blocks < 0, length, start).reshape(rows, length * slots)
    start = start + jnp.arange(rows, dtype=jnp.int32)[:, None] * jnp.int32(length + 1)
    token = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :, None], (rows, length, slots))
    # Unsigned keys: XLA sorts these with CUB's radix sort.
    start, token = jax.lax.sort((start.astype(jnp.uint32).reshape(-1), token.reshape(-1)), num_keys=1, is_stable=True)
    return token, start.astype(jnp.int32)
