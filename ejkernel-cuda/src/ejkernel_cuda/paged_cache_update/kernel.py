"""Writing new keys and values into their pages, a few tokens per block.

The results alias the caches, which XLA copies only if the program uses them elsewhere. The XLA platform runs backward.

XLA joins a custom call with slices before and after it, and forgets in doing so that results alias operands: pages beside the new
tokens would hold whatever lay in memory. Barriers keep it from that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.common.pages import PageStrides
from ejkernel.operations.paged_cache_update.interface import (
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel_cuda._library import handler
from ejkernel_cuda.paged_cache_update.config import PagedCacheUpdateConfig


def _scale(scale: Any) -> Any:
    return jnp.zeros((1, 0), jnp.float32) if scale is None else scale.astype(jnp.float32)


def forward(
    call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, config: PagedCacheUpdateConfig
) -> PagedCacheUpdateOutputs:
    pages, fused = call.pages, call.value_pages is None
    work = inputs.key.size + inputs.value.size, call.block_tables.size, pages.pages * pages.page_size
    if not all(work):
        # Nothing to write. The barrier marks in the program that this platform served the call.
        return PagedCacheUpdateOutputs(*jax.lax.optimization_barrier((inputs.key_pages, inputs.value_pages)))
    key = PageStrides.of(call.key_pages.shape, call.layout)
    value = key if call.value_pages is None else PageStrides.of(call.value_pages.shape, call.layout)
    arrays = (inputs.key_pages, jnp.zeros((0,), inputs.key_pages.dtype) if fused else inputs.value_pages)
    new = (inputs.key, inputs.value, inputs.query_start_loc, inputs.kv_lens, inputs.block_tables)
    given = (*new, _scale(inputs.key_scale), _scale(inputs.value_scale))
    given, arrays = jax.lax.optimization_barrier((given, arrays))
    updated = jax.ffi.ffi_call(
        handler("paged_cache_update_forward"),
        tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
        input_output_aliases={len(given): 0} if fused else {len(given): 0, len(given) + 1: 1},
    )(
        *given,
        *arrays,
        key_strides=np.array(key[:4], np.int64),
        value_strides=np.array(value[:4], np.int64),
        first_value=np.int64(value.first_value),
        pages=np.int64(pages.pages),
        page_size=np.int64(pages.page_size),
        fused=fused,
        threads=np.int64(config.threads),
        tokens=np.int64(config.tokens),
    )
    key_pages, value_pages = jax.lax.optimization_barrier(updated)
    return PagedCacheUpdateOutputs(key_pages, None if fused else value_pages)
