"""Tiles of queries, each of one request, computed on the device; and the loads of a tile at one step.

Axes: t tiles, k key heads, g query heads per key head, q queries of a tile, s keys of a step, d and e sizes of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.common.pages import FUSED, alternating
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs
from ejkernel.utils.dtypes import accumulator, common_dtype
from ejkernel_xla._numerics import dot_precision
from ejkernel_xla.paged_attention.config import PagedAttentionConfig

_UNBOUNDED = 2**30
"""Stands for no window; small enough for int32."""


class Tiles(NamedTuple):
    """Every tile `[t]`: its request, its first row among the tokens, the rows `low <= row < high` that are its own, what to add to
    a row for its position and for its number among the request's new tokens, and the keys `begin <= key < end` that it may see."""

    request: Any
    first: Any
    low: Any
    high: Any
    to_position: Any
    to_local: Any
    begin: Any
    end: Any


class Rows(NamedTuple):
    """Every token `[n]`: whether a request owns it, its tile, and its row in that tile."""

    owned: Any
    tile: Any
    row: Any


class Sizes(NamedTuple):
    """Static sizes of the tiling: rows per tile, keys per step, tiles together, number of tiles (a multiple of `together`)."""

    block_q: int
    block_k: int
    together: int
    tiles: int

    @classmethod
    def of(cls, call: PagedAttentionCall, config: PagedAttentionConfig) -> Sizes:
        tokens, requests = call.query.shape[1], call.kv_lens.shape[1]
        block_q = min(config.block_q, tokens)
        busy = min(requests, tokens)
        tiles = (tokens - busy) // block_q + busy
        together = min(config.tiles_per_step, tiles)
        return cls(block_q, min(config.block_k, max(call.longest, 1)), together, -(-tiles // together) * together)


def tile_list(call: PagedAttentionCall, sizes: Sizes, member: PagedAttentionInputs) -> tuple[Tiles, Rows]:
    """Split the new tokens of every request into tiles; the last tiles may be empty."""
    tokens, requests, height = call.query.shape[1], call.kv_lens.shape[1], sizes.block_q
    starts = jnp.clip(member.query_start_loc[:-1], 0, tokens)
    ends = jnp.maximum(jnp.clip(member.query_start_loc[1:], 0, tokens), starts)
    tiles_of = -(-(ends - starts) // height)
    tiles_up_to = jnp.cumsum(tiles_of)

    index = jnp.arange(sizes.tiles, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(tiles_up_to, index, side="right"), requests - 1).astype(jnp.int32)
    low = starts[request] + (index - tiles_up_to[request] + tiles_of[request]) * height
    high = jnp.where(index < tiles_up_to[-1], jnp.minimum(low + height, ends[request]), low)
    to_local = -starts[request]
    to_position = member.kv_lens[request] - ends[request]
    end = jnp.minimum(member.kv_lens[request], call.longest)
    if call.causal:
        end = jnp.minimum(end, high + to_position)
    window = _UNBOUNDED if call.window is None else min(call.window, _UNBOUNDED)
    begin = jnp.maximum(low + to_position - window + 1, 0)
    if member.first_keys is not None:
        own = low[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
        first = member.first_keys[jnp.clip(own, 0, tokens - 1)]
        begin = jnp.maximum(begin, jnp.min(jnp.where(own < high[:, None], first, _UNBOUNDED), axis=1, initial=_UNBOUNDED))
    end = jnp.where(high > low, end, begin)
    tiles = Tiles(request, jnp.clip(low, 0, tokens - height), low, high, to_position, to_local, begin, end)

    row = jnp.arange(tokens, dtype=jnp.int32)
    own = jnp.clip(jnp.searchsorted(ends, row, side="right"), 0, requests - 1)
    owned = (row >= starts[own]) & (row < ends[own])
    tile = jnp.clip(tiles_up_to[own] - tiles_of[own] + (row - starts[own]) // height, 0, sizes.tiles - 1)
    return tiles, Rows(owned, tile, jnp.clip(row - tiles.first[tile], 0, height - 1))


def steps_of(tiles: Tiles, sizes: Sizes) -> Any:
    """How many steps each tile needs."""
    return jnp.maximum(-(-(tiles.end - tiles.begin) // sizes.block_k), 0)


class Block(NamedTuple):
    """The keys of one step: positions `[t,s]`, page and offset in it `[t,s]` (in bounds), whether they exist `[t,s]`."""

    keys: Any
    page: Any
    offset: Any
    exists: Any


class Scores(NamedTuple):
    """key `[t,k,s,d]` and value `[t,k,s,e]` as stored and without NaN; raw `query . key`, logits, and slope, the derivative of
    the soft cap (None for 1), all `[t,k,g,q,s]`; visible `[t,1,1,q,s]`; bias_at, indices into qq_bias with those outside of it
    beyond its end; key_factor and value_factor `[t,k,1,1,s]` of the stored rows (None for 1)."""

    key: Any
    value: Any
    raw: Any
    logits: Any
    slope: Any
    visible: Any
    bias_at: Any
    key_factor: Any
    value_factor: Any


class Attention:
    """Paged attention of one batch member."""

    def __init__(self, call: PagedAttentionCall, sizes: Sizes, member: PagedAttentionInputs) -> None:
        self.call, self.sizes, self.member = call, sizes, member
        self.groups = call.query.shape[2] // call.heads
        stored = jnp.dtype(call.key_pages.dtype)
        self.stored_whole = not jnp.issubdtype(stored, jnp.floating)
        query = jnp.dtype(call.query.dtype)
        self.dtype = query if stored.itemsize == 1 else common_dtype(query, stored)
        self.wide = accumulator(self.dtype)
        self.dot = functools.partial(
            jnp.einsum, precision=dot_precision(call.precision, self.dtype), preferred_element_type=self.wide
        )
        self.key_scale = _per_key_head(member.key_scale, call.heads)
        self.value_scale = _per_key_head(member.value_scale, call.heads)

    @property
    def readable(self) -> bool:
        """Whether there is anything to read."""
        return self.call.longest * self.call.pages.pages > 0

    def rows(self, tiles: Tiles) -> Any:
        """`[t,q]`"""
        return tiles.first[:, None] + jnp.arange(self.sizes.block_q, dtype=jnp.int32)[None]

    def _own(self, tiles: Tiles) -> Any:
        """`[t,q]`"""
        row = self.rows(tiles)
        return (row >= tiles.low[:, None]) & (row < tiles.high[:, None])

    def take(self, array: Any, tiles: Tiles) -> Any:
        """The tiles' rows of an array `[n,h,...]` as `[t,k,g,q,...]`; 0 for rows of others, which may hold NaN."""
        found = array[self.rows(tiles)]
        found = jnp.where(self._own(tiles).reshape(*found.shape[:2], *[1] * (found.ndim - 2)), found, 0)
        found = found.reshape(*found.shape[:2], self.call.heads, self.groups, *found.shape[3:])
        return jnp.moveaxis(found, 1, 3)

    def put(self, array: Any, rows: Rows, empty: float = 0.0) -> Any:
        """The inverse, from all tiles; rows that no request owns hold `empty`."""
        array = jnp.moveaxis(array, 3, 1)
        array = array.reshape(*array.shape[:2], -1, *array.shape[4:])
        found = array[rows.tile, rows.row]
        return jnp.where(rows.owned.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.asarray(empty, found.dtype))

    def block(self, tiles: Tiles, step: Any) -> Block:
        call, shape = self.call, self.call.pages
        keys = tiles.begin[:, None] + step * self.sizes.block_k + jnp.arange(self.sizes.block_k, dtype=jnp.int32)[None]
        entry = jnp.minimum(keys // shape.page_size, call.block_tables.shape[2] - 1)
        page = self.member.block_tables[tiles.request[:, None], entry]
        exists = (keys < tiles.end[:, None]) & (page >= 0) & (page < shape.pages)
        return Block(keys, jnp.clip(page, 0, shape.pages - 1), keys % shape.page_size, exists)

    def scores(self, tiles: Tiles, query: Any, block: Block) -> Scores:
        """From `query . key` to logits before the mask; query is `[t,k,g,q,d]`."""
        call = self.call
        visible, bias, bias_at = self._visible(tiles, block)
        key, value, nan = self._load(block, visible)
        rows = query.astype(self.dtype).reshape(*query.shape[:2], -1, query.shape[4])
        raw = self.dot("tkmd,tksd->tkms", rows, key).reshape(*query.shape[:4], -1)
        logits = raw * call.softmax_scale
        if self.key_scale is not None:
            logits = logits * self.key_scale[None, :, None, None, None]
        key_factor, nan = self._factor(self.member.key_token_scale, block, nan)
        value_factor, nan = self._factor(self.member.value_token_scale, block, nan)
        if key_factor is not None:
            logits = logits * key_factor
        if nan is not None:
            logits = jnp.where(visible, logits + nan, 0)
        slope = None
        if call.logits_soft_cap is not None:
            capped = jnp.tanh(logits / call.logits_soft_cap)
            logits, slope = call.logits_soft_cap * capped, 1 - capped * capped
        if self.member.alibi_slopes is not None:
            slopes = self.member.alibi_slopes.astype(self.wide).reshape(1, call.heads, self.groups, 1, 1)
            logits = logits + slopes * self.distance(tiles, block)
        if bias is not None:
            logits = logits + bias
        return Scores(key, value, raw, logits, slope, visible, bias_at, key_factor, value_factor)

    def _factor(self, scale: Any, block: Block, nan: Any) -> tuple[Any, Any]:
        """The factor of each stored row `[t,k,1,1,s]`, and NaN where it or a row is not finite, for the queries that see it."""
        if scale is None:
            return None, nan
        found = scale.at[block.page, block.offset].get(mode="promise_in_bounds").astype(self.wide)
        found = jnp.swapaxes(jnp.broadcast_to(found, (*found.shape[:2], self.call.heads)), 1, 2)[:, :, None, None, :]
        lost = found * jnp.zeros((), self.wide)
        return jnp.where(jnp.isfinite(found), found, 0), lost if nan is None else nan + lost

    def distance(self, tiles: Tiles, block: Block) -> Any:
        """Position of the key less that of the query, `[t,1,1,q,s]`, never positive where causal."""
        position = self.rows(tiles) + tiles.to_position[:, None]
        return (block.keys[:, None, :] - position[:, :, None])[:, None, None].astype(self.wide)

    def _visible(self, tiles: Tiles, block: Block) -> tuple[Any, Any, Any]:
        call, row = self.call, self.rows(tiles)
        position = (row + tiles.to_position[:, None])[:, :, None]
        keys = block.keys[:, None, :]
        visible = block.exists[:, None, :] & self._own(tiles)[:, :, None]
        if call.causal:
            visible &= keys <= position
        if call.window is not None:
            visible &= keys > position - min(call.window, _UNBOUNDED)
        if self.member.first_keys is not None:
            visible &= keys >= self.member.first_keys[row][:, :, None]
        if self.member.qq_bias is None:
            return visible[:, None, None], None, None
        bias = self.member.qq_bias
        width = bias.shape[-1]
        local = (row + tiles.to_local[:, None])[:, :, None]
        new = keys - (tiles.to_position - tiles.to_local)[:, None, None]
        inside = (new >= 0) & (new < width) & (local < width)
        request = jnp.minimum(tiles.request, bias.shape[0] - 1)[:, None, None]
        at = (request, jnp.clip(local, 0, width - 1), jnp.where(inside, new, width))
        found = bias.astype(self.wide).at[at].get(mode="fill", fill_value=0)
        hidden = found == -jnp.inf
        return (visible & ~hidden)[:, None, None], jnp.where(hidden, 0, found)[:, None, None], at

    def _load(self, block: Block, visible: Any) -> tuple[Any, Any, Any]:
        """NaN-safe keys and values: NaN and infinities propagate only to queries that see them.

        With one row per tile, keys that it does not see become 0. With more, a key or value that is not finite becomes 0 and the
        third result, `[t,k,1,1,s]`, NaN in its place, which reaches exactly the rows that see it.
        """
        read = functools.partial(_reader(self.call), block.page, block.offset)
        member, sizes = self.member, (self.call.query.shape[3], self.call.value_size)
        if jnp.dtype(self.call.key_pages.dtype).itemsize == 1 and not self.stored_whole:
            member, _ = jax.lax.optimization_barrier((member, block.page))
        value_pages = member.key_pages if member.value_pages is None else member.value_pages
        key = read(member.key_pages, 0, self.call.heads, sizes[0]).astype(self.dtype)
        value = read(value_pages, 1, self.call.heads, sizes[1]).astype(self.dtype)
        if self.stored_whole:
            return key, value, None
        if self.sizes.block_q == 1:
            seen = visible[:, 0, 0, 0, None, :, None]
            return jnp.where(seen, key, 0), jnp.where(seen, value, 0), None
        zero = jnp.zeros((), self.dtype)
        nan = (jnp.sum(key * zero, axis=-1) + jnp.sum(value * zero, axis=-1)).astype(self.wide)
        key, value = (jnp.where(jnp.isfinite(x), x, zero) for x in (key, value))
        return key, value, nan[:, :, None, None, :]


def _per_key_head(scale: Any, heads: int) -> Any:
    return None if scale is None else jnp.broadcast_to(scale, (heads,))


def _reader(call: PagedAttentionCall) -> Callable[..., Any]:
    """`read(page [t,s], offset [t,s], pages, which, heads, size) -> [t,k,s,size]`; which is 0 for keys and 1 for values where
    pages hold both. Only the tokens that are asked for are read, so a cache is never copied or transposed."""

    def read(page: Any, offset: Any, pages: Any, which: int, heads: int, size: int) -> Any:
        if call.layout == "hptd":
            return jnp.moveaxis(pages.at[:, page, offset].get(mode="promise_in_bounds"), 0, 1)
        if call.layout in FUSED:
            found = alternating(pages.at[page, offset].get(mode="promise_in_bounds"), call.layout)
            found = found[:, :, which : 2 * heads : 2, :size]
        elif call.layout == "phtd":
            found = pages.at[page, :, offset].get(mode="promise_in_bounds")
        else:
            found = pages.at[page, offset].get(mode="promise_in_bounds")
        return jnp.swapaxes(found, 1, 2)

    return read
