"""Forward attention on TPU: online softmax over the visible key tiles of each query block.

The grid runs over batches, heads and the tile list. Queries and values have tokens along lanes, `[D, T]` and `[V, S]`, keys are
`[S, D]`, so that both matmuls need no transpose: scores `[BK, BQ]`, output `[V, BQ]`. Maximum and sum of a query are one lane
of a row and start from the sinks.
"""

from __future__ import annotations

import functools
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
from ejkernel_pallas.tpu.flash_attention.arrays import (
    Operands,
    nan_safe,
    padded_length,
    with_tokens_as_lanes,
    with_tokens_as_rows,
)
from ejkernel_pallas.tpu.flash_attention.config import ForwardConfig
from ejkernel_pallas.tpu.flash_attention.cost import forward_cost
from ejkernel_pallas.tpu.flash_attention.scores import LN_2, LOG2_E, MASK_VALUE, precision_of, product

NAME = "ejkernel_flash_attention"


def _wants_lse(call: FlashAttentionCall) -> bool:
    return call.return_lse or call.save_residuals


def _kernel(*refs: Any, call: FlashAttentionCall, tiles: lists.Tiles, operands: Operands, config: ForwardConfig) -> None:
    (r_tiles, r_sinks), (r_query, r_key, r_value), extras, (r_out, *r_lse), (r_acc, r_max, r_sum) = operands.split(
        refs, 2, 3, 2 if _wants_lse(call) else 1
    )
    i_batch, i_head = pl.program_id(0), pl.program_id(1)
    packed = tiles.at(r_tiles, i_batch, pl.program_id(2))
    tile = operands.tile(i_batch, i_head, lists.owner_of(packed), lists.other_of(packed), extras)

    @pl.when((packed & lists.FIRST) != 0)
    def _start() -> None:
        start, total = MASK_VALUE, 0.0
        if call.softmax_aux is not None:
            i_sinks = 2 * (i_head + (i_batch * call.query.shape[2] if call.softmax_aux.shape[0] > 1 else 0))
            start, total = r_sinks[i_sinks], r_sinks[i_sinks + 1]
        r_acc[...] = jnp.zeros_like(r_acc)
        r_max[...] = jnp.full(r_max.shape, start, jnp.float32)
        r_sum[...] = jnp.full(r_sum.shape, total, jnp.float32)

    def scores(start: int) -> Any:
        b_key = r_key[pl.ds(start, config.block_k_compute), :]  # [PK, D]
        return product(b_key, r_query[...], (1, 0), precision_of(call))  # [PK, BQ]

    def add(masked: bool) -> None:
        b_qk = scores(0)
        for start in range(0, config.block_k, config.block_k_compute):
            b_next = scores(start + config.block_k_compute) if start + config.block_k_compute < config.block_k else b_qk
            b_logits, _, b_bias = tile.logits(b_qk, start)
            b_visible = tile.visible(b_logits.shape, start, b_bias, queries_end=False) if masked else None
            b_logits = b_logits if b_visible is None else jnp.where(b_visible, b_logits, MASK_VALUE)
            b_max = jnp.maximum(r_max[...], jnp.max(b_logits, axis=0, keepdims=True))  # [1, BQ]
            b_weights = jnp.exp2(b_logits - b_max)
            b_weights = b_weights if b_visible is None else jnp.where(b_visible, b_weights, 0.0)
            b_rescale = jnp.exp2(r_max[...] - b_max)
            b_value = r_value[:, pl.ds(start, config.block_k_compute)]  # [V, PK]
            b_keep = tile.dropout_factor(b_weights.shape, start)
            b_used = b_weights if b_keep is None else b_weights * b_keep
            b_product = product(b_value, b_used.astype(b_value.dtype), (1, 0), precision_of(call))  # [V, BQ]
            r_acc[...] = r_acc[...] * b_rescale + b_product
            r_sum[...] = r_sum[...] * b_rescale + jnp.sum(b_weights, axis=0, keepdims=True)
            r_max[...] = b_max
            b_qk = b_next

    tiles.branches(packed, add)

    @pl.when((packed & lists.LAST) != 0)
    def _finish() -> None:
        b_sum = r_sum[...]
        b_empty = b_sum == 0
        b_divisor = jnp.where(b_empty, 1.0, b_sum)
        b_out = r_acc[...] / b_divisor if call.normalize_output else r_acc[...]
        r_out[...] = b_out.astype(r_out.dtype)
        if r_lse:
            r_lse[0][...] = jnp.where(b_empty, -jnp.inf, (r_max[...] + jnp.log2(b_divisor)) * LN_2)


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: ForwardConfig) -> FlashAttentionOutputs:
    batch, queries, heads, size = call.query.shape
    keys, value_size = call.value.shape[1], call.value.shape[3]
    wants_lse = _wants_lse(call)
    if 0 in (batch, queries, keys, heads, value_size):
        return _without_keys(call, inputs, wants_lse)
    block_q, block_k = config.block_q, config.block_k
    rows, columns = padded_length(queries, block_q), padded_length(keys, block_k)
    tiles = lists.tiles_of(call, inputs, block_q, block_k)
    operands = Operands(call, inputs, tiles, rows, columns, block_q, block_k)
    query = with_tokens_as_lanes(inputs.query, rows)
    key, value = nan_safe(call, inputs.key, inputs.value)
    group = heads // call.key.shape[2]

    def at_query(i: Any, h: Any, step: Any, r_tiles: Any, *_: Any) -> Any:
        return i, h, 0, lists.owner_of(tiles.at(r_tiles, i, step))

    def at_key(i: Any, h: Any, step: Any, r_tiles: Any, *_: Any) -> Any:
        return i, jax.lax.div(h, jnp.int32(group)), lists.other_of(tiles.at(r_tiles, i, step)), 0

    def at_value(i: Any, h: Any, step: Any, r_tiles: Any, *_: Any) -> Any:
        return i, jax.lax.div(h, jnp.int32(group)), 0, lists.other_of(tiles.at(r_tiles, i, step))

    extras, extra_specs = operands.described(operands.tile_index(lambda i, h, step, *_: h))
    results = [(result_like(query, (batch, heads, value_size, rows), call.query.dtype), (None, None, value_size, block_q))]
    if wants_lse:
        results.append((result_like(query, (batch, heads, 1, rows), jnp.float32), (None, None, 1, block_q)))
    out, *lse = pl.pallas_call(
        functools.partial(_kernel, call=call, tiles=tiles, operands=operands, config=config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, tiles.length),
            in_specs=[
                pl.BlockSpec((None, None, size, block_q), at_query),
                pl.BlockSpec((None, None, block_k, size), at_key),
                pl.BlockSpec((None, None, value_size, block_k), at_value),
                *extra_specs,
            ],
            out_specs=[pl.BlockSpec(block, at_query) for _, block in results],
            scratch_shapes=[
                pltpu.VMEM((value_size, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
            ],
        ),
        out_shape=[result for result, _ in results],
        compiler_params=compiler_params(NAME, ("parallel", "parallel", "arbitrary"), memory_of(current_target()).vmem),
        cost_estimate=forward_cost(operands, wants_lse=wants_lse),
        name=NAME,
    )(
        jnp.asarray(tiles.packed),
        _sink_sums(inputs.softmax_aux),
        query,
        with_tokens_as_rows(key, columns),
        with_tokens_as_lanes(value, columns),
        *extras,
    )
    out = jnp.transpose(out[..., :queries], (0, 3, 1, 2))
    return FlashAttentionOutputs(out, jnp.transpose(lse[0][:, :, 0, :queries], (0, 2, 1)) if wants_lse else None)


def _sink_sums(sinks: Any) -> Any:
    """Per head: the largest sink as a base-2 exponent, and the sum of exponentials relative to it; flat pairs."""
    if sinks is None:
        return jnp.zeros(2, jnp.float32)
    sinks = sinks.astype(jnp.float32) * LOG2_E
    largest = jnp.maximum(jnp.max(sinks, axis=-1, initial=-jnp.inf), MASK_VALUE)
    return jnp.stack([largest, jnp.sum(jnp.exp2(sinks - largest[..., None]), axis=-1)], axis=-1).reshape(-1)


def _without_keys(call: FlashAttentionCall, inputs: FlashAttentionInputs, wants_lse: bool) -> FlashAttentionOutputs:
    """The outputs without query-key pairs."""
    rows = call.query.shape[:3]
    out = jnp.zeros((*rows, call.value.shape[3]), call.query.dtype)
    lse = jnp.full(rows, -jnp.inf, jnp.float32)
    if inputs.softmax_aux is not None:
        total = jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=-1)
        lse = jnp.broadcast_to(total[:, None], rows)
    return FlashAttentionOutputs(out, lse if wants_lse else None)
