"""`flash_attention` by cuDNN: its operands and results.

Zero padding makes all head sizes equal and a multiple of 8. Keys that no query sees are sliced off: cuDNN's masks then count from
the right key, and NaN in those keys is not read.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel_cuda.cudnn._call import MaskParams, attend, gradients
from ejkernel_cuda.cudnn.flash_attention.band import Band, band_of
from ejkernel_cuda.cudnn.flash_attention.capability import padded_size


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: None) -> FlashAttentionOutputs:
    saved = call.return_lse or call.save_residuals
    band, params = _planned(call)
    key, value = inputs.key[:, band.first : band.stop], inputs.value[:, band.first : band.stop]
    if band.causal:
        # NaN-safe path: a masked value has weight 0, and 0 * NaN is NaN. So nonfinite values become 0, and NaN in their keys
        # reaches the queries that see them.
        bad = ~jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        key, value = jnp.where(bad, jnp.asarray(jnp.nan, key.dtype), key), _finite(value)
    size = padded_size(call)
    query, key, value = (_padded(array, size) for array in (inputs.query, key, value))
    out, lse = attend(query, key, value, params, statistics=saved)
    return FlashAttentionOutputs(out[..., : call.value.shape[3]], jnp.swapaxes(lse, 1, 2) if saved else None)


def backward(
    call: FlashAttentionCall,
    inputs: FlashAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: None,
) -> FlashAttentionInputs:
    band, params = _planned(call)
    key, value = inputs.key[:, band.first : band.stop], inputs.value[:, band.first : band.stop]
    if band.causal:  # queries that see a NaN have it in their lse or output
        key, value = _finite(key), _finite(value)
    size = padded_size(call)
    query, key, value, out, grad = (_padded(array, size) for array in (inputs.query, key, value, outputs.out, cotangents.out))
    d_query, d_key, d_value = gradients(query, key, value, out, jnp.swapaxes(outputs.lse, 1, 2), grad, params)
    around = (band.first, call.key.shape[1] - band.stop)
    return FlashAttentionInputs(
        d_query[..., : call.query.shape[3]],
        _pad_keys(d_key[..., : call.key.shape[3]], around),
        _pad_keys(d_value[..., : call.value.shape[3]], around),
    )


def _planned(call: FlashAttentionCall) -> tuple[Band, MaskParams]:
    band = band_of(call)
    if isinstance(band, str):
        raise NotImplementedError(band)  # `supports` says so first
    return band, MaskParams(call.softmax_scale, band.causal, band.window)


def _finite(array: Any) -> Any:
    return jnp.where(jnp.isfinite(array), array, jnp.zeros((), array.dtype))


def _padded(array: Any, size: int) -> Any:
    """`[B, N, H, D]`, zero-padded to `size`."""
    missing = size - array.shape[3]
    return jnp.pad(array, ((0, 0),) * 3 + ((0, missing),)) if missing else array


def _pad_keys(array: Any, around: tuple[int, int]) -> Any:
    """Gradients `[B, S, K, D]` of the sliced keys, with zeros for the keys before and after."""
    return jnp.pad(array, ((0, 0), around, (0, 0), (0, 0))) if any(around) else array
