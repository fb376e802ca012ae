"""The backward phase: what flows into the slots that were written goes to the new keys and values, and the rest stays."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.call import has_gradient
from ejkernel.operations.paged_cache_update.interface import (
    OPERATION,
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._pages import search_block, storage, strides_of, with_common_batch
from ejkernel_triton._requests import count_up_to
from ejkernel_triton.paged_cache_update.config import PagedCacheUpdateConfig


@triton.jit
def _move(p_pages, p_new, i_head, m_token, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Some heads of a token out of pages, which then hold 0 there; 0 for a token that no page holds."""
    o_size = tl.arange(0, BLOCK)
    m_tile = (i_head < HEADS)[:, None] & (o_size < SIZE)[None, :]
    m_stored = m_tile & m_token
    o_stored = i_head.to(tl.int64)[:, None] * STRIDE + o_size[None, :]
    b_grad = tl.load(p_pages + o_stored, mask=m_stored, other=0.0)  # [HEADS_OF_PROGRAM, BLOCK]
    tl.store(p_pages + o_stored, tl.zeros_like(b_grad), mask=m_stored)
    tl.store(p_new + i_head[:, None] * SIZE + o_size[None, :], b_grad, mask=m_tile)


@triton.jit
def paged_cache_update_gradient_kernel(
    p_starts,
    p_lengths,
    p_tables,
    p_keys_before,
    p_values_before,
    tokens,
    requests,
    table_width,
    pages,
    p_key_pages,
    p_value_pages,
    p_key,
    p_value,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS_OF_PROGRAM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_BATCH: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_BATCH: tl.constexpr,
    FIRST_VALUE: tl.constexpr,
    FUSED: tl.constexpr,
    SCHEDULES: tl.constexpr,
    TABLES: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """SCHEDULES and TABLES: 1 shared by the batch, 2 one per batch member."""
    GROUPS: tl.constexpr = (HEADS + HEADS_OF_PROGRAM - 1) // HEADS_OF_PROGRAM
    i_head = tl.program_id(0) % GROUPS * HEADS_OF_PROGRAM + tl.arange(0, HEADS_OF_PROGRAM)  # [HEADS_OF_PROGRAM]
    i_row = tl.program_id(0) // GROUPS
    i_batch = i_row // tokens
    i_token = i_row % tokens
    o_schedule = i_batch * requests if SCHEDULES == 2 else 0
    p_starts += o_schedule + (i_batch if SCHEDULES == 2 else 0)
    i_request = count_up_to(p_starts + 1, requests, i_token, SEARCH)
    m_token = i_request < requests
    i_start = tl.load(p_starts + i_request, mask=m_token, other=0)
    i_end = tl.load(p_starts + i_request + 1, mask=m_token, other=0)
    i_position = tl.load(p_lengths + o_schedule + i_request, mask=m_token, other=0) - i_end + i_token
    m_token = m_token & (i_token >= i_start) & (i_position >= 0) & (i_position < table_width * PAGE)
    i_table = (i_batch if TABLES == 2 else 0) * requests + i_request
    i_page = tl.load(p_tables + i_table.to(tl.int64) * table_width + i_position // PAGE, mask=m_token, other=-1)
    m_token = m_token & (i_page >= 0) & (i_page < pages)
    i_slot = i_position % PAGE
    p_key_pages += i_batch.to(tl.int64) * KEY_BATCH + i_page.to(tl.int64) * KEY_PAGE + i_slot * KEY_TOKEN
    p_values = p_key_pages
    if FUSED:
        p_values += FIRST_VALUE
    else:
        p_values = p_value_pages + i_batch.to(tl.int64) * VALUE_BATCH + i_page.to(tl.int64) * VALUE_PAGE + i_slot * VALUE_TOKEN
    _move(p_key_pages, p_key + i_row.to(tl.int64) * (HEADS * D), i_head, m_token, HEADS, D, BLOCK_D, KEY_HEAD)
    _move(p_values, p_value + i_row.to(tl.int64) * (HEADS * V), i_head, m_token, HEADS, V, BLOCK_V, VALUE_HEAD)


def backward(
    call: PagedCacheUpdateCall,
    inputs: PagedCacheUpdateInputs,
    outputs: PagedCacheUpdateOutputs,
    cotangents: PagedCacheUpdateOutputs,
    config: PagedCacheUpdateConfig,
) -> PagedCacheUpdateInputs:
    """One-byte pages carry no gradient, so keys and values written into them get none either."""
    moving = [name for name in OPERATION.differentiable if (array := getattr(inputs, name)) is not None and has_gradient(array)]
    if cotangents.key_pages is None:
        found = {name: jnp.zeros_like(getattr(inputs, name)) for name in moving}
    else:
        found = _gradients(call, with_common_batch(inputs), cotangents, config)
        found = {name: found[name].astype(getattr(inputs, name).dtype) for name in moving}
    return PagedCacheUpdateInputs(**{**dict.fromkeys(PagedCacheUpdateInputs._fields), **found})


def _gradients(
    call: PagedCacheUpdateCall,
    inputs: PagedCacheUpdateInputs,
    cotangents: PagedCacheUpdateOutputs,
    config: PagedCacheUpdateConfig,
) -> dict[str, Any]:
    d_keys, d_values = cotangents
    pages, new = _moved(call, inputs, d_keys, d_values, config)
    found: dict[str, Any] = {"key_pages": pages[0], "value_pages": pages[1]}
    for name, gradient, array, scale in (
        ("key", new[0], inputs.key, inputs.key_scale),
        ("value", new[1], inputs.value, inputs.value_scale),
    ):
        found[name] = gradient
        if scale is None:
            continue
        factor = scale.astype(jnp.float32)[:, None, :, None]
        scaled = gradient.astype(jnp.float32) / factor
        by_head = -jnp.sum(scaled * (array.astype(jnp.float32) / factor), axis=(1, 3))  # [b, K]
        axes = tuple(axis for axis in (0, 1) if scale.shape[axis] != by_head.shape[axis])
        found |= {name: scaled, f"{name}_scale": jnp.sum(by_head, axis=axes, keepdims=True)}
    return found


def _moved(
    call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, d_keys: Any, d_values: Any, config: PagedCacheUpdateConfig
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Cotangents of the pages with 0 in the slots that were written, and what was there."""
    batch, tokens, heads, size = call.key.shape
    requests, table_width = call.block_tables.shape[1:]
    if batch * tokens * heads * requests * call.block_tables.size * call.pages.pages * call.pages.page_size == 0:
        pages = jax.lax.optimization_barrier((d_keys, d_values))
        return pages, tuple(jnp.zeros(spec.shape, d_keys.dtype) for spec in (call.key, call.value))  # pyright: ignore[reportReturnType]
    key, fused = strides_of(call.key_pages.shape, call.layout), call.value_pages is None
    value = key if call.value_pages is None else strides_of(call.value_pages.shape, call.layout)
    described = (inputs.query_start_loc, inputs.kv_lens, inputs.block_tables)
    key_pages, value_pages, d_key, d_value = call_kernel(
        paged_cache_update_gradient_kernel,
        (*described, d_keys, inputs.kv_lens if fused else d_values, tokens, requests, table_width, call.pages.pages),
        (
            (d_keys.shape, d_keys.dtype),
            ((1,) if fused else d_values.shape, d_keys.dtype),
            (call.key.shape, d_keys.dtype),
            (call.value.shape, d_keys.dtype),
        ),
        grid=batch * tokens * -(-heads // config.heads),
        num_warps=config.num_warps,
        input_output_aliases={3: 0} if fused else {3: 0, 4: 1},
        HEADS=heads,
        D=size,
        V=call.value.shape[3],
        BLOCK_D=next_power_of_2(size),
        BLOCK_V=next_power_of_2(call.value.shape[3]),
        HEADS_OF_PROGRAM=config.heads,
        PAGE=call.pages.page_size,
        KEY_PAGE=key.page,
        KEY_TOKEN=key.token,
        KEY_HEAD=key.head,
        KEY_BATCH=key.batch,
        VALUE_PAGE=value.page,
        VALUE_TOKEN=value.token,
        VALUE_HEAD=value.head,
        VALUE_BATCH=value.batch,
        FIRST_VALUE=value.first_value,
        FUSED=fused,
        SCHEDULES=storage(inputs.kv_lens),
        TABLES=storage(inputs.block_tables),
        SEARCH=search_block(requests),
    )
    return (key_pages, None if fused else value_pages), (d_key, d_value)
