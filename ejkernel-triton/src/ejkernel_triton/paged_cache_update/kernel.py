"""Writes new keys and values into their KV pages in place: one program per token and group of heads.

The outputs alias the caches, in place if XLA can donate them. Rounding is emulated bitwise, to nearest, ties to even, so that
it is the same on every device and for every dtype.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
import jax
import triton
import triton.language as tl

from ejkernel.operations.paged_cache_update.interface import (
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._pages import batch_stride, search_block, storage, strides_of, with_common_batch
from ejkernel_triton._requests import count_up_to
from ejkernel_triton.paged_cache_update.backward import backward
from ejkernel_triton.paged_cache_update.config import PagedCacheUpdateConfig

__all__ = ["backward", "forward"]


@triton.jit
def _as_int8(b_new):
    """To nearest, ties to even, within [-128, 127]; NaN is 0. Adding 1.5 * 2**23 leaves no bits for a fraction."""
    b_new = tl.where(b_new != b_new, 0.0, b_new)
    b_new = tl.minimum(tl.maximum(b_new, -128.0), 127.0)
    return ((b_new + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)


@triton.jit
def _as_float8(b_new, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The bits of a float8, to nearest, ties to even, within its range.

    Adding 1.5 * 2**23 steps rounds a float32 to whole steps. A step is 2**-MANTISSA of the power of two below the number, or of
    the smallest normal number.
    """
    b_size = tl.where(b_new != b_new, 0.0, tl.minimum(tl.abs(b_new), LARGEST))
    b_power = tl.maximum(b_size.to(tl.int32, bitcast=True) >> 23, 128 - BIAS)
    b_large = ((b_power + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True) * 1.5
    b_size = (b_size + b_large) - b_large
    b_normal = (b_size.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    b_subnormal = (tl.minimum(b_size, 2.0 ** (1 - BIAS)) * (2.0 ** (BIAS + MANTISSA - 1))).to(tl.int32)
    b_code = tl.where(b_size < 2.0 ** (1 - BIAS), b_subnormal, b_normal)
    b_code = tl.where(b_new != b_new, 0x7F, b_code)
    return (b_code | ((b_new.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _store(p_new, p_scale, p_pages, i_head, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
           SCALE: tl.constexpr):  # fmt: skip
    """Store some heads of one token. SCALE is the number of scales, 0 for none."""
    STORED: tl.constexpr = p_pages.dtype.element_ty
    o_size = tl.arange(0, BLOCK)
    m_tile = (i_head < HEADS)[:, None] & (o_size < SIZE)[None, :]
    b_new = tl.load(p_new + i_head[:, None] * SIZE + o_size[None, :], mask=m_tile)  # [HEADS_OF_PROGRAM, BLOCK]
    o_stored = i_head.to(tl.int64)[:, None] * STRIDE + o_size[None, :]
    if SCALE == 0 and p_new.dtype.element_ty == STORED:
        tl.store(p_pages + o_stored, b_new, mask=m_tile)
    else:
        b_new = b_new.to(tl.float32)
        if SCALE > 0:
            b_scale = tl.load(p_scale + (i_head if SCALE > 1 else i_head * 0), mask=i_head < HEADS, other=1.0)
            b_new = tl.div_rn(b_new, tl.broadcast_to(b_scale.to(tl.float32)[:, None], b_new.shape))
        if STORED.primitive_bitwidth > 8:
            tl.store(p_pages + o_stored, b_new.to(STORED), mask=m_tile)
        else:
            if tl.int8 == STORED:
                b_byte = _as_int8(b_new)
            elif tl.float8e4nv == STORED:
                b_byte = _as_float8(b_new, 3, 7, 448.0)
            else:
                b_byte = _as_float8(b_new, 2, 15, 57344.0)
            tl.store(p_pages.to(tl.pointer_type(tl.int8), bitcast=True) + o_stored, b_byte, mask=m_tile)


@triton.jit
def paged_cache_update_kernel(
    p_key,
    p_value,
    p_starts,
    p_lengths,
    p_tables,
    p_key_scale,
    p_value_scale,
    p_key_before,
    p_value_before,
    tokens,
    requests,
    table_width,
    pages,
    p_key_pages,
    p_value_pages,
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
    KEY_SCALE: tl.constexpr,
    KEY_SCALE_BATCH: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_SCALE_BATCH: tl.constexpr,
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
    if i_request >= requests:
        return
    i_position = tl.load(p_lengths + o_schedule + i_request) - tl.load(p_starts + i_request + 1) + i_token
    if (i_token < tl.load(p_starts + i_request)) | (i_position < 0) | (i_position >= table_width * PAGE):
        return
    i_table = (i_batch if TABLES == 2 else 0) * requests + i_request
    i_page = tl.load(p_tables + i_table.to(tl.int64) * table_width + i_position // PAGE)
    if (i_page < 0) | (i_page >= pages):
        return
    o_key = i_batch.to(tl.int64) * KEY_BATCH + i_page.to(tl.int64) * KEY_PAGE + (i_position % PAGE) * KEY_TOKEN
    o_value = i_batch.to(tl.int64) * VALUE_BATCH + i_page.to(tl.int64) * VALUE_PAGE + (i_position % PAGE) * VALUE_TOKEN
    p_key += i_row.to(tl.int64) * (HEADS * D)
    p_value += i_row.to(tl.int64) * (HEADS * V)
    p_key_scale += i_batch * KEY_SCALE_BATCH
    p_value_scale += i_batch * VALUE_SCALE_BATCH
    p_values = p_key_pages if FUSED else p_value_pages
    _store(p_key, p_key_scale, p_key_pages + o_key, i_head, HEADS, D, BLOCK_D, KEY_HEAD, KEY_SCALE)
    _store(p_value, p_value_scale, p_values + o_value + FIRST_VALUE, i_head, HEADS, V, BLOCK_V, VALUE_HEAD, VALUE_SCALE)


def forward(
    call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, config: PagedCacheUpdateConfig
) -> PagedCacheUpdateOutputs:
    batch, tokens, heads, size = call.key.shape
    requests, table_width = call.block_tables.shape[1:]
    if batch * tokens * heads * requests * call.block_tables.size * call.pages.pages * call.pages.page_size == 0:
        # Nothing to write. The barrier shows in the program that this platform served the call.
        return PagedCacheUpdateOutputs(*jax.lax.optimization_barrier((inputs.key_pages, inputs.value_pages)))
    inputs = with_common_batch(inputs)
    key, fused = strides_of(call.key_pages.shape, call.layout), call.value_pages is None
    value = key if call.value_pages is None else strides_of(call.value_pages.shape, call.layout)
    new = (inputs.key, inputs.value, inputs.query_start_loc, inputs.kv_lens, inputs.block_tables)
    scales = tuple(inputs.key if scale is None else scale for scale in (inputs.key_scale, inputs.value_scale))
    pages = (inputs.key_pages, inputs.key if fused else inputs.value_pages)
    first = len(new) + len(scales)
    key_pages, value_pages = call_kernel(
        paged_cache_update_kernel,
        (*new, *scales, *pages, tokens, requests, table_width, call.pages.pages),
        ((call.key_pages.shape, call.key_pages.dtype), ((1,) if fused else inputs.value_pages.shape, call.key_pages.dtype)),
        grid=batch * tokens * -(-heads // config.heads),
        num_warps=config.num_warps,
        input_output_aliases={first: 0} if fused else {first: 0, first + 1: 1},
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
        KEY_SCALE=0 if inputs.key_scale is None else inputs.key_scale.shape[1],
        KEY_SCALE_BATCH=batch_stride(inputs.key_scale),
        VALUE_SCALE=0 if inputs.value_scale is None else inputs.value_scale.shape[1],
        VALUE_SCALE_BATCH=batch_stride(inputs.value_scale),
        SEARCH=search_block(requests),
    )
    return PagedCacheUpdateOutputs(key_pages, None if fused else value_pages)
