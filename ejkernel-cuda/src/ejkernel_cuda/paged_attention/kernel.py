"""Attention over a paged KV cache: stream-K workers with equal shares of all KV steps, and a kernel that combines partial results.

The workers' partial results are results of the call, so that XLA allocates them; they are dropped here. The XLA platform runs
backward, from `out` and `lse`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.common.pages import PageStrides
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.paged_attention.config import PagedAttentionConfig, partial_shape

MAX_WINDOW = 2**30
"""A window that masks nothing: no table names more keys."""
QUERY_PACK = 4


def strides(shape: tuple[int, ...], layout: str) -> PageStrides:
    """Strides of a canonical shape; all batch members share a batch of one."""
    found = PageStrides.of(shape, layout)
    return found if shape[0] > 1 else found._replace(batch=0)


def factors(given: Any) -> Any:
    return jnp.zeros((1, 0), jnp.float32) if given is None else given.astype(jnp.float32)


def combined_sinks(sinks: Any) -> Any:
    """Sinks `[1|b, H, n]` combined into one per head, `[1|b, H]`."""
    if sinks is None or sinks.shape[2] == 0:
        return None
    return sinks[..., 0] if sinks.shape[2] == 1 else jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)


def _pad_query(query: Any) -> Any:
    """Pad heads with zeros to a multiple of the kernel's vector width."""
    rest = -query.shape[3] % QUERY_PACK
    return jnp.pad(query, ((0, 0),) * 3 + ((0, rest),)) if rest else query


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs, config: PagedAttentionConfig) -> PagedAttentionOutputs:
    rows = call.query.shape[:3]
    pages, fused = call.pages, call.value_pages is None
    key = strides(call.key_pages.shape, call.layout)
    value = key if call.value_pages is None else strides(call.value_pages.shape, call.layout)
    save_lse, partial = call.return_lse or call.save_residuals, partial_shape(call, config)
    shapes = (
        ((*rows, call.value_size), inputs.query.dtype),
        (rows if save_lse else (0,), jnp.float32),
        (partial, jnp.float32),
        ((*partial[:-1], 2), jnp.float32),
        ((config.workers, 2), jnp.int32),
    )
    out, lse, *_ = jax.ffi.ffi_call(handler("paged_attention_forward"), tuple(jax.ShapeDtypeStruct(*one) for one in shapes))(
        _pad_query(inputs.query),
        inputs.key_pages,
        jnp.zeros((0,), inputs.key_pages.dtype) if fused else inputs.value_pages,
        inputs.query_start_loc,
        inputs.kv_lens,
        inputs.block_tables,
        factors(combined_sinks(inputs.softmax_aux)),
        factors(inputs.key_scale),
        factors(inputs.value_scale),
        key_strides=np.array(key[:4], np.int64),
        value_strides=np.array(value[:4], np.int64),
        first_value=np.int64(value.first_value),
        key_heads=np.int64(call.heads),
        key_size=np.int64(call.query.shape[3]),
        pages=np.int64(pages.pages if pages.page_size else 0),
        page_size=np.int64(max(pages.page_size, 1)),
        fused=fused,
        causal=call.causal,
        window=np.int64(0 if call.window is None else min(call.window, MAX_WINDOW)),
        scale=np.float32(call.softmax_scale),
        soft_cap=np.float32(0 if call.logits_soft_cap is None else call.logits_soft_cap),
        stages=np.int64(config.num_stages),
        tile_key_heads=np.int64(config.tile_key_heads),
        tma=config.tma,
    )
    return PagedAttentionOutputs(out, lse if save_lse else None)
