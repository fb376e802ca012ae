"""Attention: the arrays as the library's handler takes them.

The partial results of split-KV CTAs are results of the call, so that XLA allocates them; they are dropped here. Another platform
runs backward, from the output and its log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call import vary_like
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel_cuda._capability import TMA_ELEMENTS
from ejkernel_cuda._library import handler
from ejkernel_cuda.flash_attention.config import ForwardConfig, band, block_shape, packed_heads


def pad_heads(array: Any) -> Any:
    """Pad heads with zeros to what TMA needs."""
    missing = -array.shape[3] % TMA_ELEMENTS
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: ForwardConfig) -> FlashAttentionOutputs:
    saved = call.return_lse or call.save_residuals
    rows, value_size = call.query.shape[:3], call.value.shape[3]
    if not np.prod(rows, dtype=object) * call.key.shape[1]:
        return _without_pairs(call, inputs, saved)
    query, key, value = (pad_heads(array) for array in inputs[:3])
    below, above = band(call)
    partial = config.split_kv_ctas, 2, *block_shape(call)
    shapes = (
        ((*rows, value.shape[3]), query.dtype),
        (rows if saved else (0,), jnp.float32),
        (partial, jnp.float32),
        ((*partial[:-1], 2), jnp.float32),
    )
    results = tuple(jax.ShapeDtypeStruct(*one) for one in shapes)
    out, lse, *_ = jax.ffi.ffi_call(handler("flash_attention_forward"), results)(
        query,
        key,
        value,
        below=np.int64(below),
        above=np.int64(above),
        scale=np.float32(call.softmax_scale),
        cap=np.float32(call.logits_soft_cap or 0.0),
        pack=np.int64(packed_heads(call) if config.pack_gqa else 1),
        ping_pong=config.ping_pong,
        persistent=config.persistent,
    )
    return FlashAttentionOutputs(out[..., :value_size], lse if saved else None)


def _without_pairs(call: FlashAttentionCall, inputs: FlashAttentionInputs, saved: bool) -> FlashAttentionOutputs:
    """No pair is visible, so no kernel runs. The barrier marks in the program that this platform served the call."""
    out = jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
    lse = jnp.full(call.query.shape[:3], -jnp.inf, jnp.float32)
    out, lse = jax.lax.optimization_barrier(vary_like((out, lse), inputs))
    return FlashAttentionOutputs(out, lse if saved else None)
