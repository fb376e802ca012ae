"""The backward phase: recomputes transposed tiles from lse (Dao et al., FlashAttention, 2022)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.plugin import current_target
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._numerics import finite, propagate_nan
from ejkernel_xla.flash_attention.config import FlashAttentionConfig
from ejkernel_xla.flash_attention.forward import log_sum, sweep
from ejkernel_xla.flash_attention.masks import Plan, Tile, plan
from ejkernel_xla.flash_attention.tiles import (
    BY_KEY,
    Operands,
    Scores,
    add_piece,
    heads_first,
    heads_last,
    operands,
    piece,
    product,
    scores,
    zeros,
)


class Statistics(NamedTuple):
    """Per row `[b,k,g,q]`: weight = exp(logit - shift), and d_logit = weight * (d_out . value - delta)."""

    shift: Any
    delta: Any


class Gradients(NamedTuple):
    """Wide sums: query `[b,k,d,g,q]`, the others as the operands."""

    query: Any
    key: Any
    value: Any
    bias: Any
    values: Any
    sinks: Any = None


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: FlashAttentionConfig,
) -> FlashAttentionInputs:
    layout = plan(call, config.block_q_backward, config.block_k_backward)
    return gradients_of(inputs, backward_sweep(call, operands(call, inputs), outputs, cotangents, layout))


def gradients_of(inputs: FlashAttentionInputs, sums: Gradients) -> FlashAttentionInputs:
    """In the shapes and dtypes of the inputs."""
    bias, sinks = inputs.bias, inputs.softmax_aux
    return FlashAttentionInputs(
        query=heads_last(jnp.moveaxis(sums.query, 2, 4), grouped=True).astype(inputs.query.dtype),
        key=heads_last(sums.key, grouped=False).astype(inputs.key.dtype),
        value=heads_last(sums.value, grouped=False).astype(inputs.value.dtype),
        bias=None if bias is None else sums.bias.reshape(bias.shape).astype(bias.dtype),
        softmax_aux=None if sinks is None else sums.sinks.reshape(sinks.shape).astype(sinks.dtype),
        mod_values=sums.values,
    )


def backward_sweep(
    call: FlashAttentionCall,
    arrays: Operands,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    layout: Plan,
) -> Gradients:
    """The gradients over the tiles of a plan."""
    groups = arrays.query.shape[2]
    d_out = heads_first(cotangents.out, groups)
    stats = _statistics(call, arrays, layout, outputs, cotangents)
    d_sinks = None if arrays.sinks is None else _sinks(arrays.sinks, stats)
    if layout.masked:
        nonfinite = propagate_nan(arrays.query) + propagate_nan(d_out)
        arrays, stats, d_out = _nan_safe(arrays, stats, d_out, nonfinite)
    stats = stats._replace(shift=jnp.where(stats.shift == -jnp.inf, jnp.inf, stats.shift))
    if call.score_mod is not None and _values(arrays) is not None and call.normalize_output:
        stats = stats._replace(delta=_exact_delta(call, arrays, layout, stats, d_out, cotangents.lse))
    return _sweep(call, arrays, layout, stats, d_out)._replace(sinks=d_sinks)


def _statistics(
    call: FlashAttentionCall,
    arrays: Operands,
    layout: Plan,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
) -> Statistics:
    wide = accumulator(arrays.query.dtype)
    groups = arrays.query.shape[2]
    lse = heads_first(outputs.lse, groups).astype(wide)
    d_lse = None if cotangents.lse is None else heads_first(cotangents.lse, groups).astype(wide)
    rows = None
    if wide != jnp.float32 or not call.normalize_output:
        # lse is too narrow for float64, and the maximum is not saved: a sweep without values recomputes both with one matmul.
        rows = sweep(call, arrays._replace(value=arrays.value[..., :0]), layout)
        lse = log_sum(rows)
    if rows is not None and not call.normalize_output:
        # The maximum is held constant: d_logit = exp(logit - maximum) * (d_out . value + d_lse / total).
        delta = jnp.zeros_like(lse) if d_lse is None else -d_lse / jnp.where(rows.total == 0, 1, rows.total)
        return Statistics(jnp.where(rows.total == 0, -jnp.inf, rows.maximum), delta)
    d_out = cotangents.out
    if layout.masked:
        # The output of a fully masked row is 0; NaN in its cotangent must not propagate. Elsewhere it must.
        d_out = jnp.where(outputs.out == 0, 0, d_out)
    delta = heads_first(jnp.sum(d_out.astype(wide) * outputs.out.astype(wide), axis=-1), groups)
    return Statistics(lse, delta if d_lse is None else delta - d_lse)


def _exact_delta(call: FlashAttentionCall, arrays: Operands, plan: Plan, stats: Statistics, d_out: Any, d_lse: Any) -> Any:
    """delta from the weights instead of the rounded output: the gradient of an array that a function reads may be the sum of a
    row's d_logits, which cancel, so that the rounding would be all that is left."""
    wide = accumulator(arrays.query.dtype)

    def of_tile(tile: Tile) -> Any:
        parts = _weighted(call, arrays, plan, tile, stats, d_out)
        return jnp.sum(parts.weights * parts.d_weights, axis=2)

    if plan.single_tile:
        total = of_tile(Tile(*map(int, plan.tiles[0])))
    else:
        start = zeros(arrays.query.shape[:4], wide, (arrays, d_out))
        total = plan.visit(lambda sums, tile: add_piece(sums, (3,), (tile.query_start,), of_tile(tile)), start)
    return total if d_lse is None else total - heads_first(d_lse, arrays.query.shape[2]).astype(wide)


def _sinks(sinks: Any, stats: Statistics) -> Any:
    """A sink is a logit without a value, so its d_logit is `-weight * delta`. `[b?,k,g,n]`."""
    weights = jnp.exp(sinks[:, :, :, None].astype(stats.shift.dtype) - stats.shift[..., None])
    weights = jnp.where(stats.shift[..., None] == -jnp.inf, 0, weights)
    total = -jnp.sum(weights * stats.delta[..., None], axis=3)
    return total if sinks.shape[0] == total.shape[0] else jnp.sum(total, axis=0, keepdims=True)


def _nan_safe(arrays: Operands, stats: Statistics, d_out: Any, nonfinite: Any) -> tuple[Operands, Statistics, Any]:
    """NaN-safe path: keep NaN and infinities of masked rows and keys out of the matmuls, where 0 * NaN would spread them.

    All operands are made finite. A row that holds a non-finite number (`nonfinite`, 0 or NaN) gets NaN as its shift, so that
    its weights become NaN where it sees a key and stay 0 elsewhere. Keys are not changed here, since an infinite one may have a
    weight of 0; `_tile` makes them finite where they are multiplied with gradients.
    """
    shift = stats.shift + nonfinite.astype(stats.shift.dtype) + stats.delta * 0
    shift = jnp.where(stats.shift == -jnp.inf, stats.shift, shift)
    arrays = arrays._replace(query=finite(arrays.query), value=finite(arrays.value))
    return arrays, Statistics(shift, finite(stats.delta)), finite(d_out)


def _sweep(call: FlashAttentionCall, arrays: Operands, plan: Plan, stats: Statistics, d_out: Any) -> Gradients:
    if plan.single_tile:
        return _tile(call, arrays, plan, Tile(*map(int, plan.tiles[0])), stats, d_out)
    wide = accumulator(arrays.query.dtype)
    b, k, g, t, d = arrays.query.shape
    like = (arrays, d_out)
    sums = Gradients(
        zeros((b, k, d, g, t), wide, like),
        zeros(arrays.key.shape, wide, like),
        zeros(arrays.value.shape, wide, like),
        None if arrays.bias is None else zeros(arrays.bias.shape, wide, like),
        None if (values := _values(arrays)) is None else zeros(values.shape, wide, like),
    )

    def step(sums: Gradients, tile: Tile) -> Gradients:
        parts = _tile(call, arrays, plan, tile, stats, d_out)
        return Gradients(
            add_piece(sums.query, (4,), (tile.query_start,), parts.query),
            add_piece(sums.key, (2,), (tile.key_start,), parts.key),
            add_piece(sums.value, (2,), (tile.key_start,), parts.value),
            None if sums.bias is None else add_piece(sums.bias, (3, 4), (tile.query_start, tile.key_start), parts.bias),
            None if sums.values is None else sums.values + parts.values,
        )

    return plan.visit(step, sums)


class _Weighted(NamedTuple):
    """One tile, `[b,k,s,g,q]`: its weights before dropout, their gradients, and the scores; and the slices that it reads."""

    weights: Any
    d_weights: Any
    scored: Scores
    query: Any
    key: Any
    d_out: Any
    delta: Any


def _weighted(
    call: FlashAttentionCall, arrays: Operands, plan: Plan, tile: Tile, stats: Statistics, d_out: Any, *, pulled: bool = False
) -> _Weighted:
    query = piece(arrays.query, 3, tile.query_start, plan.block_q)
    key = piece(arrays.key, 2, tile.key_start, plan.block_k)
    value = piece(arrays.value, 2, tile.key_start, plan.block_k)
    d_out = piece(d_out, 3, tile.query_start, plan.block_q)
    shift, delta = (BY_KEY.rows(piece(x, 3, tile.query_start, plan.block_q)) for x in stats)
    scored = scores(call, product(call, key, query, ((3,), (4,))), arrays, plan, tile, BY_KEY, pulled=pulled)
    weights = jnp.exp(scored.logits - shift)
    if scored.visible is not None:
        weights = jnp.where(scored.visible, weights, 0)
    d_weights = product(call, value, d_out, ((3,), (4,)))
    if scored.keep is not None:
        d_weights = d_weights * scored.keep
    return _Weighted(weights, d_weights, scored, query, key, d_out, delta)


def _tile(call: FlashAttentionCall, arrays: Operands, plan: Plan, tile: Tile, stats: Statistics, d_out: Any) -> Gradients:
    """The contribution of one tile to every gradient."""
    weights, d_weights, scored, query, key, d_out, delta = _weighted(call, arrays, plan, tile, stats, d_out, pulled=True)
    d_logits = weights * (d_weights - delta)
    dropped_weights = weights if scored.keep is None else weights * scored.keep
    d_values = None
    if scored.pull is not None:
        d_logits, d_values = scored.pull(d_logits)
    if scored.slope is not None:
        d_logits = d_logits * (scored.slope if scored.visible is None else jnp.where(scored.visible, scored.slope, 0))
    d_raw = (d_logits * call.softmax_scale).astype(query.dtype)
    key = finite(key) if plan.masked else key
    # On CPU, XLA has no bfloat16 kernel for contractions over the leading axis of both operands; both dtypes are exact.
    wide = accumulator(key.dtype) if current_target().backend == "cpu" else key.dtype
    return Gradients(
        product(call, key.astype(wide), d_raw.astype(wide), ((2,), (2,))),
        product(call, d_raw, query, ((3, 4), (2, 3))),
        product(call, dropped_weights.astype(d_out.dtype), d_out, ((3, 4), (2, 3))),
        None if arrays.bias is None else _bias(arrays.bias, d_logits, plan),
        None if (values := _values(arrays)) is None else _of_values(values, d_values),
    )


def _values(arrays: Operands) -> Any:
    """`mod_values`, where there are any."""
    return None if arrays.places is None else arrays.places.values


def _of_values(values: Any, gradient: Any) -> Any:
    """A gradient in the shape of `mod_values`; 0 where only masks read them."""
    return jnp.zeros_like(values) if gradient is None else gradient.reshape(values.shape)


def _bias(bias: Any, d_logits: Any, plan: Plan) -> Any:
    """Sum `[b,k,s,g,q]` over the axes along which the bias is broadcast."""
    d_bias = jnp.moveaxis(d_logits, 2, 4)
    broadcast = tuple(axis for axis in range(5) if bias.shape[axis] == 1)
    return jnp.sum(d_bias, axis=broadcast, keepdims=True)
