"""The split-KV schedule, computed on the device from the lengths, so that one compilation serves every mix of requests.

A tile is a run of new tokens of one request with the query heads of one key head. The keys of a tile are split so that all
programs are about equally long, and not split if that gains little, as partial results must be combined. A unit is one split of
one tile. Static shapes bound the number of units; surplus programs exit at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel_triton.paged_attention.config import PagedAttentionConfig, heads_of_tile, rows_of_tile

UNBOUNDED = 2**30
"""Stands for no window; small enough for int32."""
MIN_BLOCKS_PER_SPLIT = 2
"""Fewest key blocks of a split; shorter ones are not worth a combine."""
_SQUARE = 2048
"""Requests up to which a cumulative sum is computed as a masked sum: one device kernel instead of several."""


class Schedule(NamedTuple):
    """Per request `[s, R]`, s being 1 or the batch: splits of each tile (0 = served by another pass), cumulative units, and
    cumulative units of tiles with several splits, whose results are partial."""

    splits: Any
    units_up_to: Any
    partials_up_to: Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one pass.

    Attributes:
        rows: of a tile: tokens times heads, padded.
        keys: of a key block.
        heads_of_tile: query heads of a tile, all of one key head.
        head_tiles: tiles that cover all query heads.
        tokens_of_tile: new tokens of a tile.
        units: bound on the units of a batch member.
        partials: bound on the units of a batch member with partial results; 0 if no tile is long enough to split.
        wanted: target number of units.
        above, up_to: new tokens of the requests that this pass serves: `above < tokens <= up_to`.
    """

    rows: int
    keys: int
    heads_of_tile: int
    head_tiles: int
    tokens_of_tile: int
    units: int
    partials: int
    wanted: int
    above: int
    up_to: int

    @classmethod
    def of(
        cls,
        call: PagedAttentionCall,
        config: PagedAttentionConfig,
        *,
        tokens_of_tile: int,
        keys: int,
        above: int = 0,
        up_to: int = UNBOUNDED,
    ) -> Sizes:
        batch, tokens, heads, _ = call.query.shape
        together = heads_of_tile(call)
        head_tiles = call.heads * -(-(heads // call.heads) // together)
        rows = rows_of_tile(call, tokens_of_tile)
        busy = min(call.kv_lens.shape[1], tokens)
        tiles = busy if up_to <= tokens_of_tile else (tokens - busy) // tokens_of_tile + busy
        most_splits = max(-(-call.longest // (MIN_BLOCKS_PER_SPLIT * keys)), 1)
        most = tiles * most_splits
        wanted = max(1, min(config.programs // (head_tiles * batch), most))
        units = min(tiles + wanted, most)
        partials = min(units, 2 * wanted) if most_splits > 1 else 0
        return cls(rows, keys, together, head_tiles, tokens_of_tile, units, partials, wanted, above, up_to)


def make_schedule(call: PagedAttentionCall, sizes: Sizes, starts: Any, lengths: Any) -> Schedule:
    """From `query_start_loc [s, R + 1]` and `kv_lens [s, R]`.

    With c = ceil(sum of blocks / wanted), a tile of n blocks has n / c splits, rounded to nearest and at least one: at most
    n / c + 1, which sums to at most wanted + tiles; if it has more than one, at most 4/3 n / c, which sums to at most 2 wanted.
    A unit has up to 3/2 c blocks.
    """
    tokens = call.query.shape[1]
    begins = jnp.clip(starts[:, :-1], 0, tokens)
    counts = jnp.maximum(jnp.clip(starts[:, 1:], 0, tokens) - begins, 0)
    counts = jnp.where((counts > sizes.above) & (counts <= sizes.up_to), counts, 0)
    tiles = -(-counts // sizes.tokens_of_tile)
    keys = jnp.clip(lengths, 0, call.longest)
    if call.window is not None:
        seen = min(call.window, UNBOUNDED) + sizes.keys + (sizes.tokens_of_tile if call.causal else counts)
        keys = jnp.minimum(keys, seen)
    blocks = -(-keys // sizes.keys)
    chunk = jnp.maximum(-(-jnp.sum(tiles * blocks, axis=1, keepdims=True) // sizes.wanted), MIN_BLOCKS_PER_SPLIT)
    splits = jnp.where(tiles > 0, jnp.maximum((2 * blocks + chunk) // (2 * chunk), 1), 0)
    units = tiles * splits
    return Schedule(splits, _cumulative(units), _cumulative(jnp.where(splits > 1, units, 0)))


def _cumulative(values: Any) -> Any:
    length = values.shape[1]
    if length > _SQUARE:
        return jnp.cumsum(values, axis=1, dtype=jnp.int32)
    index = jnp.arange(length)
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], values[:, None, :], 0), axis=2, dtype=jnp.int32)
