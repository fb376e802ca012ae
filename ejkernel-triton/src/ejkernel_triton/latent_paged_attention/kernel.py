"""The forward phase: a program walks over the pages of a request for some of its new tokens, with some or all of their heads.

Its rows read each token of the cache once, as key and as value (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, absorbed). With
several splits of the keys, partial results are summed by a second kernel. Backward needs only `out` and `lse`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.latent_paged_attention.interface import (
    LatentPagedAttentionCall,
    LatentPagedAttentionInputs,
    LatentPagedAttentionOutputs,
)
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._latents.combine import combined
from ejkernel_triton._latents.config import LatentAttentionConfig
from ejkernel_triton._latents.tiles import along_keys, along_rows, attend, store_rows
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton._pages import batch_stride, search_block
from ejkernel_triton._stored import load_rows
from ejkernel_triton.latent_paged_attention.config import UNBOUNDED, product_dtype
from ejkernel_triton.latent_paged_attention.gradients import TRITON_DTYPES, backward

__all__ = ["backward", "forward"]

_LEAST_SEARCH_BLOCK = 128
"""Fewest requests that are searched at once: with fewer than a program has threads, ptxas spills a tenth of the main loop."""


@triton.jit
def _request_of_tile(p_starts, requests, i_tile, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """The request of a tile, and the number of its first tile.

    Tokens before the first request and after the last one belong to requests -1 and R, so that every token has a tile. A request
    that starts at token s owns the tiles from s // TOKENS on, and one more for each request before it, as it may end within a tile.
    """
    count = 0
    for i_start in range(0, requests + 1, BLOCK):
        o_start = i_start + tl.arange(0, BLOCK)
        b_start = tl.load(p_starts + o_start, mask=o_start <= requests, other=2147483647)  # [BLOCK]
        b_first = b_start if TOKENS == 1 else b_start // TOKENS + o_start + 1
        count += tl.sum(((o_start <= requests) & (b_first <= i_tile)).to(tl.int32))
    return count - 1


@triton.jit
def _pages_of_block(p_table, i_block, table_width, BLOCK_K: tl.constexpr, PAGE: tl.constexpr):
    """The page of every key `[BLOCK_K]`, or one page for all; -1 beyond the table."""
    i_key = i_block * BLOCK_K if PAGE % BLOCK_K == 0 else i_block * BLOCK_K + tl.arange(0, BLOCK_K)
    i_entry = i_key // PAGE
    return tl.load(p_table + i_entry, mask=i_entry < table_width, other=-1)


@triton.jit
def _attend_keys(
    b_query,
    b_query_pe,
    b_max,
    b_sum,
    b_acc,
    i_from,
    i_to,
    i_lowest,
    i_limit,
    i_lower,
    i_position,
    b_factor,
    p_pages,
    p_table,
    pages,
    table_width,
    MASKED: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    REST_AT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over keys `i_from` to `i_to`, multiples of BLOCK_K. If MASKED, rows see different keys."""
    i_page = _pages_of_block(p_table, i_from // BLOCK_K, table_width, BLOCK_K, PAGE)
    for i_block in tl.range(i_from // BLOCK_K, tl.cdiv(i_to, BLOCK_K), num_stages=STAGES):
        i_key = i_block * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        m_key = (i_page >= 0) & (i_page < pages) & (i_key >= i_lowest) & (i_key < i_limit)
        p_block = p_pages
        if PAGE % BLOCK_K == 0:  # addresses are a base plus constants
            p_block += i_page.to(tl.int64) * (PAGE * CHANNELS) + i_block * BLOCK_K % PAGE * CHANNELS
            o_key = tl.arange(0, BLOCK_K) * CHANNELS
        else:
            o_key = i_page.to(tl.int64) * (PAGE * CHANNELS) + i_key % PAGE * CHANNELS
        i_page = _pages_of_block(p_table, i_block + 1, table_width, BLOCK_K, PAGE)
        b_latent = load_rows(p_block, o_key, m_key, V, BLOCK_V, b_query.dtype)  # [BLOCK_K, BLOCK_V]
        b_rest = b_latent
        if REST > 0:
            b_rest = load_rows(p_block + REST_AT, o_key, m_key, REST, BLOCK_REST, b_query.dtype)  # [BLOCK_K, BLOCK_REST]
        m_visible = m_key
        if MASKED:
            m_visible = along_keys(m_key, KEYS_FIRST)
            m_visible = m_visible & (along_keys(i_key, KEYS_FIRST) <= along_rows(i_position, KEYS_FIRST))
            m_visible = m_visible & (along_keys(i_key, KEYS_FIRST) >= along_rows(i_lower, KEYS_FIRST))
        b_max, b_sum, b_acc = attend(
            b_query, b_query_pe, b_max, b_sum, b_acc, b_latent, b_rest, m_visible, b_factor, REST, SOFT_CAP, KEYS_FIRST, MASKED,
            PRECISION,
        )  # fmt: skip
    return b_max, b_sum, b_acc


@triton.jit
def latent_paged_attention_kernel(
    p_query,
    p_query_pe,
    p_pages,
    p_starts,
    p_lengths,
    p_tables,
    p_first_keys,
    p_key_scale,
    p_value_scale,
    tokens,
    requests,
    table_width,
    pages,
    tiles,
    p_out,
    p_lse,
    SCALE: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    REST_AT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGES_BATCH: tl.constexpr,
    STARTS_BATCH: tl.constexpr,
    LENGTHS_BATCH: tl.constexpr,
    TABLES_BATCH: tl.constexpr,
    FIRST_KEYS: tl.constexpr,
    FIRST_KEYS_BATCH: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_SCALE_BATCH: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_SCALE_BATCH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    SAVE_LSE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SEARCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of one tile. Tiles of the same tokens run beside each other, and read the same pages."""
    HEAD_TILES: tl.constexpr = (HEADS + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    i_head_tile = tl.program_id(0) % HEAD_TILES
    i_tile = tl.program_id(0) // HEAD_TILES % tiles
    i_split = tl.program_id(0) // HEAD_TILES // tiles % SPLITS
    i_batch = (tl.program_id(0) // HEAD_TILES // tiles // SPLITS).to(tl.int64)
    p_starts += i_batch * STARTS_BATCH
    i_request = _request_of_tile(p_starts, requests, i_tile, TOKENS, SEARCH)
    m_request = (i_request >= 0) & (i_request < requests)

    # The tile: its tokens, rows, and the keys that any of its rows sees.
    i_start = tl.load(p_starts + i_request, mask=i_request >= 0, other=0)
    i_start = tl.minimum(tl.maximum(i_start, 0), tokens)
    i_end = tl.load(p_starts + i_request + 1, mask=i_request < requests, other=2147483647)
    i_end = tl.minimum(tl.maximum(i_end, i_start), tokens)
    i_first = i_tile if TOKENS == 1 else i_start + (i_tile - i_start // TOKENS - i_request - 1) * TOKENS
    if i_first >= i_end:
        return
    i_last = tl.minimum(i_first + TOKENS, i_end)
    keys = tl.load(p_lengths + i_batch * LENGTHS_BATCH + i_request, mask=m_request, other=0)
    to_position = keys - i_end
    i_row = tl.arange(0, BLOCK_M)
    i_token = i_first + i_row // HEADS_OF_TILE  # [BLOCK_M]
    i_head = i_head_tile * HEADS_OF_TILE + i_row % HEADS_OF_TILE  # [BLOCK_M]
    m_row = (i_token < i_last) & (i_head < HEADS)
    i_position = i_token + to_position
    i_lower = tl.zeros([BLOCK_M], tl.int32)  # the first key that a row sees
    if WINDOW > 0:
        i_lower = tl.maximum(i_lower, i_position - WINDOW + 1)
    if FIRST_KEYS:
        i_lower = tl.maximum(i_lower, tl.load(p_first_keys + i_batch * FIRST_KEYS_BATCH + i_token, mask=m_row, other=0))
    i_lowest = tl.min(tl.where(m_row, i_lower, 2147483647), axis=0)
    i_limit = tl.minimum(tl.minimum(keys, table_width * PAGE), i_last + to_position)
    i_limit = tl.where(m_request, i_limit, 0)
    i_low_block = tl.minimum(i_lowest, tl.maximum(i_limit, 0)) // BLOCK_K
    blocks = tl.maximum(tl.cdiv(i_limit, BLOCK_K) - i_low_block, 0)
    blocks_of_split = tl.cdiv(blocks, SPLITS)
    i_begin = (i_low_block + tl.minimum(i_split * blocks_of_split, blocks)) * BLOCK_K
    i_stop = (i_low_block + tl.minimum((i_split + 1) * blocks_of_split, blocks)) * BLOCK_K

    o_row = (i_batch * tokens + i_token) * HEADS + i_head  # [BLOCK_M]
    b_query = load_rows(p_query, o_row * V, m_row, V, BLOCK_V, DTYPE)  # [BLOCK_M, BLOCK_V]
    b_query_pe = b_query
    if REST > 0:
        b_query_pe = load_rows(p_query_pe, o_row * REST, m_row, REST, BLOCK_REST, DTYPE)  # [BLOCK_M, BLOCK_REST]
    b_factor = 2.0 * SCALE / SOFT_CAP if SOFT_CAP > 0 else SCALE * 1.0
    if KEY_SCALE:
        b_factor *= tl.load(p_key_scale + i_batch * KEY_SCALE_BATCH)
    p_pages += i_batch * PAGES_BATCH
    p_tables += i_batch * TABLES_BATCH + tl.minimum(tl.maximum(i_request, 0), requests - 1).to(tl.int64) * table_width

    # All rows of a token see the same keys. Of several tokens, they do between the last first key and the first token's position.
    i_full_begin = i_begin
    i_full_stop = i_stop
    if TOKENS > 1:
        if WINDOW > 0 or FIRST_KEYS:
            i_full_begin = tl.cdiv(tl.max(tl.where(m_row, i_lower, 0), axis=0), BLOCK_K) * BLOCK_K
            i_full_begin = tl.minimum(tl.maximum(i_full_begin, i_begin), i_stop)
        i_full_stop = tl.maximum(i_first + to_position + 1, 0) // BLOCK_K * BLOCK_K
        i_full_stop = tl.minimum(tl.maximum(i_full_stop, i_full_begin), i_stop)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_V, BLOCK_M] if KEYS_FIRST else [BLOCK_M, BLOCK_V], tl.float32)
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (TOKENS > 1 and (PHASE == 2 or WINDOW > 0 or FIRST_KEYS)):
            # Masks per row take registers, so their blocks are short.
            b_max, b_sum, b_acc = _attend_keys(
                b_query, b_query_pe, b_max, b_sum, b_acc,
                i_begin if PHASE == 0 else (i_full_begin if PHASE == 1 else i_full_stop),
                i_full_begin if PHASE == 0 else (i_full_stop if PHASE == 1 else tl.minimum(i_stop, tl.maximum(i_limit, 0))),
                i_lowest, i_limit, i_lower, i_position, b_factor, p_pages, p_tables, pages, table_width, PHASE != 1, V, REST,
                REST_AT, BLOCK_V, BLOCK_REST, BLOCK_K if PHASE == 1 else 16, PAGE, CHANNELS, SOFT_CAP, KEYS_FIRST, PRECISION,
                STAGES if PHASE == 1 else 1,
            )  # fmt: skip

    b_value_factor = 1.0
    if VALUE_SCALE:
        b_value_factor = tl.load(p_value_scale + i_batch * VALUE_SCALE_BATCH)
    if SPLITS > 1:
        o_row += i_split * (tl.num_programs(0) // (HEAD_TILES * tiles * SPLITS)).to(tl.int64) * tokens * HEADS
    store_rows(
        b_max, b_sum, b_acc, b_value_factor, o_row, m_row, p_out, p_lse, V, BLOCK_V, KEYS_FIRST, SAVE_LSE, SPLITS > 1
    )  # fmt: skip


def forward(
    call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs, config: LatentAttentionConfig
) -> LatentPagedAttentionOutputs:
    batch, tokens, heads, latent = call.query_nope.shape
    requests, width = call.block_tables.shape[1:]
    save_lse = call.return_lse or call.save_residuals
    rows = (batch, tokens, heads)
    if batch * tokens * requests * width * call.pages.shape[1] == 0:
        lse = jnp.full(rows, -jnp.inf, jnp.float32) if save_lse else None
        return LatentPagedAttentionOutputs(jnp.zeros((*rows, latent), call.query_nope.dtype), lse)
    dtype = product_dtype(call)
    tiles = tokens if config.block_q == 1 else tokens // config.block_q + requests + 2
    rest = call.query_pe.shape[3]
    split = (config.splits,) if config.splits > 1 else ()
    out, lse = call_kernel(
        latent_paged_attention_kernel,
        (*_arrays(inputs), tokens, requests, width, call.pages.shape[1], tiles),
        (
            ((*split, *rows, latent), jnp.float32 if split else call.query_nope.dtype),
            ((*split, *rows) if save_lse or split else (1,), jnp.float32),
        ),
        grid=batch * config.splits * tiles * -(-heads // config.block_h),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=call.softmax_scale,
        V=latent,
        REST=rest,
        REST_AT=call.pe_offset,
        BLOCK_V=dot_block(latent),
        BLOCK_REST=dot_block(rest),
        BLOCK_M=config.rows,
        BLOCK_K=config.block_k,
        HEADS=heads,
        HEADS_OF_TILE=config.block_h,
        TOKENS=config.block_q,
        SPLITS=config.splits,
        PAGE=call.pages.shape[2],
        CHANNELS=call.pages.shape[3],
        PAGES_BATCH=batch_stride(inputs.pages),
        STARTS_BATCH=batch_stride(inputs.query_start_loc),
        LENGTHS_BATCH=batch_stride(inputs.kv_lens),
        TABLES_BATCH=batch_stride(inputs.block_tables),
        FIRST_KEYS=inputs.first_keys is not None,
        FIRST_KEYS_BATCH=batch_stride(inputs.first_keys),
        KEY_SCALE=inputs.key_scale is not None,
        KEY_SCALE_BATCH=batch_stride(inputs.key_scale),
        VALUE_SCALE=inputs.value_scale is not None,
        VALUE_SCALE_BATCH=batch_stride(inputs.value_scale),
        WINDOW=0 if call.window is None else min(call.window, UNBOUNDED),
        SOFT_CAP=0.0 if call.logits_soft_cap is None else call.logits_soft_cap,
        KEYS_FIRST=config.keys_first,
        SAVE_LSE=save_lse,
        DTYPE=TRITON_DTYPES[dtype.name],
        PRECISION=dot_precision(call.precision, dtype),
        SEARCH=max(search_block(requests + 1), _LEAST_SEARCH_BLOCK),
        STAGES=config.num_stages,
    )
    if split:
        out, lse = combined(out, lse, call.query_nope.dtype, save_lse=save_lse, value_scale=inputs.value_scale)
    return LatentPagedAttentionOutputs(out, lse if save_lse else None)


def _arrays(inputs: LatentPagedAttentionInputs) -> tuple[Any, ...]:
    """What the kernel reads; the query stands for what is absent."""
    fields = (
        "query_nope", "query_pe", "pages", "query_start_loc", "kv_lens", "block_tables", "first_keys", "key_scale", "value_scale",
    )  # fmt: skip
    found = (getattr(inputs, name) for name in fields)
    return tuple(inputs.query_nope if array is None or array.size == 0 else array for array in found)
