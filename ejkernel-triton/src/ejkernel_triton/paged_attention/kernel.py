"""The forward phase: programs loop over the KV pages of a tile with online softmax; a second kernel combines the partial
results of split-KV tiles in a fixed order (Dao et al., Flash-Decoding, 2023; Kwon et al., PagedAttention, 2023).

A tile's rows are new tokens times the query heads of one key head, so its keys are loaded once. Logits are base-2 exponents.
Backward needs only `out` and `lse`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._pages import search_block, storage, with_common_batch
from ejkernel_triton._requests import count_up_to
from ejkernel_triton._stored import load_rows
from ejkernel_triton.paged_attention.config import DECODE_STAGES, PagedAttentionConfig, product_dtype, warps_of
from ejkernel_triton.paged_attention.gradients import TRITON_DTYPES, backward
from ejkernel_triton.paged_attention.params import PagedAttentionParams, params_of
from ejkernel_triton.paged_attention.schedule import Schedule, Sizes, make_schedule

__all__ = ["backward", "forward"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MASKED, UNIFORM, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Key blocks that need a mask per row, one mask for all rows, or no mask."""
_FEW_ROWS, _MAX_COMBINE_PROGRAMS = 1024, 16384
"""Rows below which several programs combine one row, and programs above which one combines several rows."""


@triton.jit
def _pages_of_block(p_table, i_block, table_width, BLOCK_K: tl.constexpr, PAGE: tl.constexpr):
    """The page of every key `[BLOCK_K]`, or one page for all; -1 beyond the table."""
    i_key = i_block * BLOCK_K if PAGE % BLOCK_K == 0 else i_block * BLOCK_K + tl.arange(0, BLOCK_K)
    i_entry = i_key // PAGE
    return tl.load(p_table + i_entry, mask=i_entry < table_width, other=-1)


@triton.jit
def _online_softmax_update(
    b_query,
    b_max,
    b_sum,
    b_acc,
    i_page,
    i_block,
    i_lowest,
    i_limit,
    i_position,
    i_local,
    i_first_new,
    b_factor,
    b_slope,
    p_key,
    p_value,
    p_table,
    p_bias,
    pages,
    table_width,
    MASK_KIND: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    P: tl.constexpr,
):
    """Online-softmax update with one key block; prefetches the next block's pages.

    In a MASKED block rows see different keys, and a non-finite value must propagate only to rows that see it, although every
    row multiplies it by its weight. In a FULL block every row sees every key whose page exists, so there is no mask: a missing
    page gives a maximum of -inf, or a logit of -inf if keys have pages of their own.
    """
    ALIBI: tl.constexpr = P.slopes > 0
    ONE_PAGE: tl.constexpr = P.page_size % BLOCK_K == 0
    # Scale together with the subtraction of the maximum, as one FMA.
    SCALE_LATE: tl.constexpr = MASK_KIND == FULL and P.scale > 0 and P.key_scales == 0 and P.soft_cap == 0 and not ALIBI
    i_key = i_block * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    m_page = (i_page >= 0) & (i_page < pages)
    m_key = m_page & (i_key >= 0) if MASK_KIND == FULL else m_page & (i_key >= i_lowest) & (i_key < i_limit)
    if ONE_PAGE:  # addresses are a base plus constants
        i_first = i_block * BLOCK_K % P.page_size
        p_key += i_page.to(tl.int64) * P.key_page + i_first * P.key_token
        p_value += i_page.to(tl.int64) * P.value_page + i_first * P.value_token
        o_key = tl.arange(0, BLOCK_K) * P.key_token
        o_value = tl.arange(0, BLOCK_K) * P.value_token
    else:
        o_key = i_page.to(tl.int64) * P.key_page + (i_key % P.page_size) * P.key_token
        o_value = i_page.to(tl.int64) * P.value_page + (i_key % P.page_size) * P.value_token
    i_next_page = _pages_of_block(p_table, i_block + 1, table_width, BLOCK_K, P.page_size)
    b_key = load_rows(p_key, o_key, m_key, P.width, BLOCK_D, b_query.dtype)  # [BLOCK_K, BLOCK_D]
    b_value = load_rows(p_value, o_value, m_key, P.channels, BLOCK_V, b_query.dtype)  # [BLOCK_K, BLOCK_V]

    b_logit = tl.dot(b_query, tl.trans(b_key), input_precision=P.precision)  # [BLOCK_M, BLOCK_K]
    if P.soft_cap > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), with factor = 2 scale / cap
        b_logit = P.soft_cap * LOG2E * (1.0 - 2.0 / (tl.exp2(b_logit * (b_factor * LOG2E)) + 1.0))
    elif not SCALE_LATE:
        b_logit = b_logit * (b_factor * LOG2E)
    if ALIBI:
        b_logit += (b_slope * LOG2E)[:, None] * (i_key[None, :] - i_position[:, None]).to(tl.float32)
    m_logit = m_key[None, :]
    if MASK_KIND == MASKED:
        if P.causal:
            m_logit = m_logit & (i_key[None, :] <= i_position[:, None])
        if P.window > 0:
            m_logit = m_logit & (i_key[None, :] > i_position[:, None] - P.window)
        if P.bias > 0:
            i_new = i_key - i_first_new  # [BLOCK_K]
            m_bias = (i_local < P.bias)[:, None] & ((i_new >= 0) & (i_new < P.bias))[None, :]
            b_bias = tl.load(p_bias + i_local[:, None] * P.bias + i_new[None, :], mask=m_bias, other=0.0).to(tl.float32)
            m_logit = m_logit & (b_bias != float("-inf"))
            b_logit += b_bias * LOG2E
    if MASK_KIND != FULL:
        b_logit = tl.where(m_logit, b_logit, float("-inf"))
    elif not ONE_PAGE:
        b_logit += tl.where(m_key, 0.0, float("-inf"))[None, :]

    b_block_max = tl.max(b_logit, axis=1)  # [BLOCK_M]
    if SCALE_LATE:
        b_block_max *= b_factor * LOG2E
    if MASK_KIND == FULL and ONE_PAGE:
        b_block_max = tl.where(m_page, b_block_max, float("-inf"))
    b_new_max = tl.maximum(b_max, b_block_max)
    b_finite = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_rescale = tl.exp2(b_max - b_finite)
    b_shift = tl.where(m_page, b_finite, float("inf")) if MASK_KIND == FULL and ONE_PAGE else b_finite
    b_scaled = b_logit * (b_factor * LOG2E) if SCALE_LATE else b_logit
    b_weight = tl.exp2(b_scaled - b_shift[:, None])  # [BLOCK_M, BLOCK_K]
    if MASK_KIND == MASKED:
        m_finite = b_value - b_value == 0.0
        m_nonfinite = tl.min(m_finite.to(tl.int32), axis=1) == 0  # [BLOCK_K]
        b_value = tl.where(m_finite, b_value, 0.0)
        b_weight = tl.where(m_logit & m_nonfinite[None, :], float("nan"), b_weight)
    b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=1)
    b_acc = tl.dot(b_weight.to(b_value.dtype), b_value, b_acc * b_rescale[:, None], input_precision=P.precision)
    return b_new_max, b_sum, b_acc, i_next_page


@triton.jit
def _add_sink(b_max, b_sum, b_acc, b_sink):
    """Add a sink's weight to the sum; a sink has no value."""
    b_new_max = tl.maximum(b_max, b_sink)
    b_finite = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_rescale = tl.exp2(b_max - b_finite)
    return b_new_max, b_sum * b_rescale + tl.exp2(b_sink - b_finite), b_acc * b_rescale[:, None]


@triton.jit
def _normalize(b_max, b_sum, b_acc):
    """Normalised output and log-sum-exp; 0 and -inf for a fully masked row."""
    m_empty = b_sum == 0.0
    b_out = b_acc / tl.where(m_empty, 1.0, b_sum)[:, None]
    b_lse = tl.where(m_empty, float("-inf"), tl.where(m_empty, 0.0, b_max) + tl.log2(tl.where(m_empty, 1.0, b_sum)))
    return b_out, b_lse


@triton.jit
def paged_attention_kernel(
    p_query,
    p_key,
    p_value,
    p_starts,
    p_lengths,
    p_tables,
    p_splits,
    p_units_up_to,
    p_partials_up_to,
    p_sinks,
    p_slopes,
    p_bias,
    p_key_scale,
    p_value_scale,
    p_out_before,
    p_lse_before,
    tokens,
    requests,
    table_width,
    pages,
    units,
    partials,
    p_out,
    p_lse,
    p_partial,
    p_partial_lse,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    SEARCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of one tile. P: `PagedAttentionParams`. A tile has TOKENS tokens of HEADS_OF_TILE heads."""
    i_head_tile = tl.program_id(0) % HEAD_TILES
    i_unit = (tl.program_id(0) // HEAD_TILES) % units
    i_batch = tl.program_id(0) // HEAD_TILES // units
    i_key_head = i_head_tile // (HEAD_TILES // P.key_heads)
    o_schedule = i_batch * requests if P.schedules == 2 else 0
    i_request = count_up_to(p_units_up_to + o_schedule, requests, i_unit, SEARCH)
    if i_request >= requests:
        return

    # The tile: its tokens, rows, and the keys that any of its rows sees.
    o_starts = p_starts + o_schedule + (i_batch if P.schedules == 2 else 0) + i_request
    i_start = tl.minimum(tl.maximum(tl.load(o_starts), 0), tokens)
    i_end = tl.minimum(tl.maximum(tl.load(o_starts + 1), i_start), tokens)
    keys = tl.load(p_lengths + o_schedule + i_request)
    splits = tl.load(p_splits + o_schedule + i_request)
    tiles = tl.cdiv(i_end - i_start, TOKENS)
    i_in_request = i_unit - tl.load(p_units_up_to + o_schedule + i_request) + tiles * splits
    i_split = i_in_request % splits
    i_first = i_start + (tiles - 1 - i_in_request // splits) * TOKENS  # tiles with the most keys first
    i_last = tl.minimum(i_first + TOKENS, i_end)
    to_position = keys - i_end
    i_row = tl.arange(0, BLOCK_M)
    i_token = i_first + i_row // HEADS_OF_TILE  # [BLOCK_M]
    i_in_group = (i_head_tile % (HEAD_TILES // P.key_heads)) * HEADS_OF_TILE + i_row % HEADS_OF_TILE
    i_head = i_key_head * (P.heads // P.key_heads) + i_in_group  # [BLOCK_M]
    m_row = (i_token < i_last) & (i_row < TOKENS * HEADS_OF_TILE) & (i_in_group < P.heads // P.key_heads)
    i_lowest = 0
    i_limit = tl.minimum(keys, table_width * P.page_size)
    if P.window > 0:
        i_lowest = tl.maximum(i_first + to_position - P.window + 1, 0)
    if P.causal:
        i_limit = tl.minimum(i_limit, i_last + to_position)
    i_low_block = i_lowest // BLOCK_K
    blocks = tl.maximum(tl.cdiv(i_limit, BLOCK_K) - i_low_block, 0)
    blocks_of_split = tl.cdiv(blocks, splits)
    i_begin = i_low_block + tl.minimum(i_split * blocks_of_split, blocks)
    i_stop = i_low_block + tl.minimum((i_split + 1) * blocks_of_split, blocks)

    o_head = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head  # [BLOCK_M]
    o_size = tl.arange(0, BLOCK_D)
    m_query = m_row[:, None] & (o_size < P.width)[None, :]
    b_query = tl.load(p_query + o_head[:, None] * P.width + o_size[None, :], mask=m_query, other=0.0)  # [BLOCK_M, BLOCK_D]
    b_query = b_query.to(DTYPE)
    b_factor = 2.0 * P.scale / P.soft_cap if P.soft_cap > 0 else P.scale * 1.0
    if P.key_scales > 0:
        b_factor *= tl.load(p_key_scale + i_batch * P.key_scale_batch + (i_key_head if P.key_scales > 1 else 0))
    b_slope = tl.zeros([BLOCK_M], tl.float32)
    if P.slopes > 0:
        b_slope = tl.load(p_slopes + (i_batch * P.heads if P.slopes == 2 else 0) + i_head, mask=m_row, other=0.0).to(tl.float32)
    p_key += i_batch.to(tl.int64) * P.key_batch + i_key_head.to(tl.int64) * P.key_head
    p_value += i_batch.to(tl.int64) * P.value_batch + i_key_head.to(tl.int64) * P.value_head + P.first_value
    i_table = (i_batch if P.tables == 2 else 0) * requests + i_request
    p_tables += i_table.to(tl.int64) * table_width
    p_bias += i_batch.to(tl.int64) * P.bias_batch + i_request.to(tl.int64) * P.bias_request
    i_position = i_token + to_position
    i_local = i_token - i_start
    i_first_new = i_start + to_position

    # The full range, which needs no mask, lies between the window's edge and the first row's position.
    UNIFORM_ROWS: tl.constexpr = (TOKENS == 1 or not (P.causal or P.window > 0)) and P.bias == 0
    i_full_begin = i_begin
    i_full_stop = i_stop
    if not UNIFORM_ROWS:
        if P.window > 0:
            i_full_begin = tl.maximum(i_last - 1 + to_position - P.window + BLOCK_K, 0) // BLOCK_K
            i_full_begin = tl.minimum(tl.maximum(i_full_begin, i_begin), i_stop)
        if P.causal:
            i_full_stop = tl.maximum(i_first + to_position + 1, 0) // BLOCK_K
        if P.bias > 0:
            i_full_stop = i_full_begin
        i_full_stop = tl.minimum(i_full_stop, i_limit // BLOCK_K)
        i_full_stop = tl.minimum(tl.maximum(i_full_stop, i_full_begin), i_stop)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    i_page = _pages_of_block(p_tables, i_begin, table_width, BLOCK_K, P.page_size)
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (not UNIFORM_ROWS and (PHASE == 2 or P.window > 0)):
            i_from = i_begin if PHASE == 0 else (i_full_begin if PHASE == 1 else i_full_stop)
            i_to = i_full_begin if PHASE == 0 else (i_full_stop if PHASE == 1 else i_stop)
            for i_block in tl.range(
                i_from, i_to, num_stages=STAGES if PHASE == 1 or P.page_size % BLOCK_K != 0 else min(STAGES, 2)
            ):
                b_max, b_sum, b_acc, i_page = _online_softmax_update(
                    b_query, b_max, b_sum, b_acc, i_page, i_block, i_lowest, i_limit, i_position, i_local, i_first_new, b_factor,
                    b_slope, p_key, p_value, p_tables, p_bias, pages, table_width,
                    MASKED if PHASE != 1 else (UNIFORM if UNIFORM_ROWS else FULL), BLOCK_D, BLOCK_V, BLOCK_K, P,
                )  # fmt: skip

    o_value = tl.arange(0, BLOCK_V)
    m_out = m_row[:, None] & (o_value < P.channels)[None, :]
    if splits == 1:
        if P.sinks > 0:
            b_sink = tl.load(p_sinks + (i_batch * P.heads if P.sinks == 2 else 0) + i_head, mask=m_row, other=float("-inf"))
            b_max, b_sum, b_acc = _add_sink(b_max, b_sum, b_acc, b_sink.to(tl.float32) * LOG2E)
        b_out, b_lse = _normalize(b_max, b_sum, b_acc)
        if P.value_scales > 0:
            b_out *= tl.load(p_value_scale + i_batch * P.value_scale_batch + (i_key_head if P.value_scales > 1 else 0))
        tl.store(p_out + o_head[:, None] * P.channels + o_value[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        if P.save_lse:
            tl.store(p_lse + o_head, b_lse * LN2, mask=m_row)
    else:
        b_out, b_lse = _normalize(b_max, b_sum, b_acc)
        i_partial = tl.load(p_partials_up_to + o_schedule + i_request) - tiles * splits + i_in_request
        i_partial = (i_batch * partials + i_partial).to(tl.int64) * HEAD_TILES + i_head_tile
        o_partial = i_partial * (TOKENS * HEADS_OF_TILE) + i_row  # [BLOCK_M]
        tl.store(p_partial + o_partial[:, None] * P.channels + o_value[None, :], b_out, mask=m_out)
        tl.store(p_partial_lse + o_partial, b_lse, mask=m_row)


@triton.jit
def paged_attention_combine_kernel(
    p_partial,
    p_partial_lse,
    p_starts,
    p_splits,
    p_partials_up_to,
    p_sinks,
    p_value_scale,
    p_out_before,
    p_lse_before,
    tokens,
    requests,
    partials,
    p_out,
    p_lse,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
    HEADS_OF_PROGRAM: tl.constexpr,
    SCHEDULES: tl.constexpr,
    SINKS: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_SCALE_BATCH: tl.constexpr,
    SAVE_LSE: tl.constexpr,
    CLEAR: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Combine partial results to a slice of the output of one token's heads. With CLEAR, tokens without a request become 0.

    With BY_REQUEST only the first token of each request is processed.
    """
    SLICES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_slice = tl.program_id(0) % SLICES
    i_first_head = (tl.program_id(0) // SLICES) % (HEADS // HEADS_OF_PROGRAM) * HEADS_OF_PROGRAM
    i_row = tl.program_id(0) // SLICES // (HEADS // HEADS_OF_PROGRAM)
    i_batch = i_row // (requests if BY_REQUEST else tokens)
    o_schedule = i_batch * requests if SCHEDULES == 2 else 0
    p_starts += o_schedule + (i_batch if SCHEDULES == 2 else 0)
    if BY_REQUEST:
        i_request = i_row % requests
        i_token = tl.minimum(tl.maximum(tl.load(p_starts + i_request), 0), tokens - 1)
        i_row = i_batch * tokens + i_token
    else:
        i_token = i_row % tokens
        i_request = count_up_to(p_starts + 1, requests, i_token, SEARCH)
    o_value = i_slice * BLOCK_V + tl.arange(0, BLOCK_V)
    m_value = o_value < V
    i_start = 2147483647
    splits = 0
    if i_request < requests:
        i_start = tl.maximum(tl.load(p_starts + i_request), 0)
        splits = tl.load(p_splits + o_schedule + i_request)
    if i_token < i_start:
        if CLEAR:
            for i in range(HEADS_OF_PROGRAM):
                o_head = i_row.to(tl.int64) * HEADS + i_first_head + i
                tl.store(p_out + o_head * V + o_value, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=m_value)
                if SAVE_LSE:
                    tl.store(p_lse + o_head, float("-inf"))
    elif splits > 1:
        i_tile = (i_token - i_start) // TOKENS
        i_partial = tl.load(p_partials_up_to + o_schedule + i_request) - (i_tile + 1) * splits
        for i in range(HEADS_OF_PROGRAM):
            i_head = i_first_head + i
            i_key_head = i_head // (HEADS // KEY_HEADS)
            i_in_group = i_head % (HEADS // KEY_HEADS)
            i_head_tile = i_key_head * (HEAD_TILES // KEY_HEADS) + i_in_group // HEADS_OF_TILE
            i_in_tile = (i_token - i_start) % TOKENS * HEADS_OF_TILE + i_in_group % HEADS_OF_TILE
            b_max = tl.full([1], float("-inf"), tl.float32)
            b_sum = tl.zeros([1], tl.float32)
            b_acc = tl.zeros([1, BLOCK_V], tl.float32)
            for i_from in range(0, splits, SPLITS_PER_STEP):
                i_split = i_from + tl.arange(0, SPLITS_PER_STEP)
                m_split = i_split < splits
                o_partial = ((i_batch * partials + i_partial + i_split).to(tl.int64) * HEAD_TILES + i_head_tile) * (
                    TOKENS * HEADS_OF_TILE
                )
                o_partial += i_in_tile
                b_lse = tl.load(p_partial_lse + o_partial, mask=m_split, other=float("-inf"))  # [TOGETHER]
                m_partial = m_split[:, None] & m_value[None, :]
                b_partial = tl.load(
                    p_partial + o_partial[:, None] * V + o_value[None, :], mask=m_partial, other=0.0
                )  # [TOGETHER, BLOCK_V]
                b_new_max = tl.maximum(b_max, tl.max(b_lse, axis=0))
                b_finite = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
                b_weight = tl.exp2(b_lse - b_finite)
                b_rescale = tl.exp2(b_max - b_finite)
                b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=0)
                b_acc = b_acc * b_rescale[:, None] + tl.sum(b_weight[:, None] * b_partial, axis=0)[None, :]
                b_max = b_new_max
            if SINKS > 0:
                b_sink = tl.load(p_sinks + (i_batch * HEADS if SINKS == 2 else 0) + i_head).to(tl.float32) * LOG2E
                b_max, b_sum, b_acc = _add_sink(b_max, b_sum, b_acc, b_sink)
            b_out, b_lse = _normalize(b_max, b_sum, b_acc)
            if VALUE_SCALE > 0:
                b_out *= tl.load(p_value_scale + i_batch * VALUE_SCALE_BATCH + (i_key_head if VALUE_SCALE > 1 else 0))
            o_head = i_row.to(tl.int64) * HEADS + i_head + tl.arange(0, 1)
            m_out = m_value[None, :]
            tl.store(p_out + o_head[:, None] * V + o_value[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
            if SAVE_LSE:
                tl.store(p_lse + o_head, b_lse * LN2, mask=i_slice + tl.arange(0, 1) == 0)


class _Results(NamedTuple):
    """out `[b, N, H, V]`; lse `[b, N, H]`, or one element where it is not wanted."""

    out: Any
    lse: Any


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs, config: PagedAttentionConfig) -> PagedAttentionOutputs:
    batch, tokens, _, _ = call.query.shape
    save_lse = call.return_lse or call.save_residuals
    if batch * tokens * call.kv_lens.shape[1] * call.value_size * call.longest * call.pages.pages == 0:
        return _without_keys(call, inputs)
    inputs = _with_one_sink(with_common_batch(inputs))
    together = Sizes.of(
        call, config, tokens_of_tile=config.block_q, keys=config.block_k, above=1 if config.decode_block_k else 0
    )
    results = None if together.partials else _cleared(call)
    if config.decode_block_k:
        alone = Sizes.of(call, config, tokens_of_tile=1, keys=config.decode_block_k, up_to=1)
        stages = min(config.num_stages, DECODE_STAGES)
        results = _pass(call, inputs, alone, results, num_warps=warps_of(call, alone.rows), num_stages=stages, clear=False)
    results = _pass(
        call, inputs, together, results, num_warps=config.num_warps, num_stages=config.num_stages, clear=together.partials > 0
    )
    return PagedAttentionOutputs(results.out, results.lse if save_lse else None)


def _without_keys(call: PagedAttentionCall, inputs: PagedAttentionInputs) -> PagedAttentionOutputs:
    """Without queries or keys: zeros, and the log-sum-exp of the sinks for rows with a request."""
    batch, tokens, heads, _ = call.query.shape
    out = jnp.zeros((batch, tokens, heads, call.value_size), call.query.dtype)
    if not (call.return_lse or call.save_residuals):
        return PagedAttentionOutputs(out)
    lse = jnp.full((batch, tokens, heads), -jnp.inf, jnp.float32)
    if inputs.softmax_aux is not None:
        row, starts = jnp.arange(tokens)[None, :, None], inputs.query_start_loc[:, None]
        owned = jnp.any((row >= starts[..., :-1]) & (row < starts[..., 1:]), axis=-1)[..., None]
        sinks = jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=-1)[:, None]
        lse = jnp.where(owned, sinks, lse)
    return PagedAttentionOutputs(out, lse)


def _with_one_sink(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """Sinks `[1|b, H, n]` of a head as one `[1|b, H]`."""
    if inputs.softmax_aux is None:
        return inputs
    if inputs.softmax_aux.shape[2] == 1:
        return inputs._replace(softmax_aux=inputs.softmax_aux[..., 0])
    return inputs._replace(softmax_aux=jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=-1))


def _pass(
    call: PagedAttentionCall,
    inputs: PagedAttentionInputs,
    sizes: Sizes,
    before: _Results | None,
    *,
    num_warps: int,
    num_stages: int,
    clear: bool,
) -> _Results:
    """Serve the requests that `sizes` selects; other rows keep their values from `before` or are left to a later pass.

    With `clear`, the combine kernel sets rows without a request to 0.
    """
    batch, tokens, heads, size = call.query.shape
    requests = call.kv_lens.shape[1]
    save_lse = call.return_lse or call.save_residuals
    schedule = make_schedule(call, sizes, inputs.query_start_loc, inputs.kv_lens)
    dtype = product_dtype(call)
    params = params_of(call, inputs, schedules=storage(schedule.splits), dtype=dtype)
    rows = sizes.tokens_of_tile * sizes.heads_of_tile
    partials = (batch, sizes.partials, sizes.head_tiles, rows) if sizes.partials else (1, 1, 1, 1)
    absent = inputs.query

    def present(array: Any) -> Any:
        return absent if array is None else array

    results = (
        ((batch, tokens, heads, call.value_size), inputs.query.dtype),
        (
            (batch, tokens, heads) if save_lse else (1,),
            jnp.float32,
        ),
    )
    arrays = (
        inputs.query,
        inputs.key_pages,
        inputs.key_pages if inputs.value_pages is None else inputs.value_pages,
        inputs.query_start_loc,
        inputs.kv_lens,
        inputs.block_tables,
        *schedule,
        present(inputs.softmax_aux),
        present(inputs.alibi_slopes),
        present(inputs.qq_bias),
        present(inputs.key_scale),
        present(inputs.value_scale),
        *(before or (absent, absent)),
    )
    out, lse, partial, partial_lse = call_kernel(
        paged_attention_kernel,
        (*arrays, tokens, requests, call.block_tables.shape[2], call.pages.pages, sizes.units, sizes.partials),
        (*results, ((*partials, call.value_size), jnp.float32), (partials, jnp.float32)),
        grid=batch * sizes.units * sizes.head_tiles,
        num_warps=num_warps,
        num_stages=num_stages,
        input_output_aliases={len(arrays) - 2: 0, len(arrays) - 1: 1} if before else None,
        P=params,
        BLOCK_D=dot_block(size),
        BLOCK_V=dot_block(call.value_size),
        BLOCK_M=sizes.rows,
        BLOCK_K=sizes.keys,
        HEADS_OF_TILE=sizes.heads_of_tile,
        HEAD_TILES=sizes.head_tiles,
        TOKENS=sizes.tokens_of_tile,
        DTYPE=TRITON_DTYPES[dtype.name],
        SEARCH=search_block(requests),
        STAGES=num_stages,
    )
    if not sizes.partials:
        return _Results(out, lse)
    return _combine(call, inputs, sizes, schedule, _Results(out, lse), (partial, partial_lse), params, clear=clear)


def _cleared(call: PagedAttentionCall) -> _Results:
    """The values of rows without a request."""
    rows = call.query.shape[:3]
    lse = jnp.full(rows if call.return_lse or call.save_residuals else (1,), -jnp.inf, jnp.float32)
    return _Results(jnp.zeros((*rows, call.value_size), call.query.dtype), lse)


def _combine(
    call: PagedAttentionCall,
    inputs: PagedAttentionInputs,
    sizes: Sizes,
    schedule: Schedule,
    found: _Results,
    partials: tuple[Any, Any],
    params: PagedAttentionParams,
    *,
    clear: bool,
) -> _Results:
    """Combine partial results into the outputs, in place."""
    batch, tokens, heads, _ = call.query.shape
    requests = call.kv_lens.shape[1]
    by_request = sizes.up_to == 1
    tokens_of_grid = batch * (requests if by_request else tokens)
    rows = tokens_of_grid * heads
    heads_of_program = next((n for n in range(1, heads) if heads % n == 0 and rows <= n * _MAX_COMBINE_PROGRAMS), heads)
    block = min(dot_block(call.value_size), 32) if rows < _FEW_ROWS else dot_block(call.value_size)
    absent = inputs.query
    arrays = (
        *partials,
        inputs.query_start_loc,
        schedule.splits,
        schedule.partials_up_to,
        absent if inputs.softmax_aux is None else inputs.softmax_aux,
        absent if inputs.value_scale is None else inputs.value_scale,
        *found,
    )
    out, lse = call_kernel(
        paged_attention_combine_kernel,
        (*arrays, tokens, requests, sizes.partials),
        tuple((array.shape, array.dtype) for array in found),
        grid=tokens_of_grid * (heads // heads_of_program) * -(-call.value_size // block),
        num_warps=4,
        input_output_aliases={len(arrays) - 2: 0, len(arrays) - 1: 1},
        BLOCK_V=block,
        SPLITS_PER_STEP=min(64, 2048 // block, triton.next_power_of_2(sizes.wanted)),
        HEADS_OF_PROGRAM=heads_of_program,
        CLEAR=clear,
        BY_REQUEST=by_request,
        V=params.channels,
        HEADS=params.heads,
        KEY_HEADS=params.key_heads,
        HEADS_OF_TILE=sizes.heads_of_tile,
        HEAD_TILES=sizes.head_tiles,
        TOKENS=sizes.tokens_of_tile,
        SCHEDULES=params.schedules,
        SINKS=params.sinks,
        VALUE_SCALE=params.value_scales,
        VALUE_SCALE_BATCH=params.value_scale_batch,
        SAVE_LSE=params.save_lse,
        SEARCH=search_block(requests),
    )
    return _Results(out, lse)
