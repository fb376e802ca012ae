"""The backward phase: first the tiles of queries, then every page, for which a program goes through the requests that read it.

The pages of a request are found as `paged_attention` finds them, and summed in the order of the tables, by one program each.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._latents.gradients import add_to_keys, add_to_queries, load_key, load_lse, store_sums, weights_of
from ejkernel_triton._requests import count_up_to
from ejkernel_triton._stored import load_rows
from ejkernel_triton.paged_attention.backward import request_of


@triton.jit
def first_keys_of(p_first_keys, i_batch, i_token, i_position, m_row, P: tl.constexpr):
    """The first key that a row sees."""
    i_lower = tl.zeros(i_position.shape, tl.int32)
    if P.window > 0:
        i_lower = tl.maximum(i_lower, i_position - P.window + 1)
    if P.first_keys:
        i_lower = tl.maximum(i_lower, tl.load(p_first_keys + i_batch * P.first_keys_batch + i_token, mask=m_row, other=0))
    return i_lower


@triton.jit
def scales_of(p_key_scale, p_value_scale, i_batch, P: tl.constexpr):
    """Factors of logits and of values."""
    b_factor = P.scale * 1.0
    if P.key_scale:
        b_factor *= tl.load(p_key_scale + i_batch * P.key_scale_batch)
    b_value_scale = 1.0
    if P.value_scale:
        b_value_scale = tl.load(p_value_scale + i_batch * P.value_scale_batch)
    return b_factor, b_value_scale


@triton.jit
def load_query(
    p_query, p_query_rest, p_grad, o_row, m_row, P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Queries, what is beside them, and cotangents. [BLOCK_M, ...]"""
    b_query = load_rows(p_query, o_row * P.latent, m_row, P.latent, BLOCK_V, DTYPE)
    b_query_rest = b_query
    if P.rest > 0:
        b_query_rest = load_rows(p_query_rest, o_row * P.rest, m_row, P.rest, BLOCK_REST, DTYPE)
    return b_query, b_query_rest, load_rows(p_grad, o_row * P.latent, m_row, P.latent, BLOCK_V, DTYPE)


@triton.jit
def latent_query_gradient_kernel(
    p_query,
    p_query_rest,
    p_pages,
    p_starts,
    p_lengths,
    p_tables,
    p_tiles_up_to,
    p_first_keys,
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
    p_out_rest,
    p_mean_out,
    p_key_scale_out,
    p_value_scale_out,
    P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    SEARCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of a tile of TOKENS tokens and HEADS_OF_TILE heads, and for each of its rows what those of the scales sum.

    With a key scale the mean of the weights' gradients is formed first, from what p_mean holds of that of the log-sum-exp.
    """
    HEAD_TILES: tl.constexpr = (P.heads + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    i_head_tile = tl.program_id(0) % HEAD_TILES
    i_unit = (tl.program_id(0) // HEAD_TILES) % tiles
    i_batch = tl.program_id(0) // HEAD_TILES // tiles
    p_tiles_up_to += i_batch * requests if P.schedules == 2 else 0
    i_request = count_up_to(p_tiles_up_to, requests, i_unit, SEARCH)
    if i_request >= requests:
        return
    i_start, i_end, to_position, i_limit = request_of(p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P)
    i_first = i_start + (tl.load(p_tiles_up_to + i_request) - 1 - i_unit) * TOKENS  # tiles with the most keys first
    i_last = tl.minimum(i_first + TOKENS, i_end)
    i_row = tl.arange(0, BLOCK_M)
    i_token = i_first + i_row // HEADS_OF_TILE  # [BLOCK_M]
    i_head = i_head_tile * HEADS_OF_TILE + i_row % HEADS_OF_TILE  # [BLOCK_M]
    m_row = (i_token < i_last) & (i_row < TOKENS * HEADS_OF_TILE) & (i_head < P.heads)
    o_row = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head  # [BLOCK_M]
    i_position = i_token + to_position
    i_lower = first_keys_of(p_first_keys, i_batch, i_token, i_position, m_row, P)
    i_lowest = tl.min(tl.where(m_row, i_lower, 2147483647), axis=0)
    i_limit = tl.minimum(i_limit, i_last + to_position)

    b_query, b_query_rest, b_grad = load_query(p_query, p_query_rest, p_grad, o_row, m_row, P, BLOCK_V, BLOCK_REST, DTYPE)
    b_lse = load_lse(p_lse, o_row, m_row)
    b_mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
    b_factor, b_value_scale = scales_of(p_key_scale, p_value_scale, i_batch, P)
    p_pages += i_batch.to(tl.int64) * P.pages_batch
    p_tables += ((i_batch if P.tables == 2 else 0) * requests + i_request).to(tl.int64) * table_width
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_acc_rest = tl.zeros([BLOCK_M, BLOCK_REST], tl.float32)
    b_by_key_scale = tl.zeros([BLOCK_M], tl.float32)
    b_by_value_scale = tl.zeros([BLOCK_M], tl.float32)
    i_begin = tl.minimum(i_lowest, tl.maximum(i_limit, 0)) // BLOCK_K * BLOCK_K
    for PASS in tl.static_range(0 if P.key_scale else 1, 2):
        for i_from in tl.range(i_begin, i_limit, BLOCK_K, num_stages=STAGES):
            i_key = i_from + tl.arange(0, BLOCK_K)
            m_key = (i_key >= i_lowest) & (i_key < i_limit)
            i_page = tl.load(p_tables + i_key // P.page_size, mask=m_key, other=-1)  # [BLOCK_K]
            m_key = m_key & (i_page >= 0) & (i_page < pages)
            o_key = i_page.to(tl.int64) * (P.page_size * P.channels) + i_key % P.page_size * P.channels
            b_latent, b_rest, b_lost = load_key(p_pages, o_key, m_key, P.latent, P.rest, P.rest_at, BLOCK_V, BLOCK_REST, DTYPE)
            m_seen = (m_key[None, :] & m_row[:, None]) & (i_key[None, :] <= i_position[:, None])
            m_seen = m_seen & (i_key[None, :] >= i_lower[:, None])
            b_raw, b_weight, b_cap, b_product = weights_of(
                b_query, b_query_rest, b_grad, b_lse, b_latent, b_rest, b_lost, m_seen, b_factor, P
            )
            if PASS == 0:
                b_mean += tl.sum(tl.where(m_seen, b_weight * (b_value_scale * b_product), 0.0), axis=1)
            else:
                b_raw_grad = tl.where(m_seen, b_weight * (b_value_scale * b_product - b_mean[:, None]) * b_cap, 0.0)
                b_acc, b_acc_rest = add_to_queries(b_acc, b_acc_rest, b_raw_grad * b_factor, b_latent, b_rest, P)
                if P.key_scale:
                    b_by_key_scale += tl.sum(tl.where(m_seen, b_raw_grad * b_raw, 0.0), axis=1)
                if P.value_scale:
                    b_by_value_scale += tl.sum(tl.where(m_seen, b_weight * b_product, 0.0), axis=1)

    store_sums(p_out, o_row * P.latent, m_row, b_acc, P.latent)
    if P.rest > 0:
        store_sums(p_out_rest, o_row * P.rest, m_row, b_acc_rest, P.rest)
    if P.key_scale:
        tl.store(p_mean_out + o_row, b_mean, mask=m_row)
        tl.store(p_key_scale_out + o_row, b_by_key_scale * P.scale, mask=m_row)
    if P.value_scale:
        tl.store(p_value_scale_out + o_row, b_by_value_scale, mask=m_row)


@triton.jit
def latent_page_gradient_kernel(
    p_query,
    p_query_rest,
    p_pages,
    p_starts,
    p_lengths,
    p_entries,
    p_entries_up_to,
    p_first_keys,
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
    ENTRIES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of BLOCK_K tokens of a page, from all entries of block tables that name the page.

    ENTRIES: entries of all tables of a batch member, 0 where the batch shares them.
    """
    PARTS: tl.constexpr = (P.page_size + BLOCK_K - 1) // BLOCK_K
    HEAD_TILES: tl.constexpr = (P.heads + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    i_part = tl.program_id(0) % PARTS
    i_page = (tl.program_id(0) // PARTS) % pages
    i_batch = tl.program_id(0) // PARTS // pages
    i_slot = i_part * BLOCK_K + tl.arange(0, BLOCK_K)
    m_slot = i_slot < P.page_size
    i_row = tl.arange(0, BLOCK_M)
    p_entries_up_to += i_batch * (pages + 1) if ENTRIES > 0 else 0
    p_entries += i_batch.to(tl.int64) * ENTRIES
    i_entry_first = tl.load(p_entries_up_to + i_page)
    i_entry_last = tl.load(p_entries_up_to + i_page + 1)
    b_factor, b_value_scale = scales_of(p_key_scale, p_value_scale, i_batch, P)
    o_page = i_page.to(tl.int64) * (P.page_size * P.channels)
    p_pages += i_batch.to(tl.int64) * P.pages_batch + o_page
    b_acc = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    b_acc_rest = tl.zeros([BLOCK_REST, BLOCK_K], tl.float32)
    for i_entry in range(i_entry_first, i_entry_last):
        i_in_tables = tl.load(p_entries + i_entry)
        i_request = i_in_tables // table_width
        i_start, i_end, to_position, i_limit = request_of(
            p_starts, p_lengths, i_batch, i_request, tokens, requests, table_width, P
        )
        i_lowest = i_in_tables % table_width * P.page_size + i_part * BLOCK_K
        i_key = i_lowest + tl.arange(0, BLOCK_K)
        m_key = m_slot & (i_key < i_limit)
        b_latent, b_rest, b_lost = load_key(
            p_pages, i_slot * P.channels, m_key, P.latent, P.rest, P.rest_at, BLOCK_V, BLOCK_REST, DTYPE
        )
        i_from = tl.maximum(i_start, i_lowest - to_position)
        i_to = i_end
        if P.window > 0:
            i_to = tl.minimum(i_to, tl.minimum(i_lowest + BLOCK_K, i_limit) - 1 + P.window - to_position)
        if i_lowest >= i_limit:
            i_to = i_from
        for i_tile in tl.range(0, tl.cdiv(tl.maximum(i_to - i_from, 0), TOKENS) * HEAD_TILES, num_stages=STAGES):
            i_token = i_from + i_tile // HEAD_TILES * TOKENS + i_row // HEADS_OF_TILE  # [BLOCK_M]
            i_head = i_tile % HEAD_TILES * HEADS_OF_TILE + i_row % HEADS_OF_TILE
            m_row = (i_token < i_to) & (i_row < TOKENS * HEADS_OF_TILE) & (i_head < P.heads)
            o_row = (i_batch.to(tl.int64) * tokens + i_token) * P.heads + i_head
            i_position = i_token + to_position
            i_lower = first_keys_of(p_first_keys, i_batch, i_token, i_position, m_row, P)
            b_query, b_query_rest, b_grad = load_query(
                p_query, p_query_rest, p_grad, o_row, m_row, P, BLOCK_V, BLOCK_REST, DTYPE
            )
            b_lse = load_lse(p_lse, o_row, m_row)
            b_mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
            m_seen = (m_key[None, :] & m_row[:, None]) & (i_key[None, :] <= i_position[:, None])
            m_seen = m_seen & (i_key[None, :] >= i_lower[:, None])
            _, b_weight, b_cap, b_product = weights_of(
                b_query, b_query_rest, b_grad, b_lse, b_latent, b_rest, b_lost, m_seen, b_factor, P
            )
            b_raw_grad = tl.where(m_seen, b_weight * (b_value_scale * b_product - b_mean[:, None]) * b_cap, 0.0) * b_factor
            b_acc, b_acc_rest = add_to_keys(
                b_acc, b_acc_rest, b_raw_grad, b_weight * b_value_scale, b_query, b_query_rest, b_grad, P
            )
    p_out += i_batch.to(tl.int64) * pages * (P.page_size * P.channels) + o_page
    store_sums(p_out, i_slot * P.channels, m_slot, tl.trans(b_acc), P.latent)
    if P.rest > 0:
        store_sums(p_out + P.rest_at, i_slot * P.channels, m_slot, tl.trans(b_acc_rest), P.rest)
