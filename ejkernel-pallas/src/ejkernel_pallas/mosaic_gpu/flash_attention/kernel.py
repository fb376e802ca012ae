"""The launches of `flash_attention`: kernel arguments, and the work that XLA does before and after."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.call import vary_like
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.operations.flash_attention.ranges import tile_ranges
from ejkernel_pallas.mosaic_gpu.flash_attention.backward import Gradient
from ejkernel_pallas.mosaic_gpu.flash_attention.bias_gradient import BiasGradient
from ejkernel_pallas.mosaic_gpu.flash_attention.config import (
    BackwardConfig,
    ForwardConfig,
    backward_bias,
    bias_gradient_config,
    forward_bias,
    key_tiles_met,
    query_slots,
    sharing,
    sizes_of,
)
from ejkernel_pallas.mosaic_gpu.flash_attention.forward import Forward, launch
from ejkernel_pallas.mosaic_gpu.flash_attention.mask_params import LOG2_E, MaskParams, mask_params_of, token_info_of
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import MULTIPROCESSORS, ROWS
from ejkernel_pallas.mosaic_gpu.flash_attention.tile_scheduler import TileScheduler, make_scheduler

_TOKENS = 8
"""Stored lengths are multiples of it: rows of a swizzle atom."""


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: ForwardConfig) -> FlashAttentionOutputs:
    saved = call.return_lse or call.save_residuals
    if not _score_count(call):
        out, lse = _without_keys(call, inputs)
        return FlashAttentionOutputs(out, lse if saved else None)
    params, (size, value_size) = mask_params_of(call), sizes_of(call)
    batch, queries, heads, _ = call.query.shape
    packed = params.group if config.pack_gqa else 1
    block_q = config.warpgroups * ROWS // packed
    key, value = _nan_safe(inputs.key, inputs.value) if params.has_mask_or_bias else (inputs.key, inputs.value)
    query, key, value = (
        _stored(inputs.query, size, block_q if packed > 1 else _TOKENS),
        _stored(key, size),
        _stored(value, value_size),
    )
    length = query.shape[1]
    by_head = (heads,) if packed == 1 else (heads // packed, packed)
    query = query.reshape(batch, length, *by_head, size)
    arrays = [query, key, value, *token_info_of(params, inputs, block_q, config.block_k)]
    bias = forward_bias(call, config)
    if bias is not None:
        arrays.append(bias.stored(inputs.bias, queries, call.key.shape[1]))
    if params.token_info:
        arrays.append(tile_ranges(call, inputs, block_q, config.block_k, by_key=False))
    if inputs.softmax_aux is not None:
        arrays.append(_sink_starts(inputs.softmax_aux, params))
    plan = Forward(
        params=params,
        config=config,
        scheduler=_scheduler(call, block_q, persistent=config.persistent, packed=packed, other=config.block_k),
        size=size,
        value_size=value_size,
        dtype=call.query.dtype,
        ranges=bool(params.token_info),
        sinks=inputs.softmax_aux is not None,
        save_lse=saved,
        packed=packed,
        bias=bias,
        query_slots=query_slots(call, config),
    )
    results: list[tuple[tuple[int, ...], Any]] = [((batch, length, *by_head, value_size), call.query.dtype)]
    if saved:  # padded to whole blocks: TMA stores of untiled rows are not clipped
        results.append(((batch, heads // packed, -(-queries // block_q) * block_q * packed), jnp.float32))
    out, *lse = launch(plan, arrays, results)
    out = _cut(out.reshape(batch, length, heads, value_size), (batch, queries, heads, call.value.shape[3]))
    if not saved:
        return FlashAttentionOutputs(out, None)
    rows = lse[0].reshape(batch, heads // packed, -1, packed)[:, :, :queries]
    return FlashAttentionOutputs(out, jnp.swapaxes(rows, 1, 2).reshape(batch, queries, heads))


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BackwardConfig,
) -> FlashAttentionInputs:
    delta = _delta(outputs, cotangents)
    d_sinks = None if inputs.softmax_aux is None else _sink_gradient(inputs.softmax_aux, outputs.lse, delta)
    if not _score_count(call):
        zeros = (vary_like(jnp.zeros(x.shape, x.dtype), inputs) for x in inputs[:3])
        d_bias = None if inputs.bias is None else vary_like(jnp.zeros(inputs.bias.shape, inputs.bias.dtype), inputs)
        return FlashAttentionInputs(*zeros, bias=d_bias, softmax_aux=d_sinks)
    params, (size, value_size) = mask_params_of(call), sizes_of(call)
    arrays = (*inputs[:3], cotangents.out)
    widths = (size, size, value_size, value_size)
    rows = _rows(outputs.lse, delta)
    found: dict[str, Any] = {}
    for wanted in (*((("key",), ("value",)) if config.separate_dk_dv else (("key", "value"),)), ("query",)):
        found |= _gradients(call, inputs, [*_nan_safe_operands(arrays, widths, params, wanted), rows], config, wanted)
    gradients = (_cut(found[name], getattr(inputs, name).shape) for name in ("query", "key", "value"))
    return FlashAttentionInputs(*gradients, bias=_bias_gradient(call, inputs, cotangents.out, rows), softmax_aux=d_sinks)


def _gradients(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, mains: list[Any], config: BackwardConfig, wanted: tuple[str, ...]
) -> dict[str, Any]:
    """The padded gradients in `wanted`, by name."""
    params, (size, value_size) = mask_params_of(call), sizes_of(call)
    by_key = "query" not in wanted
    if by_key:
        other, num_stages, warpgroups = config.key_block_q, config.key_num_stages, config.key_warpgroups
    else:
        other, num_stages, warpgroups = config.query_block_k, config.query_num_stages, config.query_warpgroups
    own = warpgroups * ROWS
    splits = config.key_splits if by_key else 1
    block_q, block_k = (other, own) if by_key else (own, other)
    arrays = [*mains, *token_info_of(params, inputs, block_q, block_k)]
    bias = backward_bias(call, config, by_key=by_key)
    if bias is not None:
        arrays.append(bias.stored(inputs.bias, call.query.shape[1], call.key.shape[1]))
    if params.token_info:
        arrays.append(tile_ranges(call, inputs, block_q, block_k, by_key=by_key))
    plan = Gradient(
        params=params,
        scheduler=_scheduler(call, own, by_key=by_key, splits=splits),
        other=other,
        num_stages=num_stages,
        warpgroups=warpgroups,
        size=size,
        value_size=value_size,
        dtype=call.query.dtype,
        wanted=wanted,
        ranges=bool(params.token_info),
        splits=splits,
        bias=bias,
    )
    stored: dict[str, Any] = dict(zip(("query", "key", "value"), mains, strict=False))
    shapes = [stored[name].shape for name in wanted]
    if splits == 1:
        return dict(zip(wanted, plan.launch(arrays, [(shape, call.query.dtype) for shape in shapes]), strict=True))
    whole = [(splits, batch, -(-length // own) * own, *rest) for batch, length, *rest in shapes]
    sums = plan.launch(arrays, [(shape, jnp.float32) for shape in whole])
    return {name: jnp.sum(each, axis=0).astype(call.query.dtype) for name, each in zip(wanted, sums, strict=True)}


def _bias_gradient(call: FlashAttentionCall, inputs: FlashAttentionInputs, d_out: Any, statistics: Any) -> Any:
    """The gradient of the bias; None without a bias."""
    config = bias_gradient_config(call)
    if config is None:
        return None
    params, (size, value_size), bias = mask_params_of(call), sizes_of(call), config.tiles
    batch, queries, heads, _ = call.query.shape
    keys, own = call.key.shape[1], bias.warpgroups * ROWS
    owned = keys if bias.by_key else queries
    block_q, block_k = (bias.other, own) if bias.by_key else (own, bias.other)
    arrays = [_stored(inputs.query, size), _stored(inputs.key, size), _stored(inputs.value, value_size)]
    arrays += [_stored(d_out, value_size), statistics, *token_info_of(params, inputs, block_q, block_k)]
    arrays.append(bias.stored(inputs.bias, queries, keys))
    if params.token_info:
        arrays.append(tile_ranges(call, inputs, block_q, block_k, by_key=bias.by_key))
    blocks, tiles = -(-owned // own), -(-keys // bias.other)
    rows = (bias.batch, bias.heads) if bias.by_pair else (batch, heads)
    places = blocks if config.resident or not bias.by_pair else blocks * tiles
    total = places * rows[0] * rows[1]
    plan = BiasGradient(
        params=params,
        scheduler=TileScheduler(
            places,
            rows[1],
            rows[0],
            heads_in_l2=1,
            reverse=call.causal and not bias.by_key,
            programs=total if places == blocks else min(MULTIPROCESSORS, total),
        ),
        other=bias.other,
        num_stages=bias.num_stages,
        warpgroups=bias.warpgroups,
        size=size,
        value_size=value_size,
        dtype=call.query.dtype,
        wanted=("bias",),
        ranges=bool(params.token_info),
        splits=1,
        bias=bias,
        sharing=sharing(call),
        resident=config.resident,
        tiles=tiles,
    )
    given = inputs.bias
    if bias.by_pair:
        whole = (rows[0] * rows[1], blocks * own, tiles * bias.other)
        (sums,) = plan.launch(arrays, [(whole, bias.dtype)])
        return _cut(sums, (whole[0], queries, keys)).reshape(given.shape).astype(given.dtype)
    (sums,) = plan.launch(arrays, [((batch, heads, blocks * own), jnp.float32)])
    sums = jnp.expand_dims(sums[:, :, :owned], 2 if bias.by_key else 3)
    shared = tuple(axis for axis in range(4) if given.shape[axis] != sums.shape[axis])
    return jnp.sum(sums, axis=shared, keepdims=True).astype(given.dtype)


def _scheduler(
    call: FlashAttentionCall,
    own: int,
    *,
    by_key: bool = False,
    splits: int = 1,
    persistent: bool = False,
    packed: int = 1,
    other: int = ROWS,
) -> TileScheduler:
    """Scheduler of blocks of `own` queries or keys; under a causal mask the last queries, and the first keys, have the most
    work. Splits of a block are neighbours, as heads are; `packed` heads count as one."""
    owner, walked = (call.key, call.query) if by_key else (call.query, call.key)
    batch, length, heads, size = owner.shape
    group = call.query.shape[2] // call.key.shape[2]
    known = mask_params_of(call).by_index
    read = walked.shape[1] * (size + call.value.shape[3]) * 2
    return make_scheduler(
        -(-length // own),
        heads * splits // packed,
        batch,
        share=splits if by_key else group // packed,
        bytes_per_share=read * group if by_key else read,
        reverse=call.causal and not by_key,
        programs=MULTIPROCESSORS if persistent else None,
        lengths=[key_tiles_met(call, first, own, other) for first in range(0, length, own)] if persistent and known else None,
    )


def _score_count(call: FlashAttentionCall) -> int:
    batch, queries, heads, _ = call.query.shape
    return batch * queries * heads * call.key.shape[1]


def _without_keys(call: FlashAttentionCall, inputs: FlashAttentionInputs) -> tuple[Any, Any]:
    """Without query-key pairs only the sinks contribute; no kernel is launched."""
    rows = call.query.shape[:3]
    out = jnp.zeros((*rows, call.value.shape[3]), call.query.dtype)
    lse = jnp.full(rows, -jnp.inf, jnp.float32)
    if inputs.softmax_aux is not None:
        largest, total = _sink_sums(inputs.softmax_aux)
        lse = jnp.broadcast_to((jnp.where(total > 0, largest, 0) + jnp.log(total))[:, None], rows)
    return vary_like(out, inputs), vary_like(lse, inputs)


def _stored(array: Any, size: int, tokens: int = _TOKENS) -> Any:
    """Pad an array so that TMA can load it. Does not copy arrays that fit already."""
    return _padded(array, (0, -array.shape[1] % tokens, 0, size - array.shape[3]))


def _padded(array: Any, by: tuple[int, ...]) -> Any:
    return jnp.pad(array, [(0, extra) for extra in by]) if any(by) else array


def _cut(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else array[tuple(slice(0, extent) for extent in shape)]


def _finite(array: Any) -> Any:
    return jnp.where(jnp.isfinite(array), array, jnp.zeros((), array.dtype))


def _nan_safe_operands(
    arrays: tuple[Any, ...], widths: tuple[int, ...], params: MaskParams, wanted: tuple[str, ...]
) -> list[Any]:
    """Padded query, key, value and output gradient. Those that are summed over masked pairs, whose weight of 0 does not cancel
    NaN, are made finite. Those that only enter a score or `d_out . value` are masked with the pair."""
    summed = (
        "key" in wanted,  # d_key = sum over queries of d_logits * query
        "query" in wanted,  # d_query = sum over keys of d_logits * key
        False,  # values enter only `d_out . value`
        "value" in wanted,  # d_value = sum over queries of weights * d_out
    )
    mains = []
    for i_array, (array, width) in enumerate(zip(arrays, widths, strict=True)):
        stored = _stored(array, width)
        anyway = stored is not array and i_array != 2  # a padded copy is made anyway: make it finite
        mains.append(_stored(_finite(array), width) if params.has_mask_or_bias and (summed[i_array] or anyway) else stored)
    return mains


def _nan_safe(key: Any, value: Any) -> tuple[Any, Any]:
    """NaN-safe keys and values: values are made finite, as a masked value has weight 0; NaN in the key's logits, which the mask
    can remove, replaces a non-finite value."""
    bad = ~jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
    return jnp.where(bad, jnp.asarray(jnp.nan, key.dtype), key), _finite(value)


def _sink_sums(sinks: Any) -> tuple[Any, Any]:
    """Per head `[b, H]`: the largest sink, and the sum of exponentials relative to it, or to 0 if it is -inf."""
    sinks = sinks.astype(jnp.float32)
    largest = jnp.max(sinks, axis=-1, initial=-jnp.inf)
    return largest, jnp.sum(jnp.exp(sinks - jnp.where(largest == -jnp.inf, 0, largest)[..., None]), axis=-1)


def _sink_starts(sinks: Any, params: MaskParams) -> Any:
    """`[b, H, 2]`: initial maximum, in the kernel's units, and sum of a row."""
    largest, total = _sink_sums(sinks)
    return jnp.stack([largest * (LOG2_E / params.unit), total], axis=-1)


def _delta(outputs: FlashAttentionOutputs, cotangents: FlashAttentionOutputs) -> Any:
    """delta `[B, T, H]`, which is subtracted from the gradients of weights."""
    # The output of a fully masked row is 0; NaN in its cotangent must not propagate.
    d_out = jnp.where(outputs.out == 0, 0, cotangents.out)
    delta = jnp.sum(d_out.astype(jnp.float32) * outputs.out.astype(jnp.float32), axis=-1)
    # Keep it separate: fused with the padding and transpose, XLA would compute each sum in one thread.
    delta = lax.optimization_barrier(delta)
    return delta if cotangents.lse is None else delta - cotangents.lse


def _rows(lse: Any, delta: Any) -> Any:
    """Row statistics `[B, H, 2, T]`: the base-2 log-sum-exp, and minus delta, the initial value of the weights' gradients.
    Fully masked rows and padding get no weight."""
    shift = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    padding = ((0, 0), (0, -lse.shape[1] % ROWS + 2 * ROWS), (0, 0))  # a block may have three consumers
    rows = (jnp.pad(shift, padding, constant_values=jnp.inf), jnp.pad(-delta, padding))
    return jnp.stack([jnp.swapaxes(row, 1, 2) for row in rows], axis=2)


def _sink_gradient(sinks: Any, lse: Any, delta: Any) -> Any:
    """A sink is a logit without a value, so its d_logit is `-weight * delta`."""
    lse, delta = (jnp.swapaxes(row, 1, 2)[..., None] for row in (lse, delta))
    visible = lse != -jnp.inf
    weights = jnp.where(visible, jnp.exp(sinks[:, :, None].astype(jnp.float32) - jnp.where(visible, lse, 0)), 0)
    total = -jnp.sum(weights * delta, axis=2)
    total = total if sinks.shape[0] == total.shape[0] else jnp.sum(total, axis=0, keepdims=True)
    return total.astype(sinks.dtype)
