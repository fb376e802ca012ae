"""`flash_attention` by cuDNN: what it is given, and the way back from what it returns.

Columns of zeros, which change no product, make all heads as wide as the widest, and that a multiple of 8. Keys that no query sees
are cut off: cuDNN's masks then count from the right place, and what was cut off may hold NaN.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel_cuda.cudnn._call import Rule, attend, gradients
from ejkernel_cuda.cudnn.flash_attention.band import Band, band_of
from ejkernel_cuda.cudnn.flash_attention.capability import padded_size


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: None) -> FlashAttentionOutputs:
    saved = call.return_lse or call.save_residuals
    band, rule = _planned(call)
    key, value = inputs.key[:, band.first : band.stop], inputs.value[:, band.first : band.stop]
    if band.causal:
        # A hidden value has weight 0, which must not meet NaN. In its key's logits, which the mask hides, NaN stands for what was.
        bad = ~jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key, value = jnp.where(bad, jnp.asarray(jnp.nan, key.dtype), key), _finite(value)
    size = padded_size(call)
    query, key, value = (_widened(array, size) for array in (inputs.query, key, value))
    out, lse = attend(query, key, value, rule, statistics=saved)
    return FlashAttentionOutputs(out[..., : call.value.shape[3]], jnp.swapaxes(lse, 1, 2) if saved else None)


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: None,
) -> FlashAttentionInputs:
    band, rule = _planned(call)
    key, value = inputs.key[:, band.first : band.stop], inputs.value[:, band.first : band.stop]
    if band.causal:  # queries that see NaN have it in their log-sum-exp or output
        key, value = _finite(key), _finite(value)
    size = padded_size(call)
    query, key, value, out, grad = (_widened(array, size) for array in (inputs.query, key, value, outputs.out, cotangents.out))
    d_query, d_key, d_value = gradients(query, key, value, out, jnp.swapaxes(outputs.lse, 1, 2), grad, rule)
    around = (band.first, call.key.shape[1] - band.stop)
    return FlashAttentionInputs(
        d_query[..., : call.query.shape[3]],
        _among(d_key[..., : call.key.shape[3]], around),
        _among(d_value[..., : call.value.shape[3]], around),
    )


def _planned(call: FlashAttentionCall) -> tuple[Band, Rule]:
    band = band_of(call)
    if isinstance(band, str):
        raise NotImplementedError(band)  # `supports` says so first
    return band, Rule(call.scale, band.causal, band.window)


def _finite(array: Any) -> Any:
    return jnp.where(jnp.isfinite(array), array, jnp.zeros((), array.dtype))


def _widened(array: Any, size: int) -> Any:
    """`[B, N, H, D]` with columns of zeros behind its own."""
    missing = size - array.shape[3]
    return jnp.pad(array, ((0, 0),) * 3 + ((0, missing),)) if missing else array


def _among(array: Any, around: tuple[int, int]) -> Any:
    """Gradients `[B, S, K, D]` of the keys that are seen, and zeros for those before and behind."""
    return jnp.pad(array, ((0, 0), around, (0, 0), (0, 0))) if any(around) else array
