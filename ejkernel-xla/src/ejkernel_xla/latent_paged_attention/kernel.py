"""Both phases as `paged_attention`: every token of a page is read once, as key and as value of the one key head.

The query is laid out like a token of the pages, with zeros in the channels that hold neither part. What the rotary channels add to
the weighted sum is cut off.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call import ArraySpec, has_gradient
from ejkernel.operations.latent_paged_attention.interface import (
    LatentPagedAttentionCall,
    LatentPagedAttentionInputs,
    LatentPagedAttentionOutputs,
)
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_xla import paged_attention
from ejkernel_xla.paged_attention import config as paged_config
from ejkernel_xla.paged_attention.config import PagedAttentionConfig


def forward(
    call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs, config: PagedAttentionConfig
) -> LatentPagedAttentionOutputs:
    found = paged_attention.forward(_paged_call(call), _paged_inputs(call, inputs), config)
    return LatentPagedAttentionOutputs(found.out[..., : call.query_nope.shape[3]], found.lse)


def backward(
    call: LatentPagedAttentionCall,
    inputs: LatentPagedAttentionInputs,
    outputs: LatentPagedAttentionOutputs,
    cotangents: LatentPagedAttentionOutputs,
    config: PagedAttentionConfig,
) -> LatentPagedAttentionInputs:
    size, rotary = call.query_nope.shape[3], call.query_pe.shape[3]
    padding = [(0, 0)] * 3 + [(0, call.pages.shape[3] - size)]

    def padded(given: LatentPagedAttentionOutputs) -> PagedAttentionOutputs:
        return PagedAttentionOutputs(None if given.out is None else jnp.pad(given.out, padding), given.lse)

    paged = _paged_inputs(call, inputs)
    found = paged_attention.backward(_paged_call(call), paged, padded(outputs), padded(cotangents), config)
    pages = None
    if has_gradient(inputs.pages):
        pages = (found.key_pages + found.value_pages)[..., 0, :]
    return LatentPagedAttentionInputs(
        query_nope=found.query[..., :size],
        query_pe=found.query[..., call.pe_offset : call.pe_offset + rotary],
        pages=pages,
        query_start_loc=None,
        kv_lens=None,
        block_tables=None,
        key_scale=found.key_scale,
        value_scale=found.value_scale,
    )


def _paged_inputs(call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs) -> PagedAttentionInputs:
    between = call.pe_offset - call.query_nope.shape[3]
    after = call.pages.shape[3] - call.pe_offset - call.query_pe.shape[3]
    nope, pe = (
        jnp.pad(array, [(0, 0)] * 3 + [(0, channels)])
        for array, channels in ((inputs.query_nope, between), (inputs.query_pe, after))
    )
    pages = inputs.pages[..., None, :]
    return PagedAttentionInputs(
        query=jnp.concatenate([nope, pe], axis=-1),
        key_pages=pages,
        value_pages=pages,
        query_start_loc=inputs.query_start_loc,
        kv_lens=inputs.kv_lens,
        block_tables=inputs.block_tables,
        key_scale=inputs.key_scale,
        value_scale=inputs.value_scale,
        first_keys=inputs.first_keys,
    )


def _paged_call(call: LatentPagedAttentionCall) -> PagedAttentionCall:
    batch, tokens, heads, _ = call.query_nope.shape
    *shape, channels = call.pages.shape
    pages = ArraySpec((*shape, 1, channels), call.pages.dtype)
    specs: dict[str, Any] = {"query": ArraySpec((batch, tokens, heads, channels), call.query_nope.dtype)}
    specs |= {"key_pages": pages, "value_pages": pages}
    shared = ("query_start_loc", "kv_lens", "block_tables", "key_scale", "value_scale", "first_keys")
    flags = ("softmax_scale", "window", "logits_soft_cap", "precision", "return_lse", "save_residuals")
    return PagedAttentionCall(**specs, **{name: getattr(call, name) for name in (*shared, *flags)})


def heuristic(call: LatentPagedAttentionCall, target: Target) -> PagedAttentionConfig:
    return paged_config.heuristic(_paged_call(call), target)


def search_space(call: LatentPagedAttentionCall, target: Target) -> tuple[PagedAttentionConfig, ...]:
    return paged_config.search_space(_paged_call(call), target)


CONFIGS = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
