"""`flash_attention` in NumPy float64.

Nothing may depend on masked places, so what is not finite there is replaced first: non-finite entries of query, key and
value become 0, as does the bias of invisible pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.operations.flash_attention.pairs import visible
from ejkernel.operations.flash_attention.score_functions.functions import places_of
from ejkernel.operations.flash_attention.score_functions.record import Mapped


class _Moved:
    """Logits after the score function, which computes in the dtype that it was traced in."""

    def __init__(self, call: FlashAttentionCall, inputs: FlashAttentionInputs, logits: Any, seen: Any) -> None:
        dtype = jnp.float64 if call.query.dtype == "float64" else jnp.float32
        places = places_of(call, inputs)
        self.values = None if places.values is None else jnp.asarray(places.values, dtype)
        self.function = Mapped(call.score_mod, places._replace(values=self.values), "bhqs")  # pyright: ignore[reportArgumentType]
        self.seen, self.score = seen, jnp.asarray(np.where(seen, logits, 0), dtype)
        self.logits = np.asarray(self.function(self.score), np.float64)

    def gradients(self, d_logits: Any) -> tuple[Any, Any]:
        """Of the logits before it and of `mod_values`; what a score reads is summed where it is seen, if that is single numbers."""
        seen = self.seen & np.isfinite(self.logits)
        values = self.function.arrays.get("values")
        d_logits = jnp.asarray(np.where(seen, d_logits, 0), self.score.dtype)
        if self.function.function.single_loads:
            loads, pull_loads = jax.vjp(self.function.loads, values)
            _, pull = jax.vjp(self.function.computed, self.score, loads)
            d_score, d_loads = pull(d_logits)
            moving = [load.dtype != jax.dtypes.float0 for load in d_loads]
            d_loads = tuple(jnp.where(seen, d, 0) if moves else d for d, moves in zip(d_loads, moving, strict=True))
            (d_values,) = pull_loads(d_loads)
        else:
            finite = None if values is None else _finite(np.asarray(values))
            d_score, d_values = jax.vjp(self.function.with_values, self.score, finite)[1](d_logits)
        d_score = np.where(seen, np.asarray(d_score, np.float64), 0)
        return d_score, None if self.values is None else np.asarray(d_values, np.float64).reshape(self.values.shape)


class _Softmax(NamedTuple):
    """Arrays are `[b, h, t, s]`, statistics `[b, h, t, 1]`, sinks `[b, h, t, n]`."""

    query: Any
    key: Any
    value: Any
    visible: Any
    slope: Any  # of the soft cap
    exponentials: Any  # exp(logits - maximum)
    probabilities: Any
    sink_probabilities: Any
    lse: Any
    keep: Any  # 0, or 1 / (1 - rate)
    moved: _Moved | None


def _finite(array: Any) -> Any:
    return np.where(np.isfinite(array), array, 0.0)


def _softmax(call: FlashAttentionCall, inputs: FlashAttentionInputs) -> _Softmax:
    group = call.query.shape[2] // call.key.shape[2]
    query = _finite(inputs.query)
    key, value = (np.repeat(_finite(array), group, axis=2) for array in (inputs.key, inputs.value))
    logits = np.einsum("bthd,bshd->bhts", query, key)
    if call.logits_dtype not in ("float32", "float64"):
        logits = logits.astype(jnp.dtype(call.logits_dtype)).astype(np.float64)
    logits = call.softmax_scale * logits
    seen = np.broadcast_to(visible(call, inputs, np), logits.shape)
    if inputs.bias is not None:
        seen = seen & (inputs.bias != -np.inf)
        logits = logits + np.where(seen, inputs.bias, 0.0)
    slope = np.ones_like(logits)
    if call.logits_soft_cap is not None:
        capped = np.tanh(logits / call.logits_soft_cap)
        logits, slope = call.logits_soft_cap * capped, 1 - capped**2
    if call.mask_mod is not None:
        seen = seen & np.asarray(Mapped(call.mask_mod, places_of(call, inputs), "bhqs")(None))
    moved = None
    if call.score_mod is not None:
        moved = _Moved(call, inputs, logits, seen)
        logits = moved.logits
        seen = seen & (logits != -np.inf)
    logits = np.where(seen, logits, -np.inf)

    sinks = np.zeros((1, logits.shape[1], 0)) if inputs.softmax_aux is None else inputs.softmax_aux
    sinks = np.broadcast_to(sinks[:, :, None], (*logits.shape[:3], sinks.shape[-1]))
    largest = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), sinks.max(-1, keepdims=True, initial=-np.inf))
    largest = _finite(largest)
    exponentials, sink_exponentials = np.exp(logits - largest), np.exp(sinks - largest)
    total = exponentials.sum(-1, keepdims=True) + sink_exponentials.sum(-1, keepdims=True)
    empty = total == 0
    lse = np.where(empty, -np.inf, largest + np.log(np.where(empty, 1, total)))
    divisor = np.where(empty, 1, total)

    keep = np.ones_like(logits)
    if inputs.dropout_streams is not None:
        first, second = np.moveaxis(inputs.dropout_streams, -1, 0)[..., None, None]
        rows, columns = (np.arange(size, dtype=np.uint32) for size in logits.shape[2:])
        kept = dropout.bits(first, second, rows[:, None], columns) >= dropout.threshold(call.dropout_rate)
        keep = kept / (1 - call.dropout_rate)
    return _Softmax(
        query, key, value, seen, slope, exponentials, exponentials / divisor, sink_exponentials / divisor, lse, keep, moved
    )


def _rows(statistic: Any) -> Any:
    """`[b, h, t, 1]` as `[b, t, h]`."""
    return np.moveaxis(statistic[..., 0], 1, 2)


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs) -> FlashAttentionOutputs:
    s = _softmax(call, inputs)
    weights = (s.probabilities if call.normalize_output else s.exponentials) * s.keep
    return FlashAttentionOutputs(np.einsum("bhts,bshv->bthv", weights, s.value), _rows(s.lse))


def backward(
    call: FlashAttentionCall, inputs: FlashAttentionInputs, outputs: FlashAttentionOutputs, cotangents: FlashAttentionOutputs
) -> FlashAttentionInputs:
    s = _softmax(call, inputs)
    grad = cotangents.out
    d_lse = 0.0 if cotangents.lse is None else np.moveaxis(cotangents.lse, 1, 2)[..., None]
    weights = s.probabilities if call.normalize_output else s.exponentials
    d_value = np.einsum("bhts,bthv->bshv", weights * s.keep, grad)
    d_weights = np.einsum("bthv,bshv->bhts", grad, s.value) * s.keep
    # With the row's largest logit held constant, unnormalised weights depend on their own logit only.
    mean = (weights * d_weights).sum(-1, keepdims=True) if call.normalize_output else 0.0
    d_logits = weights * (d_weights - mean) + s.probabilities * d_lse
    d_values = None if inputs.mod_values is None else np.zeros(inputs.mod_values.shape)
    if s.moved is not None:
        d_logits, d_values = s.moved.gradients(d_logits)
    d_logits = d_logits * s.slope
    d_sinks = s.sink_probabilities * (d_lse - mean)

    def per_key_head(gradient: Any) -> Any:
        batch, keys, heads, size = gradient.shape
        groups = call.key.shape[2]
        return gradient.reshape(batch, keys, groups, heads // groups, size).sum(3)

    return FlashAttentionInputs(
        query=call.softmax_scale * np.einsum("bhts,bshd->bthd", d_logits, s.key),
        key=per_key_head(call.softmax_scale * np.einsum("bhts,bthd->bshd", d_logits, s.query)),
        value=per_key_head(d_value),
        bias=None if inputs.bias is None else _sum_to(d_logits, inputs.bias.shape),
        softmax_aux=None if inputs.softmax_aux is None else _sum_to(d_sinks.sum(2), inputs.softmax_aux.shape),
        mod_values=d_values,
    )


def _sum_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes along which an array of this shape was broadcast."""
    axes = tuple(i for i, (full, own) in enumerate(zip(gradient.shape, shape, strict=True)) if full != own)
    return gradient.sum(axes, keepdims=True)
