"""Thresholds without a sort: the bits of floats are ordered as integers, on which a search finds the smallest logit kept.

A top_k that is known when the program is built takes `lax.top_k` (on a mesh a sort, which XLA can split), and a top_p beside it
only looks at those k; but not for many rows on a GPU, where `lax.top_k` takes twice as long as the bisection
(benchmarks/results/glu_sample_triton_h100.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.common.ranking import largest as largest_of
from ejkernel.operations.sample_tokens.interface import NO_TOKEN, SampleTokensCall, SampleTokensInputs, SampleTokensOutputs
from ejkernel.operations.sample_tokens.noise import LARGEST, bits
from ejkernel.plugin import current_target
from ejkernel.utils.dtypes import accumulator

_MOST_ROWS_SORTED = 4
"""On a GPU, where bisection takes about as long for 16 rows as for one."""


def _sorts(call: SampleTokensCall) -> bool:
    rows = call.logits.shape[0] * call.logits.shape[1]
    return current_target().backend != "gpu" or rows <= _MOST_ROWS_SORTED


def _ordered(x: Any) -> Any:
    """Integers in the order of floats, both zeros alike."""
    word = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    found = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), word)
    return jnp.where(found < 0, found ^ jnp.iinfo(word).max, found)


def _smallest_kept(kept: Callable[[Any], Any], ordered: Any, largest: Any) -> Any:
    """The smallest integer that is kept, `[b, n, 1]`, where `kept` of `[b, n, j]` rises; the largest logit is kept in any case.

    On a GPU by digits: the end of a bisection would have to be asked for on the host after each of its steps.
    """
    return (_by_digits if current_target().backend == "gpu" else _by_halves)(kept, ordered, largest)


def _by_halves(kept: Callable[[Any], Any], ordered: Any, largest: Any) -> Any:
    least = jnp.full_like(largest, jnp.iinfo(ordered.dtype).min)

    def halve(bounds: Any) -> Any:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without an overflow
        found = kept(middle)
        return jnp.where(found, low, middle), jnp.where(found, middle, high)

    def apart(bounds: Any) -> Any:
        low, high = bounds
        return jnp.any(((low & high) + ((low ^ high) >> 1)) != low)

    return jax.lax.while_loop(apart, halve, (least, largest))[1]


def _by_digits(kept: Callable[[Any], Any], ordered: Any, largest: Any) -> Any:
    """The highest hexadecimal digit first, of integers counted from the least: how many of its 15 steps up are not kept."""
    word = ordered.dtype
    unsigned, sign = jnp.dtype(f"u{word.name}"), jnp.iinfo(word).min
    dropped = jnp.zeros_like(largest, unsigned)  # the largest that is not kept
    for shift in range(8 * word.itemsize - 4, -1, -4):
        steps = dropped + ((jax.lax.broadcasted_iota(unsigned, (1, 1, 15), 2) + 1) << shift)
        kept_steps = kept(jax.lax.bitcast_convert_type(steps, word) ^ sign)
        dropped += jnp.sum(~kept_steps, axis=-1, keepdims=True, dtype=unsigned) << shift
    last = jax.lax.bitcast_convert_type(dropped, word) ^ sign
    return jnp.where(last < largest, last + 1, largest)


def _total(weights: Any) -> Any:
    return jnp.sum(weights, axis=-1, keepdims=True)


def _weights(x: Any, largest: Any, temperature: Any) -> tuple[Any, Any]:
    """Log weights in the accumulator's dtype, and weights. At temperature 0, 0 of the largest and -inf elsewhere."""
    wide = accumulator(x.dtype)
    cold = temperature <= 0
    divisor = jnp.where(cold, 1, temperature).astype(wide)
    log_weights = (x.astype(wide) - largest.astype(wide)) / divisor
    log_weights = jnp.where(cold | (x == -jnp.inf), -jnp.inf, log_weights)
    log_weights = jnp.where(x == largest, 0, log_weights)
    return log_weights, jnp.exp(log_weights)


def _above(ordered: Any, bounds: Any) -> Any:
    """Which tokens are larger than each bound, `[b, n, j, V]`."""
    return jnp.expand_dims(ordered, -2) > jnp.expand_dims(bounds, -1)


def _top_k(top_k: Any, ordered: Any, largest: Any) -> Any:
    """The threshold of top_k `[b, n, 1]`."""

    def kept(bounds: Any) -> Any:
        return jnp.sum(_above(ordered, bounds), axis=-1, dtype=jnp.int32) < top_k

    return jnp.where(top_k >= 1, _smallest_kept(kept, ordered, largest), jnp.iinfo(ordered.dtype).min)


def _top_p(needed: Any, ordered: Any, weights: Any, largest: Any) -> Any:
    """The threshold of top_p: the larger tokens weigh less than what is needed."""

    def kept(bounds: Any) -> Any:
        return jnp.sum(jnp.where(_above(ordered, bounds), jnp.expand_dims(weights, -2), 0), axis=-1) < needed

    return _smallest_kept(kept, ordered, largest)


def _top_p_of_sorted(needed: Any, ordered: Any, weights: Any, largest: Any) -> Any:
    """The same, of tokens that are sorted."""
    first = jnp.concatenate([jnp.ones_like(ordered[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], axis=-1)
    before = jnp.where(first, jnp.cumsum(weights, axis=-1) - weights, 0)
    before = jax.lax.cummax(before, axis=before.ndim - 1)  # for equals, of the first of them
    return jnp.min(jnp.where(before < needed, ordered, largest), axis=-1, keepdims=True)


def _kept(call: SampleTokensCall, inputs: SampleTokensInputs, x: Any, largest: Any, log_weights: Any, weights: Any) -> Any:
    """Which tokens may be drawn."""
    kept = log_weights > -jnp.inf
    ordered, most = _ordered(x), _ordered(largest)
    top: Any = None
    places: Any = None
    if call.static_top_k is not None and _sorts(call):
        values, places = largest_of(x.astype(accumulator(x.dtype)), call.static_top_k)
        top = _ordered(values.astype(x.dtype))
        kept = kept & (ordered >= top[..., -1:])
    elif call.static_top_k is not None or inputs.top_k is not None:
        top_k = jnp.int32(call.static_top_k) if inputs.top_k is None else jnp.expand_dims(inputs.top_k, -1)
        kept = kept & (ordered >= _top_k(top_k, ordered, most))
    if inputs.top_p is not None:
        top_p = jnp.expand_dims(inputs.top_p, -1).astype(weights.dtype)
        needed = jnp.where(top_p >= 1, jnp.inf, top_p * _total(jnp.where(kept, weights, 0)))
        if top is None:
            least = _top_p(needed, ordered, weights, most)
        else:
            least = _top_p_of_sorted(needed, top, jnp.take_along_axis(weights, places, axis=-1), most)
        kept = kept & (ordered >= least)
    if inputs.min_p is not None:
        kept = kept & ((weights >= jnp.expand_dims(inputs.min_p, -1).astype(weights.dtype)) | (x == largest))
    return kept


def forward(call: SampleTokensCall, inputs: SampleTokensInputs, config: None) -> SampleTokensOutputs:
    x = inputs.logits if inputs.token_mask is None else jnp.where(inputs.token_mask, inputs.logits, -jnp.inf)
    temperature = jnp.expand_dims(inputs.temperature, -1)
    largest = jnp.max(x, axis=-1, keepdims=True)  # NaN if there is one
    valid = largest > -jnp.inf
    for setting in (inputs.temperature, inputs.top_p, inputs.min_p):
        valid = valid if setting is None else valid & ~jnp.isnan(jnp.expand_dims(setting, -1))
    log_weights, weights = _weights(x, largest, temperature)
    kept = _kept(call, inputs, x, largest, log_weights, weights)
    tokens = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, x.shape[2]), 2)
    uniform = bits(inputs.streams, tokens).astype(weights.dtype) * 2.0**-32 + 2.0**-33
    noise = -jnp.log(-jnp.log1p(-jnp.minimum(uniform, LARGEST)))
    score = jnp.where(kept, log_weights + jnp.where(temperature <= 0, 0, noise), -jnp.inf)
    drawn = jnp.argmax(score, axis=-1).astype(jnp.int32)
    outputs = jnp.where(valid[..., 0], drawn, NO_TOKEN)
    if not call.return_logprobs:
        return SampleTokensOutputs(outputs)
    chosen = jnp.take_along_axis(log_weights, jnp.expand_dims(drawn, -1), axis=-1)
    logprobs = jnp.where(temperature <= 0, 0, chosen - jnp.log(_total(jnp.where(kept, weights, 0))))
    return SampleTokensOutputs(outputs, jnp.where(valid, logprobs, jnp.nan)[..., 0].astype(jnp.float32))
