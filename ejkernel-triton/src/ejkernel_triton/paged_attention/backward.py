"""The backward phase: weights are formed again from the log-sum-exp, first for each tile of queries, then for each page.

A program of the second kernel owns keys of one page and key head, and goes through the requests whose block tables name that page,
in the order of the tables: a page that several requests share is summed by one program, so equal inputs give equal bits.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._latents.gradients import load_lse
from ejkernel_triton._requests import count_up_to
from ejkernel_triton._stored import finite_rows, load_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def request_of(p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P: tl.constexpr):
    """First new token, the one after the last, what to add to a token for its position, and the keys of a request."""
    o_starts = i_batch * (requests + 1) if P.schedules == 2 else 0
    o_lengths = i_batch * requests if P.schedules == 2 else 0
    i_start = tl.minimum(tl.maximum(tl.load(p_starts + o_starts + i_request), 0), tokens)
    i_end = tl.minimum(tl.maximum(tl.load(p_starts + o_starts + i_request + 1), i_start), tokens)
    keys = tl.load(p_lengths + o_lengths + i_request)
    return i_start, i_end, keys - i_end, tl.minimum(keys, table_width * P.page_size)


@triton.jit
def load_bias(p_bias, i_batch, i_request, i_local, i_new, P: tl.constexpr):
    """Bias from new tokens i_local to new tokens i_new, which broadcast against each other."""
    m_bias = (i_local < P.bias) & (i_new >= 0) & (i_new < P.bias)
    p_bias += i_batch.to(tl.int64) * P.bias_batch + i_request.to(tl.int64) * P.bias_request
    return tl.load(p_bias + i_local * P.bias + i_new, mask=m_bias, other=0.0).to(tl.float32)


@triton.jit
def weights_of(b_raw, b_lse, b_slope, b_bias, i_key, i_position, m_seen, b_factor, P: tl.constexpr):
    """Weights and derivatives of the soft cap from products of queries and keys. What is shaped like rows or like keys broadcasts
    against the products, whichever of them comes first; m_seen has their shape."""
    b_logit = b_raw * b_factor
    b_cap = tl.full(b_raw.shape, 1.0, tl.float32)
    if P.soft_cap > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        b_capped = 1.0 - 2.0 / (tl.exp2(b_logit * (2.0 * LOG2E / P.soft_cap)) + 1.0)
        b_logit = P.soft_cap * b_capped
        b_cap = 1.0 - b_capped * b_capped
    if P.slopes > 0:
        b_logit += b_slope * (i_key - i_position).to(tl.float32)
    if P.bias > 0:
        b_logit += b_bias
    b_weight = tl.where(m_seen, tl.exp2((b_logit - b_lse) * LOG2E), 0.0)
    return b_weight, b_cap


@triton.jit
def is_seen(m_key, m_row, i_key, i_position, b_bias, P: tl.constexpr):
    m_seen = m_key & m_row
    if P.causal:
        m_seen = m_seen & (i_key <= i_position)
    if P.window > 0:
        m_seen = m_seen & (i_key > i_position - P.window)
    if P.bias > 0:
        m_seen = m_seen & (b_bias != float("-inf"))
    return m_seen


@triton.jit
def load_heads(p_array, o_head, m_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Rows of `[b, N, H, SIZE]`. [BLOCK_M, BLOCK]"""
    o_size = tl.arange(0, BLOCK)
    m_tile = m_row[:, None] & (o_size < SIZE)[None, :]
    return tl.load(p_array + o_head[:, None] * SIZE + o_size[None, :], mask=m_tile, other=0.0).to(DTYPE)


@triton.jit
def scales_of(p_key_scale, p_value_scale, i_batch, i_key_head, P: tl.constexpr):
    """Factors of products with keys and with values."""
    b_factor = P.scale * 1.0
    if P.key_scales > 0:
        b_factor *= tl.load(p_key_scale + i_batch * P.key_scale_batch + (i_key_head if P.key_scales > 1 else 0))
    b_value_scale = 1.0
    if P.value_scales > 0:
        b_value_scale = tl.load(p_value_scale + i_batch * P.value_scale_batch + (i_key_head if P.value_scales > 1 else 0))
    return b_factor, b_value_scale


@triton.jit
def load_slopes(p_slopes, i_batch, i_head, m_row, P: tl.constexpr):
    if P.slopes > 0:
        return tl.load(p_slopes + (i_batch * P.heads if P.slopes == 2 else 0) + i_head, mask=m_row, other=0.0).to(tl.float32)
    else:
        return tl.zeros(i_head.shape, tl.float32)


@triton.jit
def query_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_starts,
    p_lengths,
    p_tables,
    p_tiles_up_to,
    p_slopes,
    p_bias,
    p_key_scale,
    p_value_scale,
    p_grad,
    p_lse,
    p_mean,
    tokens,
    requests,
    table_width,
    pages,
    tiles,
    p_out,
    p_mean_out,
    p_key_scale_out,
    p_value_scale_out,
    p_slope_out,
    P: tl.constexpr,
    ANEW: tl.constexpr,
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
    """dQ of a tile of TOKENS tokens and HEADS_OF_TILE heads, and for each of its rows what the gradients of scales and slopes sum.

    With ANEW the mean of the weights' gradients is formed first, from what p_mean holds of that of the log-sum-exp.
    """
    i_head_tile = tl.program_id(0) % HEAD_TILES
    i_unit = (tl.program_id(0) // HEAD_TILES) % tiles
    i_batch = tl.program_id(0) // HEAD_TILES // tiles
    i_key_head = i_head_tile // (HEAD_TILES // P.key_heads)
    p_tiles_up_to += i_batch * requests if P.schedules == 2 else 0
    i_request = count_up_to(p_tiles_up_to, requests, i_unit, SEARCH)
    if i_request >= requests:
        return
    i_start, i_end, to_position, i_limit = request_of(p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P)
    i_first = i_start + (tl.load(p_tiles_up_to + i_request) - 1 - i_unit) * TOKENS  # tiles with the most keys first
    i_last = tl.minimum(i_first + TOKENS, i_end)
    i_row = tl.arange(0, BLOCK_M)
    i_token = i_first + i_row // HEADS_OF_TILE  # [BLOCK_M]
    i_in_group = (i_head_tile % (HEAD_TILES // P.key_heads)) * HEADS_OF_TILE + i_row % HEADS_OF_TILE
    i_head = i_key_head * (P.heads // P.key_heads) + i_in_group  # [BLOCK_M]
    m_row = (i_token < i_last) & (i_row < TOKENS * HEADS_OF_TILE) & (i_in_group < P.heads // P.key_heads)
    o_head = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head  # [BLOCK_M]
    i_position = (i_token + to_position)[:, None]
    i_lowest = 0
    if P.window > 0:
        i_lowest = tl.maximum(i_first + to_position - P.window + 1, 0)
    if P.causal:
        i_limit = tl.minimum(i_limit, i_last + to_position)

    b_query = load_heads(p_query, o_head, m_row, P.width, BLOCK_D, DTYPE)
    b_grad = load_heads(p_grad, o_head, m_row, P.channels, BLOCK_V, DTYPE)
    b_lse = load_lse(p_lse, o_head, m_row)
    b_mean = tl.load(p_mean + o_head, mask=m_row, other=0.0)
    b_slope = load_slopes(p_slopes, i_batch, i_head, m_row, P)
    b_factor, b_value_scale = scales_of(p_key_scale, p_value_scale, i_batch, i_key_head, P)
    p_key += i_batch.to(tl.int64) * P.key_batch + i_key_head.to(tl.int64) * P.key_head
    p_value += i_batch.to(tl.int64) * P.value_batch + i_key_head.to(tl.int64) * P.value_head + P.first_value
    p_tables += ((i_batch if P.tables == 2 else 0) * requests + i_request).to(tl.int64) * table_width
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_by_key_scale = tl.zeros([BLOCK_M], tl.float32)
    b_by_value_scale = tl.zeros([BLOCK_M], tl.float32)
    b_by_slope = tl.zeros([BLOCK_M], tl.float32)
    for PASS in tl.static_range(0 if ANEW else 1, 2):
        for i_from in tl.range(i_lowest // BLOCK_K * BLOCK_K, i_limit, BLOCK_K, num_stages=STAGES):
            i_key = i_from + tl.arange(0, BLOCK_K)
            m_key = (i_key >= i_lowest) & (i_key < i_limit)
            i_page = tl.load(p_tables + i_key // P.page_size, mask=m_key, other=-1)  # [BLOCK_K]
            m_key = m_key & (i_page >= 0) & (i_page < pages)
            i_slot = i_key % P.page_size
            b_key = load_rows(
                p_key, i_page.to(tl.int64) * P.key_page + i_slot * P.key_token, m_key, P.width, BLOCK_D, DTYPE
            )  # [BLOCK_K, BLOCK_D]
            b_value = load_rows(
                p_value, i_page.to(tl.int64) * P.value_page + i_slot * P.value_token, m_key, P.channels, BLOCK_V, DTYPE
            )  # [BLOCK_K, BLOCK_V]
            b_key, b_lost = finite_rows(b_key, 1)
            b_value, b_lost_value = finite_rows(b_value, 1)
            b_bias = 0.0
            if P.bias > 0:
                i_new = i_key - i_start - to_position
                b_bias = load_bias(p_bias, i_batch, i_request, (i_token - i_start)[:, None], i_new[None, :], P)
            m_seen = is_seen(m_key[None, :], m_row[:, None], i_key[None, :], i_position, b_bias, P)
            b_raw = tl.dot(b_query, tl.trans(b_key), input_precision=P.precision) + (b_lost + b_lost_value)[None, :]
            b_weight, b_cap = weights_of(
                b_raw, b_lse[:, None], b_slope[:, None], b_bias, i_key[None, :], i_position, m_seen, b_factor, P
            )  # [BLOCK_M, BLOCK_K]
            b_product = tl.dot(b_grad, tl.trans(b_value), input_precision=P.precision)
            if PASS == 0:
                b_mean += tl.sum(tl.where(m_seen, b_weight * (b_value_scale * b_product), 0.0), axis=1)
            else:
                b_logit_grad = b_weight * (b_value_scale * b_product - b_mean[:, None])
                b_raw_grad = tl.where(m_seen, b_logit_grad * b_cap, 0.0)
                b_acc = tl.dot((b_raw_grad * b_factor).to(DTYPE), b_key, b_acc, input_precision=P.precision)
                if P.key_scales > 0:
                    b_by_key_scale += tl.sum(tl.where(m_seen, b_raw_grad * b_raw, 0.0), axis=1)
                if P.value_scales > 0:
                    b_by_value_scale += tl.sum(tl.where(m_seen, b_weight * b_product, 0.0), axis=1)
                if P.slopes > 0:
                    b_distance = (i_key[None, :] - i_position).to(tl.float32)
                    b_by_slope += tl.sum(tl.where(m_seen, b_logit_grad * b_distance, 0.0), axis=1)

    o_size = tl.arange(0, BLOCK_D)
    m_out = m_row[:, None] & (o_size < P.width)[None, :]
    tl.store(p_out + o_head[:, None] * P.width + o_size[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_out)
    if ANEW:
        tl.store(p_mean_out + o_head, b_mean, mask=m_row)
    if P.key_scales > 0:
        tl.store(p_key_scale_out + o_head, b_by_key_scale * P.scale, mask=m_row)
    if P.value_scales > 0:
        tl.store(p_value_scale_out + o_head, b_by_value_scale, mask=m_row)
    if P.slopes > 0:
        tl.store(p_slope_out + o_head, b_by_slope, mask=m_row)


@triton.jit
def key_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_starts,
    p_lengths,
    p_entries,
    p_entries_up_to,
    p_slopes,
    p_bias,
    p_key_scale,
    p_value_scale,
    p_grad,
    p_lse,
    p_mean,
    tokens,
    requests,
    table_width,
    pages,
    p_key_out,
    p_value_out,
    P: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of BLOCK_K keys of a page, `[b, pages, page_size, K, ...]`, from all entries of block tables that name the page.

    ENTRIES: entries of all tables of a batch member, 0 where the batch shares them. Products are transposed, rows come second.
    """
    PARTS: tl.constexpr = (P.page_size + BLOCK_K - 1) // BLOCK_K
    GROUP: tl.constexpr = P.heads // P.key_heads
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    i_key_head = tl.program_id(0) % P.key_heads
    i_part = (tl.program_id(0) // P.key_heads) % PARTS
    i_page = (tl.program_id(0) // (P.key_heads * PARTS)) % pages
    i_batch = tl.program_id(0) // (P.key_heads * PARTS) // pages
    i_slot = i_part * BLOCK_K + tl.arange(0, BLOCK_K)
    m_slot = i_slot < P.page_size
    i_row = tl.arange(0, BLOCK_M)
    p_entries_up_to += i_batch * (pages + 1) if ENTRIES > 0 else 0
    p_entries += i_batch.to(tl.int64) * ENTRIES
    i_entry_first = tl.load(p_entries_up_to + i_page)
    i_entry_last = tl.load(p_entries_up_to + i_page + 1)
    b_factor, b_value_scale = scales_of(p_key_scale, p_value_scale, i_batch, i_key_head, P)
    p_key += i_batch.to(tl.int64) * P.key_batch + i_key_head.to(tl.int64) * P.key_head + i_page.to(tl.int64) * P.key_page
    p_value += i_batch.to(tl.int64) * P.value_batch + i_key_head.to(tl.int64) * P.value_head + P.first_value
    p_value += i_page.to(tl.int64) * P.value_page
    b_key_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    b_value_grad = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for i_entry in range(i_entry_first, i_entry_last):
        i_in_tables = tl.load(p_entries + i_entry)
        i_request = i_in_tables // table_width
        i_start, i_end, to_position, i_limit = request_of(
            p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P
        )
        i_lowest = i_in_tables % table_width * P.page_size + i_part * BLOCK_K
        i_key = i_lowest + tl.arange(0, BLOCK_K)
        m_key = m_slot & (i_key < i_limit)
        b_key = load_rows(p_key, i_slot * P.key_token, m_key, P.width, BLOCK_D, DTYPE)  # [BLOCK_K, BLOCK_D]
        b_value = load_rows(p_value, i_slot * P.value_token, m_key, P.channels, BLOCK_V, DTYPE)  # [BLOCK_K, BLOCK_V]
        b_key, b_lost = finite_rows(b_key, 1)
        b_value, b_lost_value = finite_rows(b_value, 1)
        b_lost = (b_lost + b_lost_value)[:, None]
        i_from, i_to = i_start, i_end
        if P.causal:
            i_from = tl.maximum(i_from, i_lowest - to_position)
        if P.window > 0:
            i_to = tl.minimum(i_to, tl.minimum(i_lowest + BLOCK_K, i_limit) - 1 + P.window - to_position)
        if i_lowest >= i_limit:
            i_to = i_from
        for i_first in tl.range(i_from, i_to, TOKENS, num_stages=STAGES):
            for i_head_tile in tl.static_range(HEAD_TILES):
                i_token = i_first + i_row // HEADS_OF_TILE  # [BLOCK_M]
                i_in_group = i_head_tile * HEADS_OF_TILE + i_row % HEADS_OF_TILE
                i_head = i_key_head * GROUP + i_in_group
                m_row = (i_token < i_to) & (i_row < TOKENS * HEADS_OF_TILE) & (i_in_group < GROUP)
                o_head = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head
                i_position = (i_token + to_position)[None, :]
                b_query = load_heads(p_query, o_head, m_row, P.width, BLOCK_D, DTYPE)
                b_grad = load_heads(p_grad, o_head, m_row, P.channels, BLOCK_V, DTYPE)
                b_lse = load_lse(p_lse, o_head, m_row)
                b_mean = tl.load(p_mean + o_head, mask=m_row, other=0.0)
                b_slope = load_slopes(p_slopes, i_batch, i_head, m_row, P)
                b_bias = 0.0
                if P.bias > 0:
                    i_new = i_key - i_start - to_position
                    b_bias = load_bias(p_bias, i_batch, i_request, (i_token - i_start)[None, :], i_new[:, None], P)
                m_seen = is_seen(m_key[:, None], m_row[None, :], i_key[:, None], i_position, b_bias, P)
                b_raw = tl.dot(b_key, tl.trans(b_query), input_precision=P.precision) + b_lost
                b_weight, b_cap = weights_of(
                    b_raw, b_lse[None, :], b_slope[None, :], b_bias, i_key[:, None], i_position, m_seen, b_factor, P
                )  # [BLOCK_K, BLOCK_M]
                b_product = tl.dot(b_value, tl.trans(b_grad), input_precision=P.precision)
                b_logit_grad = b_weight * (b_value_scale * b_product - b_mean[None, :])
                b_raw_grad = tl.where(m_seen, b_logit_grad * b_cap, 0.0) * b_factor
                b_weight *= b_value_scale
                b_value_grad = tl.dot(b_weight.to(DTYPE), b_grad, b_value_grad, input_precision=P.precision)
                b_key_grad = tl.dot(b_raw_grad.to(DTYPE), b_query, b_key_grad, input_precision=P.precision)
    o_out = ((i_batch.to(tl.int64) * pages + i_page) * P.page_size + i_slot) * P.key_heads + i_key_head
    o_size, o_value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_size, m_value = (o_size < P.width)[None, :], (o_value < P.channels)[None, :]
    p_tile = p_key_out + o_out[:, None] * P.width + o_size[None, :]
    tl.store(p_tile, b_key_grad.to(p_key_out.dtype.element_ty), mask=m_slot[:, None] & m_size)
    p_tile = p_value_out + o_out[:, None] * P.channels + o_value[None, :]
    tl.store(p_tile, b_value_grad.to(p_value_out.dtype.element_ty), mask=m_slot[:, None] & m_value)


@triton.jit
def bias_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_starts,
    p_lengths,
    p_tables,
    p_slopes,
    p_bias,
    p_key_scale,
    p_value_scale,
    p_grad,
    p_lse,
    p_mean,
    tokens,
    requests,
    table_width,
    pages,
    p_out,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The gradient of the bias between BLOCK_M and BLOCK_K new tokens of a request, summed over all heads. `[b, R, Q, Q]`"""
    TILES: tl.constexpr = (P.bias + BLOCK_K - 1) // BLOCK_K
    ROW_TILES: tl.constexpr = (P.bias + BLOCK_M - 1) // BLOCK_M
    i_tile = tl.program_id(0) % (TILES * ROW_TILES)
    i_request = (tl.program_id(0) // (TILES * ROW_TILES)) % requests
    i_batch = tl.program_id(0) // (TILES * ROW_TILES) // requests
    i_start, i_end, to_position, i_limit = request_of(p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P)
    i_local = i_tile // TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    i_new = i_tile % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    i_token = i_start + i_local
    m_row = (i_token < i_end) & (i_local < P.bias)
    i_key = i_new + i_start + to_position
    m_key = (i_key >= 0) & (i_key < i_limit) & (i_new < P.bias)
    p_tables += ((i_batch if P.tables == 2 else 0) * requests + i_request).to(tl.int64) * table_width
    i_page = tl.load(p_tables + i_key // P.page_size, mask=m_key, other=-1)
    m_key = m_key & (i_page >= 0) & (i_page < pages)
    i_slot = i_key % P.page_size
    i_position = (i_token + to_position)[:, None]
    b_bias = load_bias(p_bias, i_batch, i_request, i_local[:, None], i_new[None, :], P)
    m_seen = is_seen(m_key[None, :], m_row[:, None], i_key[None, :], i_position, b_bias, P)
    p_key += i_batch.to(tl.int64) * P.key_batch
    p_value += i_batch.to(tl.int64) * P.value_batch + P.first_value
    b_acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for i_head in range(P.heads):
        i_key_head = i_head // (P.heads // P.key_heads)
        o_key = i_page.to(tl.int64) * P.key_page + i_slot * P.key_token + i_key_head * P.key_head
        o_value = i_page.to(tl.int64) * P.value_page + i_slot * P.value_token + i_key_head * P.value_head
        b_key, b_lost = finite_rows(load_rows(p_key, o_key, m_key, P.width, BLOCK_D, DTYPE), 1)
        b_value, b_lost_value = finite_rows(load_rows(p_value, o_value, m_key, P.channels, BLOCK_V, DTYPE), 1)
        o_head = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head
        b_query = load_heads(p_query, o_head, m_row, P.width, BLOCK_D, DTYPE)
        b_grad = load_heads(p_grad, o_head, m_row, P.channels, BLOCK_V, DTYPE)
        b_lse = load_lse(p_lse, o_head, m_row)
        b_mean = tl.load(p_mean + o_head, mask=m_row, other=0.0)
        b_slope = load_slopes(p_slopes, i_batch, i_head + tl.zeros([BLOCK_M], tl.int32), m_row, P)
        b_factor, b_value_scale = scales_of(p_key_scale, p_value_scale, i_batch, i_key_head, P)
        b_raw = tl.dot(b_query, tl.trans(b_key), input_precision=P.precision) + (b_lost + b_lost_value)[None, :]
        b_weight, _ = weights_of(
            b_raw, b_lse[:, None], b_slope[:, None], b_bias, i_key[None, :], i_position, m_seen, b_factor, P
        )
        b_product = tl.dot(b_grad, tl.trans(b_value), input_precision=P.precision)
        b_acc += tl.where(m_seen, b_weight * (b_value_scale * b_product - b_mean[:, None]), 0.0)
    p_tile = p_out + (i_batch * requests + i_request).to(tl.int64) * P.bias * P.bias
    m_tile = (i_local < P.bias)[:, None] & (i_new < P.bias)[None, :]
    tl.store(p_tile + i_local[:, None] * P.bias + i_new[None, :], b_acc, mask=m_tile)
