"""The launches of `flash_attention`: kernel arguments, and the work that XLA does before and after."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.operations.flash_attention.ranges import tile_ranges
from ejkernel.operations.flash_attention.score_functions.functions import places_of
from ejkernel.operations.flash_attention.score_functions.record import Mapped
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.flash_attention.backward import key_gradient_kernel, query_gradient_kernel, tile_gradient_kernel
from ejkernel_triton.flash_attention.config import BackwardConfig, ForwardConfig
from ejkernel_triton.flash_attention.forward import forward_kernel
from ejkernel_triton.flash_attention.mask_params import LOG2_E, Lists, MaskParams, mask_params_of
from ejkernel_triton.flash_attention.score_params import score_params
from ejkernel_triton.flash_attention.split_precision import split_bf16

_CACHED_BYTES = 24 * 2**20
"""L2 cache budget for the keys and values of concurrently running programs."""

_TOKENS = ("query_segments", "key_segments", "query_positions", "key_positions")


def forward(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, config: ForwardConfig, lists: Lists | None = None
) -> FlashAttentionOutputs:
    """With `lists`, only listed tiles are visited."""
    saved = call.return_lse or call.save_residuals
    if not _score_count(call):
        out, lse = _without_keys(call, inputs)
    else:
        out, lse, _ = _attend(call, inputs, config, save_lse=saved, lists=lists)
    return FlashAttentionOutputs(out, lse if saved else None)


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BackwardConfig,
    lists: Lists | None = None,
) -> FlashAttentionInputs:
    """With `lists`, only listed tiles are visited, but by the gradient of the bias, which wants masks that say the same."""
    shift, delta = _statistics(call, inputs, outputs, cotangents, config)
    d_sinks = None if inputs.softmax_aux is None else _sink_gradient(inputs.softmax_aux, shift, delta)
    if not _score_count(call):
        zeros = (None if x is None else vary_like(jnp.zeros(x.shape, x.dtype), inputs) for x in inputs[:4])
        values = None if inputs.mod_values is None else vary_like(jnp.zeros_like(inputs.mod_values), inputs)
        return FlashAttentionInputs(*zeros, softmax_aux=d_sinks, mod_values=values)
    rows = _rows(call, cotangents.out, shift, delta)
    d_key, d_value = _key_gradients(call, inputs, rows, config, lists)
    return FlashAttentionInputs(
        query=_query_gradient(call, inputs, rows, config, lists),
        key=d_key,
        value=d_value,
        bias=None if inputs.bias is None else _bias_gradient(call, inputs, rows, config),
        softmax_aux=d_sinks,
        mod_values=None
        if inputs.mod_values is None
        else _value_gradient(call, inputs, (shift, delta), cotangents.lse, cotangents.out, config),
    )


def _rows(call: FlashAttentionCall, d_out: Any, shift: Any, delta: Any) -> tuple[Any, ...]:
    """What kernels read of each row."""
    start = jnp.where(shift == -jnp.inf, -jnp.inf, -shift * LOG2_E)
    return (*_operands((d_out,), mask_params_of(call)), _padded(start, -jnp.inf), _padded(-delta, 0.0))


def _score_count(call: FlashAttentionCall) -> int:
    batch, queries, heads, _ = call.query.shape
    return batch * queries * heads * call.key.shape[1]


def _without_keys(call: FlashAttentionCall, inputs: FlashAttentionInputs) -> tuple[Any, Any]:
    """Without query-key pairs only the sinks contribute; no kernel is launched."""
    rows = call.query.shape[:3]
    out = jnp.zeros((*rows, call.value.shape[3]), call.query.dtype)
    lse = jnp.full(rows, -jnp.inf, jnp.float32)
    if inputs.softmax_aux is not None:
        sinks = inputs.softmax_aux.astype(jnp.float32)
        largest = jnp.max(sinks, axis=-1, initial=-jnp.inf)
        shift = jnp.where(largest == -jnp.inf, 0, largest)
        lse = jnp.broadcast_to((shift + jnp.log(jnp.sum(jnp.exp(sinks - shift[..., None]), axis=-1)))[:, None], rows)
    return vary_like(out, inputs), vary_like(lse, inputs)


def _heads_in_l2(call: FlashAttentionCall) -> int:
    """Key heads whose keys and values fit in the L2 cache together."""
    batch, keys, heads, size = call.key.shape
    itemsize = 4 if call.key.dtype == "float32" else 2
    per_head = keys * (size + call.value.shape[3]) * itemsize
    return max(1, min(batch * heads, _CACHED_BYTES // per_head))


def _operands(arrays: tuple[Any, ...], mask_params: MaskParams) -> tuple[Any, ...]:
    """The operands as kernels load them: split to bfloat16 terms for bf16x6."""
    return arrays if mask_params.bf16_terms == 1 else tuple(map(split_bf16, arrays))


def _masks(inputs: FlashAttentionInputs) -> tuple[Any, ...]:
    """Absent arrays are replaced by the query; kernels do not read them."""
    arrays = (*map(_padded_rows, (inputs.bias, inputs.mask)), *(getattr(inputs, name) for name in _TOKENS))
    return tuple(inputs.query if array is None else array for array in arrays)


_READ = ("dropout_streams", "mod_values", "mod_integers", "batch_index", "head_index")


def _read(inputs: FlashAttentionInputs) -> tuple[Any, ...]:
    """The streams of dropout and what functions read, likewise."""
    arrays = (getattr(inputs, name) for name in _READ)
    return tuple(inputs.query if array is None else array for array in arrays)


def _padded_rows(scores: Any) -> Any:
    """Padded as `tiles.score_row_stride` expects."""
    if scores is None or not _row_padding(scores.shape):
        return scores
    return jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, _row_padding(scores.shape))))


def _row_padding(shape: tuple[int, ...]) -> int:
    return 0 if shape[3] == 1 else -shape[3] % 16


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _visited(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, blocks: tuple[int, int], lists: Lists | None, *, by_key: bool
) -> tuple[MaskParams, Any]:
    """The parameters of a kernel, and the tile ranges that it loads; any array if it loads none."""
    params = mask_params_of(call)
    if lists is not None:
        stored, list_block = lists(*blocks, by_key)
        full = call.bias is None or call.logits_soft_cap is None
        return dataclasses.replace(
            params,
            ranges=2 if stored.shape[0] > 1 else 1,
            list_heads=stored.shape[1],
            list_block=list_block,
            masked_first=False,
            masked_first_by_key=False,
            has_full_tiles=full,
            nan_safe=True,
        ), stored
    if not params.ranges:
        return params, inputs.query
    stored = tile_ranges(call, inputs, *blocks, by_key=by_key) * blocks[0 if by_key else 1]
    return dataclasses.replace(params, ranges=2 if stored.shape[0] > 1 else 1), stored


def _attend(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    config: ForwardConfig,
    *,
    save_lse: bool,
    save_maximum: bool = False,
    lists: Lists | None = None,
) -> list[Any]:
    """out, and each row's log-sum-exp and maximum if requested."""
    batch, queries, heads, size = call.query.shape
    mask_params, stored = _visited(call, inputs, (config.block_q, config.block_k), lists, by_key=False)
    if config.always_mask:
        mask_params = dataclasses.replace(mask_params, has_full_tiles=False)
    query, key, value = _operands(inputs[:3], mask_params)
    blocks = _cdiv(queries, config.block_q)
    sinks = query if inputs.softmax_aux is None else inputs.softmax_aux
    return call_kernel(
        forward_kernel,
        (
            *(query, key, value, *_masks(inputs), sinks, *_read(inputs), stored),
            *(queries, key.shape[1], blocks, batch * heads, _heads_in_l2(call) * mask_params.group),
        ),
        (
            ((batch, queries, heads, mask_params.value_size), call.query.dtype),
            ((batch, queries, heads) if save_lse else (1,), jnp.float32),
            ((batch, queries, heads) if save_maximum else (1,), jnp.float32),
        ),
        grid=blocks * batch * heads,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        R=mask_params,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        BLOCK_D=dot_block(size),
        BLOCK_V=dot_block(mask_params.value_size),
        BLOCK_N=1 << max(mask_params.sinks - 1, 0).bit_length(),
        SAVE_LSE=save_lse,
        SAVE_MAXIMUM=save_maximum,
        OVERLAP=config.overlap and call.bias is None and call.score_mod is None and lists is None,
    )


def _statistics(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BackwardConfig,
) -> tuple[Any, Any]:
    """shift and delta `[B, H, T]`: weight = exp(logit - shift), d_logit = weight * (d_out . value - delta)."""
    lse, d_lse = outputs.lse, cotangents.lse
    if call.normalize_output:
        # The output of a fully masked row is 0; NaN in its cotangent must not propagate.
        d_out = jnp.where(outputs.out == 0, 0, cotangents.out)
        delta = jnp.sum(d_out.astype(jnp.float32) * outputs.out.astype(jnp.float32), axis=-1)
        return _heads_first(lse), _heads_first(delta if d_lse is None else delta - d_lse)
    # Unnormalised weights are exp(logit - maximum), with the maximum held constant. It is not saved, so recompute it.
    shift = lse
    if _score_count(call):
        blocks = config.query_block_q, config.query_block_k, config.query_num_warps, config.query_num_stages
        shift = _attend(call, inputs, ForwardConfig(*blocks), save_lse=False, save_maximum=True)[2]
    total = jnp.where(lse == -jnp.inf, 1, jnp.exp(lse - jnp.where(lse == -jnp.inf, 0, shift)))
    delta = jnp.zeros_like(lse) if d_lse is None else -d_lse / total
    return _heads_first(jnp.where(lse == -jnp.inf, -jnp.inf, shift)), _heads_first(delta)


def _padded(rows: Any, value: float) -> Any:
    """Padded as `tiles.statistics_pointer` expects."""
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 128)), constant_values=value)


def _heads_first(rows: Any) -> Any:
    return jnp.swapaxes(rows, 1, 2)


def _sink_gradient(sinks: Any, shift: Any, delta: Any) -> Any:
    """A sink is a logit without a value, so its d_logit is `-weight * delta`."""
    seen = shift[..., None] != -jnp.inf
    weights = jnp.where(seen, jnp.exp(sinks[:, :, None].astype(jnp.float32) - jnp.where(seen, shift[..., None], 0)), 0)
    total = -jnp.sum(weights * delta[..., None], axis=2)
    total = total if sinks.shape[0] == total.shape[0] else jnp.sum(total, axis=0, keepdims=True)
    return total.astype(sinks.dtype)


def _gradient_inputs(inputs: FlashAttentionInputs, mask_params: MaskParams) -> tuple[Any, ...]:
    return (*_operands(inputs[:3], mask_params), *_masks(inputs), *_read(inputs))


def _key_gradients(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, rows: tuple[Any, ...], config: BackwardConfig, lists: Lists | None
) -> list[Any]:
    visited = _visited(call, inputs, (config.key_block_q, config.key_block_k), lists, by_key=True)
    if config.separate_dk_dv:
        return [_by_key(call, inputs, rows, config, visited, name)[i] for i, name in enumerate(("key", "value"))]
    return _by_key(call, inputs, rows, config, visited, "both")


def _by_key(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    rows: tuple[Any, ...],
    config: BackwardConfig,
    visited: tuple[MaskParams, Any],
    wanted: str,
) -> list[Any]:
    """The gradients of keys and values; those not in `wanted` are empty."""
    query, key, value = inputs[:3]
    mask_params, stored = visited
    blocks = _cdiv(key.shape[1], config.key_block_k)
    batch_heads = key.shape[0] * key.shape[2]
    head_splits = math.gcd(config.key_splits, mask_params.group)
    shapes = ((1,) if wanted == "value" else key.shape, (1,) if wanted == "key" else value.shape)
    outputs = list(zip(shapes, (key.dtype, value.dtype), strict=True))
    if config.key_splits > 1:
        outputs = [((config.key_splits, *shape), jnp.float32) for shape in shapes]
    found = call_kernel(
        key_gradient_kernel,
        (
            *(*_gradient_inputs(inputs, mask_params), stored, *rows),
            *(query.shape[1], key.shape[1], blocks, batch_heads, _heads_in_l2(call)),
        ),
        outputs,
        grid=blocks * batch_heads * config.key_splits,
        num_warps=config.key_num_warps,
        num_stages=config.key_num_stages,
        WANTED=wanted,
        HEAD_SPLITS=head_splits,
        QUERY_SPLITS=config.key_splits // head_splits,
        **_blocks(call, mask_params, config.key_block_q, config.key_block_k),
    )
    if config.key_splits > 1:
        return [jnp.sum(partial, axis=0).astype(x.dtype) for partial, x in zip(found, (key, value), strict=True)]
    return found


def _query_gradient(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, rows: tuple[Any, ...], config: BackwardConfig, lists: Lists | None
) -> Any:
    query, key = inputs[:2]
    batch, queries, heads, _ = query.shape
    block_q, block_k = config.query_block_q, config.query_block_k
    mask_params, stored = _visited(call, inputs, (block_q, block_k), lists, by_key=False)
    blocks = _cdiv(queries, block_q)
    return call_kernel(
        query_gradient_kernel,
        (
            *(*_gradient_inputs(inputs, mask_params), stored, *rows),
            *(queries, key.shape[1], blocks, batch * heads, _heads_in_l2(call) * mask_params.group),
        ),
        ((query.shape, query.dtype),),
        grid=blocks * batch * heads,
        num_warps=config.query_num_warps,
        num_stages=config.query_num_stages,
        **_blocks(call, mask_params, block_q, block_k),
    )[0]


def _bias_gradient(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, rows: tuple[Any, ...], config: BackwardConfig
) -> Any:
    bias = inputs.bias
    return _tile_sums(call, inputs, rows, config, bias.shape, bias.dtype, None)


def _tile_sums(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    rows: tuple[Any, ...],
    config: BackwardConfig,
    shape: tuple[int, ...],
    dtype: Any,
    derivative: int | str | None,
) -> Any:
    """d_logits times a derivative of theirs, see `score_tiles.program_of`, or else by the bias, summed to `[b?, h?, t?, s?]`."""
    mask_params = mask_params_of(call)
    batch, queries = call.query.shape[:2]
    padded = (*shape[:3], shape[3] + _row_padding(shape))
    own_queries, own_keys = _cdiv(shape[2], config.bias_block_q), _cdiv(shape[3], config.bias_block_k)
    full = (batch, call.query.shape[2], queries, call.key.shape[1])
    return call_kernel(
        tile_gradient_kernel,
        (*_gradient_inputs(inputs, mask_params), *rows, queries, call.key.shape[1], batch, own_queries, own_keys),
        ((padded, dtype),),
        grid=shape[0] * shape[1] * own_queries * own_keys,
        num_warps=config.bias_num_warps,
        AXES=sum(1 << axis for axis, size in enumerate(shape) if size == full[axis] and size > 1),
        DERIVATIVE=derivative,
        **_blocks(call, mask_params, config.bias_block_q, config.bias_block_k),
    )[0][..., : shape[3]]


def _value_gradient(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    statistics: tuple[Any, Any],
    d_lse: Any,
    d_out: Any,
    config: BackwardConfig,
) -> Any:
    """The gradient of the numbers that the score function reads, `[1 or b, n]`: of each of its loads, summed over all scores that
    read the same, and then of the arrays, by JAX.

    A row's d_logits may cancel in such a sum: delta is formed of the weights here, not of the rounded output.
    """
    score = score_params(call)
    if score is None:
        return vary_like(jnp.zeros_like(inputs.mod_values), inputs)
    shift, delta = statistics
    batch, heads, queries = delta.shape
    if call.normalize_output:
        exact = _tile_sums(
            call,
            inputs,
            _rows(call, d_out, shift, jnp.zeros_like(delta)),
            config,
            (batch, heads, queries, 1),
            jnp.float32,
            "one",
        )[..., 0]
        delta = exact if d_lse is None else exact - _heads_first(d_lse)
    rows = _rows(call, d_out, shift, delta)
    places = places_of(call, inputs)
    sizes = (batch, heads, queries, call.key.shape[1])
    total = vary_like(jnp.zeros(inputs.mod_values.shape, jnp.float32), inputs)
    for derivative, (axes, place) in enumerate(zip(score.load_axes, score.load_places, strict=True)):
        axes |= 1 if inputs.mod_values.shape[0] > 1 else 0
        shape = tuple(size if axes >> axis & 1 else 1 for axis, size in enumerate(sizes))
        sums = _tile_sums(call, inputs, rows, config, shape, jnp.float32, derivative)
        own = places._replace(
            batch=places.batch[: shape[0]],
            head=places.head[: shape[0], : shape[1]],
            query=places.query[:, : shape[2]],
            key=places.key[:, : shape[3]],
            integers=None if places.integers is None else places.integers[: shape[0]],
        )
        loads = Mapped(call.score_mod, own, "bhqs")  # pyright: ignore[reportArgumentType]
        _, pull = jax.vjp(lambda values, loads=loads, place=place: loads.loads(values)[place], loads.arrays["values"])
        total += pull(vary_like(sums, inputs))[0].reshape(total.shape)
    return total


def _blocks(call: FlashAttentionCall, mask_params: MaskParams, block_q: int, block_k: int) -> dict[str, Any]:
    sizes = (dot_block(array.shape[3]) for array in (call.query, call.value))
    return {"R": mask_params, "BLOCK_Q": block_q, "BLOCK_K": block_k, **dict(zip(("BLOCK_D", "BLOCK_V"), sizes, strict=True))}
