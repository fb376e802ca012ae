"""The forward phase: online softmax over the key tiles of one query block after another (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla.flash_attention.config import FlashAttentionConfig
from ejkernel_xla.flash_attention.masks import Plan, Tile, plan
from ejkernel_xla.flash_attention.tiles import (
    BY_QUERY,
    Operands,
    heads_last,
    nan_safe,
    operands,
    piece,
    product,
    put_piece,
    scores,
    zeros,
)


class Rows(NamedTuple):
    """Running state of one query block: maximum, sum of `exp(logit - maximum)` `[b,k,g,q]`, weighted values `[b,k,g,q,e]`."""

    maximum: Any
    total: Any
    values: Any


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: FlashAttentionConfig) -> FlashAttentionOutputs:
    return outputs_of(call, attend(call, operands(call, inputs), plan(call, config.block_q, config.block_k)))


def attend(call: FlashAttentionCall, arrays: Operands, plan: Plan) -> Rows:
    """All rows, over the tiles of a plan: maximum and sum `[b,k,g,t]`, finished output `[b,k,g,t,e]`."""
    return sweep(call, nan_safe(plan, arrays), plan)


def outputs_of(call: FlashAttentionCall, rows: Rows) -> FlashAttentionOutputs:
    out = heads_last(rows.values, grouped=True)
    wanted = call.return_lse or call.save_residuals
    lse = heads_last(log_sum(rows).astype(jnp.float32), grouped=True) if wanted else None
    return FlashAttentionOutputs(out, lse)


def log_sum(rows: Rows) -> Any:
    """Log-sum-exp; -inf for a fully masked row, with finite derivatives of every order."""
    empty = rows.total == 0
    return jnp.where(empty, -jnp.inf, rows.maximum + jnp.log(jnp.where(empty, 1, rows.total)))


def sweep(call: FlashAttentionCall, arrays: Operands, plan: Plan) -> Rows:
    """All rows: maximum and sum `[b,k,g,t]`, finished output `[b,k,g,t,e]`."""
    shape = arrays.query.shape[:4]
    if plan.single_tile:
        before = None if arrays.sinks is None else _start(call, arrays)
        rows = _online_softmax_update(call, arrays, plan, Tile(*map(int, plan.tiles[0])), before)
        return rows._replace(values=_finish(call, rows))
    start = _start(call, arrays)

    def untouched(queries: int) -> Rows:
        maximum, total = (jnp.broadcast_to(x, (*shape[:3], queries)) for x in start[:2])
        return Rows(maximum, total, _no_values(arrays, queries))

    block, every = untouched(plan.block_q), untouched(shape[3])
    every = every._replace(values=every.values.astype(arrays.query.dtype))

    def own(tile: Tile, every: Any, block: Any) -> Any:
        """A last block that starts earlier preserves the rows of the previous block, which may have other tiles."""
        if plan.count is None or not plan.query_tail:
            return block
        rows = jax.lax.iota(jnp.int32, plan.block_q) + tile.query_start >= tile.first_query
        return jnp.where(rows.reshape(-1, *[1] * (block.ndim - 4)), block, piece(every, 3, tile.query_start, plan.block_q))

    def step(carry: tuple[Rows, Rows], tile: Tile) -> tuple[Rows, Rows]:
        rows, every = carry
        rows = Rows(*(jnp.where(tile.begins > 0, fresh, old) for fresh, old in zip(block, rows, strict=True)))
        rows = _online_softmax_update(call, arrays, plan, tile, rows)
        done = rows._replace(values=_finish(call, rows))
        every = Rows(*(put_piece(x, 3, tile.query_start, own(tile, x, y)) for x, y in zip(every, done, strict=True)))
        return rows, every

    return plan.visit(step, (block, every))[1]


def _start(call: FlashAttentionCall, arrays: Operands) -> Rows:
    """The state before the first tile: empty, or the sinks."""
    wide = accumulator(arrays.query.dtype)
    shape = (*arrays.query.shape[:3], 1)
    if arrays.sinks is None:
        return Rows(zeros(shape, wide, arrays, -jnp.inf), zeros(shape, wide, arrays), None)
    sinks = arrays.sinks.astype(wide)
    maximum = jax.lax.stop_gradient(jnp.max(sinks, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(sinks - _shift(maximum)), axis=-1, keepdims=True)
    maximum, total = (jnp.broadcast_to(x, shape) + zeros(shape, wide, arrays) for x in (maximum, total))
    return Rows(maximum, total, None)


def _no_values(arrays: Operands, queries: int) -> Any:
    return zeros((*arrays.query.shape[:3], queries, arrays.value.shape[-1]), accumulator(arrays.query.dtype), arrays)


def _shift(maximum: Any) -> Any:
    """The shift of the logits: the maximum, or 0 for fully masked rows, since -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def _online_softmax_update(call: FlashAttentionCall, arrays: Operands, plan: Plan, tile: Tile, rows: Rows | None) -> Rows:
    """Online-softmax update of a query block's state (None if empty) with one tile."""
    query = piece(arrays.query, 3, tile.query_start, plan.block_q)
    key = piece(arrays.key, 2, tile.key_start, plan.block_k)
    value = piece(arrays.value, 2, tile.key_start, plan.block_k)
    scored = scores(call, product(call, query, key, ((4,), (3,))), arrays, plan, tile, BY_QUERY)
    logits = scored.logits if scored.visible is None else jnp.where(scored.visible, scored.logits, -jnp.inf)
    # Any constant may be subtracted, so the maximum needs no derivative.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    if rows is not None:
        maximum = jnp.maximum(rows.maximum, maximum)
    shift = _shift(maximum)
    weights = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    if scored.keep is not None:
        weights = weights * scored.keep
    values = product(call, weights.astype(value.dtype), value, ((4,), (2,)))
    if rows is not None:
        rescale = jnp.exp(rows.maximum - shift)
        total = rows.total * rescale + total
        values = values if rows.values is None else rows.values * rescale[..., None] + values
    return Rows(maximum, total, values)


def _finish(call: FlashAttentionCall, rows: Rows) -> Any:
    values = rows.values
    if call.normalize_output:
        values = values / jnp.where(rows.total == 0, 1, rows.total)[..., None]
    return values.astype(call.query.dtype)
