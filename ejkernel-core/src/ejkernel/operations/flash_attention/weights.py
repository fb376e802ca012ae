"""Attention that also returns its weights, from the log-sum-exp that every platform can return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.records import Bound
from ejkernel.operations.common.heads import repeat_heads
from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.flash_attention.pairs import visible
from ejkernel.utils.dtypes import accumulator


def with_weights(*, output_dtype: str | None = None, **arguments: Any) -> Bound:
    """Canonicalise attention; its result is the output and the weights `[B, H, T, S]`."""
    bound = OPERATION.canonicalise(**arguments, return_lse=True)
    dtype = jnp.dtype(output_dtype or arguments["query"].dtype)

    def finish(outputs: Any) -> Any:
        return outputs.out.astype(dtype), weights(bound.call, bound.inputs, outputs.lse).astype(dtype)

    return Bound(bound.call, bound.inputs, finish)


def weights(call: Any, inputs: Any, lse: Any) -> Any:
    """`exp(logits - lse)` where visible, after dropout: what the values were multiplied with, in the accumulator's dtype."""
    batch, queries, heads, size = inputs.query.shape
    keys, key_heads = inputs.key.shape[1:3]
    wide = accumulator(inputs.query.dtype)
    # NaN times a gradient of 0 is NaN: the factors are finite, and NaN comes back where the pair is visible.
    query, query_poison = _finite(inputs.query)
    key, key_poison = _finite(inputs.key)
    logits = jnp.einsum(
        "btkgd,bskd->bkgts",
        query.reshape(batch, queries, key_heads, heads // key_heads, size),
        key,
        precision=_precision(call),
        preferred_element_type=wide,
    ).reshape(batch, heads, queries, keys)
    if call.logits_dtype not in ("float32", "float64"):
        logits = logits.astype(call.logits_dtype).astype(wide)
    query_poison = jnp.swapaxes(query_poison, 1, 2)[..., None]
    key_poison = repeat_heads(jnp.swapaxes(key_poison, 1, 2), heads // key_heads, axis=1)[:, :, None]
    logits = logits + (query_poison + key_poison).astype(wide)
    seen = visible(call, inputs, jnp)
    logits = jnp.where(seen, logits, 0) * call.softmax_scale
    if inputs.bias is not None:
        logits = logits + jnp.where(seen, inputs.bias.astype(wide), 0)
    if call.logits_soft_cap is not None:
        logits = jnp.where(logits == -jnp.inf, logits, call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap))
    total = jnp.swapaxes(lse, 1, 2)[..., None].astype(wide)
    occupied = seen & (total != -jnp.inf) & (logits != -jnp.inf)
    # Both operands are replaced before the subtraction: -inf - -inf would put NaN into the gradient of a branch not taken.
    result = jnp.where(occupied, jnp.exp(jnp.where(occupied, logits, 0) - jnp.where(occupied, total, 0)), 0)
    if inputs.dropout_streams is None:
        return result
    first, second = jnp.moveaxis(inputs.dropout_streams, -1, 0)[..., None, None]
    rows = jnp.arange(queries, dtype=jnp.uint32)[None, None, :, None]
    columns = jnp.arange(keys, dtype=jnp.uint32)[None, None, None]
    kept = dropout.bits(first, second, rows, columns) >= dropout.threshold(call.dropout_rate)
    return jnp.where(kept, result / (1 - call.dropout_rate), 0)


def _finite(array: Any) -> tuple[Any, Any]:
    """The array with 0 in place of NaN and infinities, and for each of its rows 0, or NaN if it had one."""
    zero = jnp.zeros((), array.dtype)
    return jnp.where(jnp.isfinite(array), array, zero), jnp.sum(array * zero, axis=-1)


def _precision(call: Any) -> Any:
    return jax.lax.Precision.HIGHEST if call.precision is None else jax.lax.Precision[call.precision.upper()]
