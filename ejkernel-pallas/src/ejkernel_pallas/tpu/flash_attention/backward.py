"""Gradients of attention on TPU: a dK/dV kernel, a dQ kernel and a dBias kernel.

Each recomputes the weights of its tiles from the log-sum-exp and accumulates in VMEM in a fixed order, so results are
deterministic. Scores are `[BK, BQ]` as in forward. With w the weights and o the output, the gradient of a logit is `w * (d_out
. value - delta)`, where delta is `d_out . o` minus the gradient of the log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.plugin import current_target
from ejkernel_pallas._call import compiler_params, result_like
from ejkernel_pallas.tpu._vmem import memory_of
from ejkernel_pallas.tpu.flash_attention import tiles as lists
from ejkernel_pallas.tpu.flash_attention.arrays import Operands, finite, has_mask, padded_length, with_tokens_as_rows
from ejkernel_pallas.tpu.flash_attention.config import BackwardConfig
from ejkernel_pallas.tpu.flash_attention.cost import bias_cost, by_key_cost, by_query_cost
from ejkernel_pallas.tpu.flash_attention.scores import LOG2_E, Scores, Tile, precision_of, product

KEY_NAME, QUERY_NAME, BIAS_NAME = (f"ejkernel_flash_attention_backward_{owner}" for owner in ("key", "query", "bias"))


def _weights_and_logit_gradients(tile: Tile, mains: Any, masked: bool) -> tuple[Any, Any]:
    """Weights after dropout and gradients of the logits of a tile, both `[BK, BQ]`; before `scale`, after the cap."""
    r_query, r_key, r_value, r_grad, r_lse, r_delta = mains
    precision = precision_of(tile.call)
    b_qk = product(r_key[...], r_query[...], (1, 1), precision)  # [BK, BQ]
    b_logits, b_slope, b_bias = tile.logits(b_qk, 0)
    b_weights = jnp.exp2(b_logits - r_lse[...])
    b_value_grad = product(r_value[...], r_grad[...], (1, 1), precision)
    b_keep = tile.dropout_factor(b_logits.shape, 0)
    b_grad = b_weights * ((b_value_grad if b_keep is None else b_value_grad * b_keep) - r_delta[...])
    b_weights = b_weights if b_keep is None else b_weights * b_keep
    b_grad = b_grad if b_slope is None else b_grad * b_slope
    if masked:
        b_visible = tile.visible(b_logits.shape, 0, b_bias, queries_end=True)
        b_weights, b_grad = (jnp.where(b_visible, b_value, 0.0) for b_value in (b_weights, b_grad))
    return b_weights, b_grad


def _key_kernel(*refs: Any, call: FlashAttentionCall, tiles: lists.Tiles, operands: Operands, group: int) -> None:
    (r_tiles,), mains, extras, (r_d_key, r_d_value), (r_key_sum, r_value_sum) = operands.split(refs, 1, 6, 2)
    packed = tiles.at(r_tiles, pl.program_id(0), pl.program_id(2))
    i_member = pl.program_id(3)
    i_head = pl.program_id(1) * group + i_member
    tile = operands.tile(pl.program_id(0), i_head, lists.other_of(packed), lists.owner_of(packed), extras)
    r_query, r_grad = mains[0], mains[3]

    @pl.when(((packed & lists.FIRST) != 0) & (i_member == 0))
    def _start() -> None:
        r_key_sum[...] = jnp.zeros_like(r_key_sum)
        r_value_sum[...] = jnp.zeros_like(r_value_sum)

    def add(masked: bool) -> None:
        b_weights, b_grad = _weights_and_logit_gradients(tile, mains, masked)
        precision = precision_of(call)
        r_value_sum[...] += product(b_weights.astype(r_grad.dtype), r_grad[...], (1, 0), precision)  # [BK, V]
        r_key_sum[...] += product(b_grad.astype(r_query.dtype), r_query[...], (1, 0), precision)  # [BK, D]

    tiles.branches(packed, add)

    @pl.when(((packed & lists.LAST) != 0) & (i_member == group - 1))
    def _finish() -> None:
        r_d_key[...] = (r_key_sum[...] * call.softmax_scale).astype(r_d_key.dtype)
        r_d_value[...] = r_value_sum[...].astype(r_d_value.dtype)


def _query_kernel(*refs: Any, call: FlashAttentionCall, tiles: lists.Tiles, operands: Operands) -> None:
    (r_tiles,), mains, extras, (r_d_query,), (r_sum,) = operands.split(refs, 1, 6, 1)
    packed = tiles.at(r_tiles, pl.program_id(0), pl.program_id(2))
    tile = operands.tile(pl.program_id(0), pl.program_id(1), lists.owner_of(packed), lists.other_of(packed), extras)
    r_key = mains[1]

    @pl.when((packed & lists.FIRST) != 0)
    def _start() -> None:
        r_sum[...] = jnp.zeros_like(r_sum)

    def add(masked: bool) -> None:
        _, b_grad = _weights_and_logit_gradients(tile, mains, masked)
        r_sum[...] += product(r_key[...], b_grad.astype(r_key.dtype), (0, 0), precision_of(call))  # [D, BQ]

    tiles.branches(packed, add)

    @pl.when((packed & lists.LAST) != 0)
    def _finish() -> None:
        r_d_query[...] = (r_sum[...] * call.softmax_scale).astype(r_d_query.dtype)


def _bias_kernel(*refs: Any, call: FlashAttentionCall, operands: Operands, scores: Scores) -> None:
    _, mains, extras, (r_d_bias,), (r_sum,) = operands.split(refs, 0, 6, 1)
    place = [pl.program_id(axis) for axis in range(8)]
    i_batch, i_head, i_query, i_key = (place[axis] + place[4 + axis] for axis in range(4))
    tile = operands.tile(i_batch, i_head, i_query, i_key, extras)
    reduced = [pl.num_programs(axis) - 1 - pl.program_id(axis) for axis in range(4, 8)]

    @pl.when(sum(place[4:]) == 0)
    def _start() -> None:
        r_sum[...] = jnp.zeros_like(r_sum)

    _, b_grad = _weights_and_logit_gradients(tile, mains, True)
    if scores.keyed:
        b_grad = jnp.transpose(b_grad)  # [BQ, BK]
        r_sum[...] += b_grad if scores.queried else jnp.sum(b_grad, axis=0, keepdims=True)
    else:
        r_sum[...] += jnp.sum(b_grad, axis=0, keepdims=True)  # [1, BQ]

    @pl.when(sum(reduced) == 0)
    def _finish() -> None:
        r_d_bias[...] = r_sum[...]


class _Backward:
    """The operands that all kernels share."""

    def __init__(
        self,
        call: FlashAttentionCall,
        inputs: FlashAttentionInputs,
        outputs: FlashAttentionOutputs,
        cotangents: FlashAttentionOutputs,
    ) -> None:
        self.call, self.inputs = call, inputs
        self.group = call.query.shape[2] // call.key.shape[2]
        grad = jnp.zeros(outputs.out.shape, outputs.out.dtype) if cotangents.out is None else cotangents.out
        delta = jnp.sum(grad.astype(jnp.float32) * outputs.out.astype(jnp.float32), axis=-1)
        self.mean = delta if cotangents.lse is None else delta - cotangents.lse
        self.lse = outputs.lse
        self.empty = outputs.lse == -jnp.inf
        lse = jnp.where(self.empty, 0.0, outputs.lse * LOG2_E)
        values = (inputs.query, inputs.key, inputs.value, grad.astype(inputs.query.dtype))
        if has_mask(call):
            # MMAs over all rows, masked ones with weight 0, need finite operands. Non-finite values of visible rows propagate
            # through the log-sum-exp to all weights of their row.
            bad = ~jnp.all(jnp.isfinite(values[0]), axis=-1) | ~jnp.all(jnp.isfinite(values[3]), axis=-1)
            lse = jnp.where(bad, jnp.nan, lse)
            values = tuple(finite(value) for value in values)
        self.values, self.lse_in_twos = values, lse

    def mains(self, rows: int, columns: int) -> tuple[Any, ...]:
        """query, key, value, gradient of out `[b, h, tokens, size]`; log-sum-exp and delta `[b, h, 1, tokens]`."""
        lengths = (rows, columns, columns, rows)
        arrays = (with_tokens_as_rows(value, length) for value, length in zip(self.values, lengths, strict=True))
        return *arrays, *(_as_rows(statistic, rows) for statistic in (self.lse_in_twos, self.mean))

    def specs(self, block_q: int, block_k: int, where: Any) -> list[pl.BlockSpec]:
        """Their block specs; `where` is a `TileIndex`."""
        size, value_size, group = self.call.query.shape[3], self.call.value.shape[3], self.group

        def at_query(*place: Any) -> Any:
            batch, head, i_query, _ = where(place)
            return batch, head, i_query, 0

        def at_key(*place: Any) -> Any:
            batch, head, _, i_key = where(place)
            return batch, jax.lax.div(head, jnp.int32(group)), i_key, 0

        def at_row(*place: Any) -> Any:
            batch, head, i_query, _ = where(place)
            return batch, head, 0, i_query

        return [
            pl.BlockSpec((None, None, block_q, size), at_query),
            pl.BlockSpec((None, None, block_k, size), at_key),
            pl.BlockSpec((None, None, block_k, value_size), at_key),
            pl.BlockSpec((None, None, block_q, value_size), at_query),
            pl.BlockSpec((None, None, 1, block_q), at_row),
            pl.BlockSpec((None, None, 1, block_q), at_row),
        ]


def _as_rows(statistic: Any, length: int) -> Any:
    """`[b, t, h]` as `[b, h, 1, length]`."""
    with_tokens_as_lanes = jnp.transpose(statistic, (0, 2, 1))[:, :, None]
    return jnp.pad(with_tokens_as_lanes, ((0, 0), (0, 0), (0, 0), (0, length - with_tokens_as_lanes.shape[3])))


def _key_gradients(data: _Backward, block_q: int, block_k: int) -> tuple[Any, Any]:
    call, group = data.call, data.group
    batch, queries, _, size = call.query.shape
    keys, key_heads, value_size = call.value.shape[1:]
    rows, columns = padded_length(queries, block_q), padded_length(keys, block_k)
    tiles = lists.tiles_of(call, data.inputs, block_q, block_k, by_key=True)
    operands = Operands(call, data.inputs, tiles, rows, columns, block_q, block_k)
    where = operands.tile_index(lambda i, h, step, member: h * group + member, axes=4, by_key=True)
    extras, extra_specs = operands.described(where)
    mains = data.mains(rows, columns)

    def at_key(i: Any, h: Any, step: Any, member: Any, r_tiles: Any) -> Any:
        return i, h, lists.owner_of(tiles.at(r_tiles, i, step)), 0

    sizes = ((size, call.key.dtype), (value_size, call.value.dtype))
    results = pl.pallas_call(
        functools.partial(_key_kernel, call=call, tiles=tiles, operands=operands, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, key_heads, tiles.length, group),
            in_specs=[*data.specs(block_q, block_k, where), *extra_specs],
            out_specs=[pl.BlockSpec((None, None, block_k, width), at_key) for width, _ in sizes],
            scratch_shapes=[pltpu.VMEM((block_k, width), jnp.float32) for width, _ in sizes],
        ),
        out_shape=[result_like(mains[0], (batch, key_heads, columns, width), dtype) for width, dtype in sizes],
        compiler_params=_params(KEY_NAME, "parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=by_key_cost(operands),
        name=KEY_NAME,
    )(jnp.asarray(tiles.packed), *mains, *extras)
    d_key, d_value = (jnp.transpose(result[:, :, :keys], (0, 2, 1, 3)) for result in results)
    return d_key, d_value


def _query_gradient(data: _Backward, block_q: int, block_k: int) -> Any:
    call = data.call
    batch, queries, heads, size = call.query.shape
    rows, columns = padded_length(queries, block_q), padded_length(call.key.shape[1], block_k)
    tiles = lists.tiles_of(call, data.inputs, block_q, block_k)
    operands = Operands(call, data.inputs, tiles, rows, columns, block_q, block_k)
    where = operands.tile_index(lambda i, h, step: h)
    extras, extra_specs = operands.described(where)
    mains = data.mains(rows, columns)

    def at_query(i: Any, h: Any, step: Any, r_tiles: Any) -> Any:
        return i, h, 0, lists.owner_of(tiles.at(r_tiles, i, step))

    result = pl.pallas_call(
        functools.partial(_query_kernel, call=call, tiles=tiles, operands=operands),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, tiles.length),
            in_specs=[*data.specs(block_q, block_k, where), *extra_specs],
            out_specs=pl.BlockSpec((None, None, size, block_q), at_query),
            scratch_shapes=[pltpu.VMEM((size, block_q), jnp.float32)],
        ),
        out_shape=result_like(mains[0], (batch, heads, size, rows), call.query.dtype),
        compiler_params=_params(QUERY_NAME, "parallel", "parallel", "arbitrary"),
        cost_estimate=by_query_cost(operands),
        name=QUERY_NAME,
    )(jnp.asarray(tiles.packed), *mains, *extras)
    return jnp.transpose(result[..., :queries], (0, 3, 1, 2))


def _bias_gradient(data: _Backward, block_q: int, block_k: int) -> Any:
    """The grid has every axis of the scores twice: kept axes of the bias, then reduced axes innermost."""
    call, bias = data.call, data.inputs.bias
    scores = Scores.of(call.bias)
    batch, queries, heads, _ = call.query.shape
    keys = call.key.shape[1]
    rows, columns = padded_length(queries, block_q), padded_length(keys, block_k)
    operands = Operands(call, data.inputs, None, rows, columns, block_q, block_k)
    axes = (batch, heads, rows // block_q, columns // block_k)
    dropout_factor = (scores.batched, scores.headed, scores.queried or (not scores.keyed and rows > block_q), scores.keyed)
    outer = tuple(count if keep else 1 for count, keep in zip(axes, dropout_factor, strict=True))
    inner = tuple(1 if keep else count for count, keep in zip(axes, dropout_factor, strict=True))

    def where(place: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(place[axis] + place[4 + axis] for axis in range(4))

    extras, extra_specs = operands.described(where)
    mains = data.mains(rows, columns)
    block = scores.block(block_q, block_k)
    lengths = (rows if scores.queried else 1, columns) if scores.keyed else (1, rows)
    result = pl.pallas_call(
        functools.partial(_bias_kernel, call=call, operands=operands, scores=scores),
        grid=(*outer, *inner),
        in_specs=[*data.specs(block_q, block_k, where), *extra_specs],
        out_specs=pl.BlockSpec((None, None, *block), lambda *place: scores.place(*where(place))),
        scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
        out_shape=result_like(mains[0], (outer[0], outer[1], *lengths), jnp.float32),
        compiler_params=_params(BIAS_NAME, *["parallel"] * 4, *["arbitrary"] * 4),
        cost_estimate=bias_cost(operands, math.prod(outer)),
        name=BIAS_NAME,
    )(*mains, *extras)
    if not scores.keyed:
        result = jnp.swapaxes(result, 2, 3)[:, :, :queries]
        result = result if scores.queried else jnp.sum(result, axis=2, keepdims=True)
    return result[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _params(name: str, *semantics: str) -> Any:
    return compiler_params(name, semantics, memory_of(current_target()).vmem)


def _sinks_gradient(data: _Backward) -> Any:
    """Gradient of the sinks, with weights from the log-sum-exp; a fully masked row without sinks has none."""
    sinks = data.inputs.softmax_aux
    lse = jnp.where(data.empty, jnp.inf, data.lse)[..., None]  # [b, t, h, 1]
    weights = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    gradient = -jnp.sum(weights * data.mean[..., None], axis=1)
    gradient = gradient if sinks.shape[0] == gradient.shape[0] else jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(sinks.dtype)


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BackwardConfig,
) -> FlashAttentionInputs:
    gradients: dict[str, Any] = {
        name: jnp.zeros_like(value)
        for name in ("query", "key", "value", "bias", "softmax_aux")
        if (value := getattr(inputs, name)) is not None
    }
    data = _Backward(call, inputs, outputs, cotangents)
    if inputs.softmax_aux is not None:
        gradients["softmax_aux"] = _sinks_gradient(data)
    if inputs.query.size and inputs.key.size:
        gradients["key"], gradients["value"] = _key_gradients(data, config.key_block_q, config.key_block_k)
        gradients["query"] = _query_gradient(data, config.query_block_q, config.query_block_k)
        if inputs.bias is not None:
            gradients["bias"] = _bias_gradient(data, config.query_block_q, config.query_block_k)
    return FlashAttentionInputs(**{**dict.fromkeys(FlashAttentionInputs._fields), **gradients})
