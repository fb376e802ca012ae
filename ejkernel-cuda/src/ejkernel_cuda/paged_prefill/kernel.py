"""Attention of many new tokens over a paged cache: the arrays as the library's handler takes them.

The XLA platform runs backward, from `out` and `lse`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call import vary_like
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel_cuda._capability import TMA_ELEMENTS
from ejkernel_cuda._library import handler
from ejkernel_cuda.flash_attention.kernel import pad_heads
from ejkernel_cuda.paged_attention.kernel import MAX_WINDOW, combined_sinks, factors, strides
from ejkernel_cuda.paged_prefill.config import PrefillConfig, packed_heads


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs, config: PrefillConfig) -> PagedAttentionOutputs:
    rows, size, value_size = call.query.shape[:3], call.query.shape[3], call.value_size
    saved, fused, pages = call.return_lse or call.save_residuals, call.value_pages is None, call.pages
    if not np.prod(rows, dtype=object):
        out, lse = vary_like((jnp.zeros((*rows, value_size), inputs.query.dtype), jnp.zeros(rows, jnp.float32)), inputs)
        return PagedAttentionOutputs(out, lse if saved else None)
    key = strides(call.key_pages.shape, call.layout)
    value = key if call.value_pages is None else strides(call.value_pages.shape, call.layout)
    results = (
        jax.ShapeDtypeStruct((*rows, -(-value_size // TMA_ELEMENTS) * TMA_ELEMENTS), inputs.query.dtype),
        jax.ShapeDtypeStruct(rows if saved else (0,), jnp.float32),
    )
    out, lse = jax.ffi.ffi_call(handler("paged_prefill_forward"), results)(
        pad_heads(inputs.query),
        inputs.key_pages,
        jnp.zeros((0,), inputs.key_pages.dtype) if fused else inputs.value_pages,
        inputs.query_start_loc,
        inputs.kv_lens,
        inputs.block_tables,
        factors(combined_sinks(inputs.softmax_aux)),
        key_strides=np.array(key[:4], np.int64),
        value_strides=np.array(value[:4], np.int64),
        first_value=np.int64(value.first_value),
        key_heads=np.int64(call.heads),
        key_size=np.int64(size),
        value_size=np.int64(value_size),
        pages=np.int64(pages.pages),
        page_size=np.int64(pages.page_size),
        fused=fused,
        causal=call.causal,
        window=np.int64(0 if call.window is None else min(call.window, MAX_WINDOW)),
        scale=np.float32(call.softmax_scale),
        cap=np.float32(call.logits_soft_cap or 0.0),
        pack=np.int64(packed_heads(call) if config.pack_gqa else 1),
    )
    return PagedAttentionOutputs(out[..., :value_size], lse if saved else None)
