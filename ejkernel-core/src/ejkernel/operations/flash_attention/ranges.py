"""Which tiles to visit where only arrays know: segments and positions, summarised block by block."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel.operations.flash_attention.pairs import tile_visibility
from ejkernel.operations.flash_attention.score_functions.bounds import device_tiles, static_tiles

_LARGEST = np.int32(2**31 - 1)


def tile_ranges(call: FlashAttentionCall, inputs: FlashAttentionInputs, block_q: int, block_k: int, *, by_key: bool) -> Any:
    """int32 `[b, blocks, 4]`: for each block of queries the ends low, full_low, full_high, high of the tiles of keys to visit.

    Tiles outside [low, high) are hidden and those in [full_low, full_high) all visible. With `by_key`, the same for blocks of keys
    and tiles of queries.
    """
    some, every = _tiles(call, inputs, block_q, block_k)
    if by_key:
        some, every = jnp.swapaxes(some, 1, 2), jnp.swapaxes(every, 1, 2)
    low, high, _ = _extent(some)
    full_low, full_high, count = _extent(every)
    usable = (count == full_high - full_low) & (count > 0)
    full_low, full_high = (jnp.where(usable, end, low) for end in (full_low, full_high))
    return jnp.stack([low, full_low, full_high, high], axis=-1).astype(jnp.int32)


def _extent(tiles: Any) -> tuple[Any, Any, Any]:
    """First, one past the last, and number of the true entries along the last axis; 0, 0, 0 if there are none."""
    count = jnp.sum(tiles, axis=-1, dtype=jnp.int32)
    first = jnp.argmax(tiles, axis=-1)
    last = tiles.shape[-1] - jnp.argmax(tiles[..., ::-1], axis=-1)
    return first, jnp.where(count > 0, last, 0), count


def _tiles(call: FlashAttentionCall, inputs: FlashAttentionInputs, block_q: int, block_k: int) -> tuple[Any, Any]:
    """Whether each tile has some visible entry, and only visible entries and no end of an array: bool `[b, queries, keys]`."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    q_low, q_high = _position_ends(inputs.query_positions, queries, block_q, call.query_offset)
    k_low, k_high = _position_ends(inputs.key_positions, keys, block_k, 0)
    some, every = tile_visibility(call, q_low[:, :, None], q_high[:, :, None], k_low[:, None], k_high[:, None], jnp)
    if call.mask_mod is not None:
        found = _by_function(call, inputs, block_q, block_k)
        some, every = some & found[0], every & found[1]
    every = every & _complete(queries, block_q)[None, :, None] & _complete(keys, block_k)[None, None]
    if inputs.query_segments is not None:
        own, other = _segment_ends(inputs.query_segments, block_q), _segment_ends(inputs.key_segments, block_k)
        own, other = tuple(end[:, :, None] for end in own), tuple(end[:, None] for end in other)
        some = some & (own[0] <= other[1]) & (other[0] <= own[1])
        every = every & (own[2] == own[1]) & (other[2] == other[1]) & (own[1] == other[1]) & (own[2] >= 0)
    return some, every


def _by_function(call: FlashAttentionCall, inputs: FlashAttentionInputs, block_q: int, block_k: int) -> tuple[Any, Any]:
    """The same by the mask function: by bounds, or pair by pair."""
    assert call.mask_mod is not None
    ends = (_index_ends(call.query.shape[1], block_q), _index_ends(call.key.shape[1], block_k))
    found = static_tiles(call.mask_mod, tuple(end[:, None] for end in ends[0]), tuple(end[None] for end in ends[1]))
    if found is None or call.query_index is not None or call.key_index is not None:
        return device_tiles(call, inputs, call.mask_mod, block_q, block_k)
    shape = len(ends[0][0]), len(ends[1][0])
    some, every = (jnp.asarray(np.broadcast_to(tiles, shape)[None]) for tiles in found)
    return some, every


def _index_ends(length: int, block: int) -> tuple[Any, Any]:
    """First and last index of each block."""
    start = np.arange(0, length, block)
    return start, np.minimum(start + block, length) - 1


def _complete(length: int, block: int) -> Any:
    return jnp.arange(-(-length // block)) < length // block


def _blocks(array: Any, block: int, mode: str, **options: Any) -> Any:
    """`[b, n]` as `[b, blocks, block]`."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % block)), mode=mode, **options)
    return padded.reshape(array.shape[0], -1, block)


def _position_ends(positions: Any, length: int, block: int, offset: int) -> tuple[Any, Any]:
    """Smallest and largest position of each block, `[b?, blocks]`."""
    if positions is None:
        start = jnp.arange(0, length, block, dtype=jnp.int32)[None]
        return start + offset, jnp.minimum(start + block, length) - 1 + offset
    parts = _blocks(positions, block, "edge")
    return parts.min(-1), parts.max(-1)


def _segment_ends(segments: Any, block: int) -> tuple[Any, Any, Any]:
    """Smallest segment without padding, largest, and smallest with padding, of each block."""
    parts = _blocks(segments, block, "constant", constant_values=-1)
    return jnp.where(parts < 0, _LARGEST, parts).min(-1), parts.max(-1), parts.min(-1)
