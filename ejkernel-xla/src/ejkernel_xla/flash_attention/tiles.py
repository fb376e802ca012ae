"""The operands of a call with heads first, and the slices that one tile reads.

Axes: b batch, k key heads, g query heads per key head, q queries, s keys, d and e sizes of keys and values. Batch and heads
stay separate axes throughout, so that XLA can partition them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call import vary_like
from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel.operations.flash_attention.score_functions.functions import places_of
from ejkernel.operations.flash_attention.score_functions.record import Mapped, Places
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._numerics import finite, propagate_nan
from ejkernel_xla.flash_attention.masks import Plan, Tile, both, by_position
from ejkernel_xla.flash_attention.score_functions import Pull, with_pull

_PRECISIONS = {
    "default": jax.lax.Precision.DEFAULT,
    "high": jax.lax.Precision.HIGH,
    "highest": jax.lax.Precision.HIGHEST,
}


class Operands(NamedTuple):
    """query `[b,k,g,q,d]`, key `[b,k,s,d]`, value `[b,k,s,e]`, bias and mask `[b?,k?,g?,q?,s?]`, segments and positions
    `[b?,q]` and `[b?,s]`, sinks `[b?,k,g,n]`, dropout_streams `[b,k,g,2]`; places of the scores, where a function asks for them."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_segments: Any
    key_segments: Any
    query_positions: Any
    key_positions: Any
    sinks: Any
    dropout_streams: Any
    places: Any = None


def heads_first(x: Any, groups: int | None = None) -> Any:
    """`[b,t,h,...] -> [b,h,t,...]`; with `groups`, `[b,k,g,t,...]`."""
    if groups is None:
        return jnp.swapaxes(x, 1, 2)
    x = x.reshape(*x.shape[:2], x.shape[2] // groups, groups, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def heads_last(x: Any, grouped: bool) -> Any:
    """The inverse of `heads_first`."""
    if not grouped:
        return jnp.swapaxes(x, 1, 2)
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def operands(call: FlashAttentionCall, inputs: FlashAttentionInputs) -> Operands:
    """Bring heads first and split query heads into `[k, g]`."""
    key_heads = call.key.shape[2]
    groups = call.query.shape[2] // max(key_heads, 1)

    def split(x: Any) -> Any:
        if x is None:
            return None
        return x.reshape(x.shape[0], *((1, 1) if x.shape[1] == 1 else (key_heads, groups)), *x.shape[2:])

    return Operands(
        query=heads_first(inputs.query, max(groups, 1)),
        key=heads_first(inputs.key),
        value=heads_first(inputs.value),
        bias=split(inputs.bias),
        mask=split(inputs.mask),
        sinks=split(inputs.softmax_aux),
        dropout_streams=split(inputs.dropout_streams),
        places=_places(call, inputs, split),
        **{name: getattr(inputs, name) for name in Operands._fields if name.endswith(("segments", "positions"))},
    )


def _places(call: FlashAttentionCall, inputs: FlashAttentionInputs, split: Callable[[Any], Any]) -> Places | None:
    if call.score_mod is None and call.mask_mod is None:
        return None
    places = places_of(call, inputs)
    return places._replace(head=split(places.head[..., None])[..., 0])


def zeros(shape: tuple[int, ...], dtype: Any, like: Any, fill: float = 0.0) -> Any:
    """A loop's initial value that varies over the mesh axes over which the data does (inside `shard_map`)."""
    return vary_like(jnp.full(shape, fill, dtype), like)


def piece(x: Any, axis: int, start: Any, size: int) -> Any:
    """`x[start : start + size]` along an axis; the whole of it where it is broadcast or not longer."""
    if x is None or x.shape[axis] in (1, size):
        return x
    sizes = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return jax.lax.dynamic_slice(x, _starts(x, {axis: start}), sizes, allow_negative_indices=False)


def put_piece(x: Any, axis: int, start: Any, part: Any) -> Any:
    """x with `x[start : ...] = part` along an axis."""
    return jax.lax.dynamic_update_slice(x, part, _starts(x, {axis: start}), allow_negative_indices=False)


def add_piece(total: Any, axes: tuple[int, ...], starts: tuple[Any, ...], part: Any) -> Any:
    """`total[start : ...] += part`, along those of the axes on which part is shorter."""
    if total.shape == part.shape:
        return total + part
    shorter = {axis: start for axis, start in zip(axes, starts, strict=True) if part.shape[axis] != total.shape[axis]}
    where = _starts(total, shorter)
    current = jax.lax.dynamic_slice(total, where, part.shape, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice(total, current + part, where, allow_negative_indices=False)


def _starts(x: Any, given: dict[int, Any]) -> list[Any]:
    return [given.get(axis, np.int32(0)) for axis in range(x.ndim)]


def product(call: FlashAttentionCall, a: Any, b: Any, contracting: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """A product over batch axes b and k, accumulated in the wide dtype."""
    wide = accumulator(a.dtype)
    exact = a.dtype == wide and call.precision is None
    precision = jax.lax.Precision.HIGHEST if exact else _PRECISIONS.get(call.precision or "default")
    return jax.lax.dot_general(a, b, (contracting, ((0, 1), (0, 1))), precision=precision, preferred_element_type=wide)


class View(NamedTuple):
    """Layout of the slices of one tile, so that they broadcast against its scores."""

    rows: Callable[[Any], Any]
    """`[b,k,g,q]` (leading axes may be missing)"""
    columns: Callable[[Any], Any]
    """`[b,s]` or `[s]`"""
    entries: Callable[[Any], Any]
    """`[b,k,g,q,s]`"""
    keys: int
    queries: int
    """axes of the scores"""
    letters: str
    """all axes of the scores"""


def _batch_first(x: Any, rank: int) -> Any:
    """`[b,x]` or `[x]` with axes of size 1 between."""
    return x.reshape(*x.shape[:-1], *[1] * (rank - x.ndim), x.shape[-1])


BY_QUERY = View(
    rows=lambda x: _batch_first(x, 4)[..., None],
    columns=lambda x: _batch_first(x, 5),
    entries=lambda x: x,
    keys=4,
    queries=3,
    letters="bkgqs",
)
"""Scores `[b,k,g,q,s]`."""

BY_KEY = View(
    rows=lambda x: _batch_first(x, 4)[:, :, None],
    columns=lambda x: _batch_first(x, 3)[..., None, None],
    entries=lambda x: jnp.moveaxis(x, 4, 2),
    keys=2,
    queries=4,
    letters="bksgq",
)
"""Scores `[b,k,s,g,q]`: contractions over queries need no transpose."""


class Scores(NamedTuple):
    """logits after bias, soft cap and score function; slope, the derivative of the capped ones by `scale * query . key`, None for
    1; visible, None for all; keep, the factor of dropout, None for 1; pull, the way back through the score function, or None."""

    logits: Any
    slope: Any
    visible: Any
    keep: Any
    pull: Pull | None


def scores(
    call: FlashAttentionCall, raw: Any, arrays: Operands, plan: Plan, tile: Tile, view: View, *, pulled: bool = False
) -> Scores:
    """Logits from `query . key`. The caller applies the mask; `pulled` if it differentiates."""
    logits = _rounded(raw, call.logits_dtype) * call.softmax_scale
    bias = _entries(arrays.bias, plan, tile, view)
    rows, columns = _indices(plan.block_q, tile.query_start), _indices(plan.block_k, tile.key_start)
    visible = _visible(call, arrays, plan, tile, view, rows, columns, bias)
    if bias is not None:
        logits = logits + jnp.where(visible, bias, 0).astype(logits.dtype)
    slope = None
    if call.logits_soft_cap is not None:
        capped = jnp.tanh(logits / call.logits_soft_cap)
        logits, slope = call.logits_soft_cap * capped, 1 - capped * capped
    pull = None
    if call.score_mod is not None:
        function = Mapped(call.score_mod, _tile_places(arrays, plan, tile), view.letters)
        logits, of = with_pull(function, logits) if pulled else (function(logits), None)
        visible = both(visible, logits != -jnp.inf)
        pull = None if of is None else of(visible)
    return Scores(logits, slope, visible, _keep(call, arrays, view, rows, columns), pull)


def _tile_places(arrays: Operands, plan: Plan, tile: Tile) -> Places:
    places = arrays.places
    return places._replace(
        query=piece(places.query, 1, tile.query_start, plan.block_q), key=piece(places.key, 1, tile.key_start, plan.block_k)
    )


def _indices(size: int, start: Any) -> Any:
    return jax.lax.iota(jnp.int32, size) + start


def _entries(x: Any, plan: Plan, tile: Tile, view: View) -> Any:
    if x is None:
        return None
    return view.entries(piece(piece(x, 3, tile.query_start, plan.block_q), 4, tile.key_start, plan.block_k))


def _rounded(raw: Any, dtype: str) -> Any:
    """Rounded to a narrower dtype; a pair of conversions could be optimised away."""
    info = jnp.finfo(dtype)
    if info.nmant >= jnp.finfo(raw.dtype).nmant:
        return raw
    return jax.lax.reduce_precision(raw, info.nexp, info.nmant)


def _visible(
    call: FlashAttentionCall, arrays: Operands, plan: Plan, tile: Tile, view: View, rows: Any, columns: Any, bias: Any
) -> Any:
    def by_masks() -> Any:
        return _by_masks(call, arrays, plan, tile, view, rows, columns)

    visible = None
    if tile.full is None:
        visible = by_masks()
    elif (shape := jax.eval_shape(by_masks)) is not None:
        everything = vary_like(jnp.ones(shape.shape, bool), arrays)
        visible = jax.lax.cond(tile.full > 0, lambda: everything, lambda: vary_like(by_masks(), arrays))
    if plan.key_tail:
        visible = both(visible, view.columns(columns >= tile.first_key))
    if plan.query_tail and view is BY_KEY:
        visible = both(visible, view.rows(_per_query(rows >= tile.first_query)))
    if bias is not None:
        visible = both(visible, bias != -jnp.inf)
    return visible


def _by_masks(call: FlashAttentionCall, arrays: Operands, plan: Plan, tile: Tile, view: View, rows: Any, columns: Any) -> Any:
    """Visibility mask of a tile by positions, masks and segments; None if all is visible."""
    visible = None
    if plan.structured or plan.predicate is not None:
        query = piece(arrays.query_positions, 1, tile.query_start, plan.block_q)
        key = piece(arrays.key_positions, 1, tile.key_start, plan.block_k)
        query = view.rows(_per_query(rows + call.query_offset if query is None else query))
        key = view.columns(columns if key is None else key)
        visible = by_position(call, query, key) if plan.structured else None
        if plan.predicate is not None:
            visible = both(visible, plan.predicate(query, key))
    if call.mask_mod is not None:
        visible = both(visible, Mapped(call.mask_mod, _tile_places(arrays, plan, tile), view.letters)(None))
    if arrays.mask is not None:
        visible = both(visible, _entries(arrays.mask, plan, tile, view))
    if arrays.query_segments is not None:
        query = view.rows(_per_query(piece(arrays.query_segments, 1, tile.query_start, plan.block_q)))
        key = view.columns(piece(arrays.key_segments, 1, tile.key_start, plan.block_k))
        visible = both(visible, (query == key) & (query >= 0))
    return visible


def _per_query(x: Any) -> Any:
    """`[b?,q]` or `[q]` as `[b?,1,1,q]`."""
    return _batch_first(x if x.ndim == 2 else x[None], 4)


def _keep(call: FlashAttentionCall, arrays: Operands, view: View, rows: Any, columns: Any) -> Any:
    """0 for a dropped entry, else `1 / (1 - rate)`."""
    if not call.dropout_rate:
        return None
    streams = arrays.dropout_streams[..., None, :]
    random = dropout.bits(
        view.rows(streams[..., 0]),
        view.rows(streams[..., 1]),
        view.rows(_per_query(rows).astype(jnp.uint32)),
        view.columns(columns.astype(jnp.uint32)),
    )
    keep_scale = 1 / (1 - call.dropout_rate) if call.dropout_rate < 1 else 0.0
    return jnp.where(random < dropout.threshold(call.dropout_rate), 0.0, keep_scale)


def nan_safe(plan: Plan, arrays: Operands) -> Operands:
    """NaN-safe keys and values: non-finite values propagate only to queries that see them.

    A weight of 0 times NaN would be NaN, so the value is made finite and its key's logits become NaN instead, which propagates
    exactly to the queries that see it.
    """
    if not plan.masked:
        return arrays
    key = arrays.key + propagate_nan(arrays.value)[..., None].astype(arrays.key.dtype)
    return arrays._replace(key=key, value=finite(arrays.value))
