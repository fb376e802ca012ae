"""The launches of the backward phase, and the work that XLA does before and after."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import triton.language as tl

from ejkernel.call import has_gradient
from ejkernel.operations.latent_paged_attention.interface import (
    OPERATION,
    LatentPagedAttentionCall,
    LatentPagedAttentionInputs,
    LatentPagedAttentionOutputs,
)
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._latents.config import LatentGradientConfig
from ejkernel_triton._numerics import DotPrecision, dot_precision
from ejkernel_triton._pages import batch_stride, search_block, storage, with_common_batch
from ejkernel_triton.latent_paged_attention.backward import latent_page_gradient_kernel, latent_query_gradient_kernel
from ejkernel_triton.latent_paged_attention.config import UNBOUNDED, product_dtype
from ejkernel_triton.paged_attention.gradients import as_input, entries_by_page, new_tokens, owned

TRITON_DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@dataclasses.dataclass(frozen=True)
class LatentParams:
    """The static parameters of both kernels, tiles aside.

    Attributes:
        scale: of the logits.
        latent, rest: channels of latents and of rotary parts.
        rest_at: the first channel of a rotary part.
        heads: of a token.
        page_size, channels: of the pages.
        pages_batch: their stride.
        schedules, tables: 1 for one that the batch shares, 2 for one per batch member.
        first_keys, key_scale, value_scale: whether they are there.
        first_keys_batch, key_scale_batch, value_scale_batch: their strides.
        window: keys that a row sees; 0 for all.
        soft_cap: of the logits; 0 for none.
        precision: `input_precision` of float32 dots.
    """

    scale: float
    latent: int
    rest: int
    rest_at: int
    heads: int
    page_size: int
    channels: int
    pages_batch: int
    schedules: int
    tables: int
    first_keys: bool
    first_keys_batch: int
    key_scale: bool
    key_scale_batch: int
    value_scale: bool
    value_scale_batch: int
    window: int
    soft_cap: float
    precision: DotPrecision

    @classmethod
    def of(cls, call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs, dtype: Any) -> LatentParams:
        return cls(
            scale=call.softmax_scale,
            latent=call.query_nope.shape[3],
            rest=call.query_pe.shape[3],
            rest_at=call.pe_offset,
            heads=call.query_nope.shape[2],
            page_size=call.pages.shape[2],
            channels=call.pages.shape[3],
            pages_batch=batch_stride(inputs.pages),
            schedules=storage(inputs.kv_lens),
            tables=storage(inputs.block_tables),
            first_keys=inputs.first_keys is not None,
            first_keys_batch=batch_stride(inputs.first_keys),
            key_scale=inputs.key_scale is not None,
            key_scale_batch=batch_stride(inputs.key_scale),
            value_scale=inputs.value_scale is not None,
            value_scale_batch=batch_stride(inputs.value_scale),
            window=0 if call.window is None else min(call.window, UNBOUNDED),
            soft_cap=0.0 if call.logits_soft_cap is None else call.logits_soft_cap,
            precision=dot_precision(call.precision, dtype),
        )


def backward(
    call: LatentPagedAttentionCall,
    inputs: LatentPagedAttentionInputs,
    outputs: LatentPagedAttentionOutputs,
    cotangents: LatentPagedAttentionOutputs,
    config: LatentGradientConfig,
) -> LatentPagedAttentionInputs:
    moving = [name for name in OPERATION.differentiable if (array := getattr(inputs, name)) is not None and has_gradient(array)]
    if call.query_nope.size * call.block_tables.size * call.pages.shape[1] == 0:
        found = {name: jnp.zeros_like(getattr(inputs, name)) for name in moving}
    else:
        gradients = _gradients(call, inputs, outputs, cotangents, config)
        found = {name: as_input(gradients[name], getattr(inputs, name)) for name in moving}
    return LatentPagedAttentionInputs(**{**dict.fromkeys(LatentPagedAttentionInputs._fields), **found})


def _gradients(
    call: LatentPagedAttentionCall,
    inputs: LatentPagedAttentionInputs,
    outputs: LatentPagedAttentionOutputs,
    cotangents: LatentPagedAttentionOutputs,
    config: LatentGradientConfig,
) -> dict[str, Any]:
    """Of every batch member."""
    batch, tokens, heads, latent = call.query_nope.shape
    requests, rest = call.kv_lens.shape[1], call.query_pe.shape[3]
    out, lse = outputs
    grad = jnp.zeros_like(out) if cotangents.out is None else cotangents.out
    own = jnp.zeros_like(lse) if cotangents.lse is None else jnp.where(lse == -jnp.inf, 0, cotangents.lse)
    # A large factor amplifies the rounding of `out` in a row's gradient sums; the mean is formed anew for it.
    anew = inputs.key_scale is not None
    mean = -own if anew else jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - own
    inputs = with_common_batch(inputs)
    params = LatentParams.of(call, inputs, product_dtype(call))

    def arrays(*found_in: Any) -> tuple[Any, ...]:
        fields = (*inputs[:5], *found_in, inputs.first_keys, inputs.key_scale, inputs.value_scale, grad, lse, mean)
        present = tuple(inputs.query_nope if array is None or array.size == 0 else array for array in fields)
        return (*present, tokens, requests, call.block_tables.shape[2], call.pages.shape[1])

    shared: dict[str, Any] = {
        "P": params,
        "BLOCK_V": dot_block(latent),
        "BLOCK_REST": dot_block(rest),
        "DTYPE": TRITON_DTYPES[product_dtype(call).name],
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "BLOCK_M": config.rows,
        "HEADS_OF_TILE": config.block_h,
        "TOKENS": config.block_q,
        "STAGES": config.num_stages,
    }
    busy = min(requests, tokens)
    tiles = (tokens - busy) // config.block_q + busy
    up_to = jnp.cumsum(-(-new_tokens(inputs, tokens) // config.block_q), axis=1, dtype=jnp.int32)
    rows = (batch, tokens, heads)
    d_query, d_rest, found_mean, by_key_scale, by_value_scale = call_kernel(
        latent_query_gradient_kernel,
        (*arrays(inputs.block_tables, up_to), tiles),
        (
            (call.query_nope.shape, call.query_nope.dtype),
            (call.query_pe.shape if rest else (1,), call.query_nope.dtype),
            *((rows if wanted else (1,), jnp.float32) for wanted in (anew, anew, params.value_scale)),
        ),
        grid=batch * tiles * -(-heads // config.block_h),
        BLOCK_K=config.block_k,
        SEARCH=search_block(requests),
        **shared,
    )
    own_rows = owned(inputs, tokens)[..., None]
    found: dict[str, Any] = {"query_nope": jnp.where(own_rows[..., None], d_query, 0)}
    found["query_pe"] = jnp.where(own_rows[..., None], d_rest, 0) if rest else jnp.zeros(call.query_pe.shape, jnp.float32)
    for name, array in (("key_scale", by_key_scale), ("value_scale", by_value_scale)):
        if getattr(inputs, name) is not None:
            found[name] = jnp.sum(jnp.where(own_rows, array, 0), axis=(1, 2))[:, None]
    if anew:
        mean = jnp.where(own_rows, found_mean, 0)
    if not has_gradient(inputs.pages):
        return found
    keys = min(config.block_k, dot_block(call.pages.shape[2]))
    entries, entries_up_to = entries_by_page(inputs, tokens, *call.pages.shape[1:3])
    (d_pages,) = call_kernel(
        latent_page_gradient_kernel,
        arrays(entries, entries_up_to),
        (((batch, *call.pages.shape[1:]), call.pages.dtype if call.pages.shape[0] == batch else jnp.float32),),
        grid=batch * call.pages.shape[1] * -(-call.pages.shape[2] // keys),
        ENTRIES=entries.shape[1] if entries.shape[0] > 1 else 0,
        BLOCK_K=keys,
        **shared,
    )
    channel = jnp.arange(call.pages.shape[3])
    used = (channel < latent) | ((channel >= call.pe_offset) & (channel < call.pe_offset + rest))
    return {**found, "pages": jnp.where(used, d_pages, 0)}
