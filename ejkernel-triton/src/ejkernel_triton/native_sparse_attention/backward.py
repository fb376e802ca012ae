"""The gradient kernels: of queries over their lists of blocks, as forward; of keys and values over the visits of a tile of keys.

Weights are recomputed from lse. Nothing is summed with atomics: partial sums of a tile's chunks are added in order.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton.native_sparse_attention.tiles import LOG2E, load_tile, query_of, steps_of, store_tile, tokens_of


@triton.jit
def native_sparse_attention_query_gradient_kernel(
    p_query, p_key, p_value, p_blocks, p_starts, p_out, p_lse, p_dout, p_dlse, length,
    p_dquery, p_shift, p_delta, P: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Also, of every query `[b, t, h]`: shift and delta of `weight = exp2(logit - shift)`, `d_logit = weight * (d_out . value -
    delta)`. The shift is NaN where the query or d_out is not finite."""
    i_batch, i_query, i_head, i_first = query_of(length, P)
    o_tokens = i_batch.to(tl.int64) * length
    o_row = i_first + tl.arange(0, P.block_g)  # heads of the group
    m_row = o_row < P.groups
    o_heads = (o_tokens + i_query) * P.heads + i_head * P.groups
    b_query = load_tile(p_query + o_heads * P.size, o_row, m_row, P.size, P.size, P.block_d)  # [block_g, block_d]
    b_dout = load_tile(p_dout + o_heads * P.value_size, o_row, m_row, P.value_size, P.value_size, P.block_v)
    b_out = load_tile(p_out + o_heads * P.value_size, o_row, m_row, P.value_size, P.value_size, P.block_v)
    b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), axis=1)
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + o_heads + o_row, mask=m_row, other=0.0)
    b_nonfinite = tl.sum(b_query.to(tl.float32) * 0.0, axis=1) + tl.sum(b_dout.to(tl.float32) * 0.0, axis=1)
    b_shift = tl.load(p_lse + o_heads + o_row, mask=m_row, other=0.0) * LOG2E + b_nonfinite
    tl.store(p_shift + o_heads + o_row, b_shift, mask=m_row)
    tl.store(p_delta + o_heads + o_row, b_delta, mask=m_row)
    p_keys = p_key + (o_tokens * P.key_heads + i_head) * P.size
    p_values = p_value + (o_tokens * P.key_heads + i_head) * P.value_size
    p_list = p_blocks + ((o_tokens + i_query) * P.key_heads + i_head) * P.slots
    i_start = 0
    if P.sequences > 0:
        i_start = tl.load(p_starts + (o_tokens if P.sequences == 2 else 0) + i_query)
    b_acc = tl.full([P.block_g, P.block_d], 0.0, tl.float32)
    first, end = steps_of(p_list, P)
    for step in range(first, end):
        i_token, m_token = tokens_of(p_list, step, i_query, i_start, P)
        o_token = i_token.to(tl.int64)
        b_key = load_tile(p_keys, o_token, m_token, P.key_heads * P.size, P.size, P.block_d)  # [block_k, block_d]
        b_value = load_tile(p_values, o_token, m_token, P.key_heads * P.value_size, P.value_size, P.block_v)
        b_logit = tl.dot(b_query, tl.trans(b_key), input_precision=P.precision) * (P.scale * LOG2E)
        b_weight = tl.exp2(b_logit - b_shift[:, None])  # [block_g, block_k]
        b_dweight = tl.dot(b_dout, tl.trans(b_value), input_precision=P.precision)
        b_dlogit = tl.where(m_token[None, :], b_weight * (b_dweight - b_delta[:, None]), 0.0)
        b_acc = tl.dot(b_dlogit.to(b_key.dtype), b_key, b_acc, input_precision=P.precision)
    store_tile(p_dquery + o_heads * P.size, b_acc * P.scale, o_row, m_row, P.size, P.size, P.block_d)


@triton.jit
def native_sparse_attention_key_gradient_kernel(
    p_query, p_key, p_value, p_dout, p_shift, p_delta, p_visits, p_block_starts, p_tile, p_begin, p_end, length, chunks, tiles,
    p_dkey, p_dvalue, P: tl.constexpr, ROWS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Partial sums `[rows, chunks, block_k, size]` over one chunk of a tile's visits: rows of a step are heads of some queries.

    INSIDE: every tile lies inside of the block of each visit.
    """
    i_chunk = tl.program_id(0).to(tl.int64)
    i_row = tl.program_id(0) // chunks
    i_tile = tl.load(p_tile + i_chunk)
    if i_tile >= tiles:
        return
    begin = tl.load(p_begin + i_chunk)
    rows = (tl.load(p_end + i_chunk) - begin) * P.groups
    i_head = i_row % P.key_heads
    o_tokens = (i_row // P.key_heads).to(tl.int64) * length
    o_key = tl.arange(0, P.block_k)
    i_token = i_tile * P.block_k + o_key
    m_token = i_token < length
    o_keys = (o_tokens + i_tile * P.block_k) * P.key_heads + i_head
    b_key = load_tile(p_key + o_keys * P.size, o_key, m_token, P.key_heads * P.size, P.size, P.block_d)
    b_value = load_tile(p_value + o_keys * P.value_size, o_key, m_token, P.key_heads * P.value_size, P.value_size, P.block_v)
    b_dkey = tl.full([P.block_k, P.block_d], 0.0, tl.float32)
    b_dvalue = tl.full([P.block_k, P.block_v], 0.0, tl.float32)
    p_visits += begin
    p_block_starts += begin
    p_shift += o_tokens * P.heads + i_head * P.groups
    p_delta += o_tokens * P.heads + i_head * P.groups
    p_query += (o_tokens * P.heads + i_head * P.groups) * P.size
    p_dout += (o_tokens * P.heads + i_head * P.groups) * P.value_size
    for step in range(0, rows, ROWS):
        o_row = step + tl.arange(0, ROWS)
        m_row = o_row < rows
        i_query = tl.load(p_visits + o_row // P.groups, mask=m_row, other=-1)
        o_query = i_query.to(tl.int64) * P.heads + o_row % P.groups
        b_shift = tl.load(p_shift + o_query, mask=m_row, other=0.0)
        b_delta = tl.load(p_delta + o_query, mask=m_row, other=0.0)
        # A row that is not finite counts as zeros with weights of NaN: keys that it does not see stay clean.
        m_finite = m_row & (b_shift == b_shift)
        b_query = load_tile(p_query, o_query, m_finite, P.size, P.size, P.block_d)  # [ROWS, block_d]
        b_dout = load_tile(p_dout, o_query, m_finite, P.value_size, P.value_size, P.block_v)
        m_seen = i_token[:, None] <= i_query[None, :]  # [block_k, ROWS]
        if not INSIDE:
            i_start = tl.load(p_block_starts + o_row // P.groups, mask=m_row, other=0) - i_row * (length + 1)
            m_seen &= (i_token[:, None] >= i_start[None, :]) & (i_token[:, None] < i_start[None, :] + P.block_size)
        b_logit = tl.dot(b_key, tl.trans(b_query), input_precision=P.precision) * (P.scale * LOG2E)
        b_weight = tl.where(m_seen, tl.exp2(b_logit - b_shift[None, :]), 0.0)
        b_dvalue = tl.dot(b_weight.to(b_dout.dtype), b_dout, b_dvalue, input_precision=P.precision)
        b_dweight = tl.dot(b_value, tl.trans(b_dout), input_precision=P.precision)
        b_dlogit = tl.where(m_seen, b_weight * (b_dweight - b_delta[None, :]), 0.0)
        b_dkey = tl.dot(b_dlogit.to(b_query.dtype), b_query, b_dkey, input_precision=P.precision)
    m_key = o_key < P.block_k
    p_dkey += i_chunk * P.block_k * P.size
    p_dvalue += i_chunk * P.block_k * P.value_size
    store_tile(p_dkey, b_dkey * P.scale, o_key, m_key, P.size, P.size, P.block_d)
    store_tile(p_dvalue, b_dvalue, o_key, m_key, P.value_size, P.value_size, P.block_v)


@triton.jit
def native_sparse_attention_combine_kernel(
    p_partial, p_up_to, length, chunks, tiles, p_sum,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Adds up the partial sums of a tile's chunks, `PART` of its keys in a program."""
    PARTS: tl.constexpr = KEYS // PART
    i_part = tl.program_id(0) % PARTS
    i_tile = tl.program_id(0) // PARTS % tiles
    i_row = tl.program_id(0) // PARTS // tiles
    p_up_to += i_row * tiles + i_tile
    end = tl.load(p_up_to)
    begin = tl.load(p_up_to - 1, mask=i_tile > 0, other=0)
    o_key = i_part * PART + tl.arange(0, PART)
    b_sum = tl.full([PART, BLOCK], 0.0, tl.float32)
    for i_chunk in range(begin, end):
        o_chunk = (i_row.to(tl.int64) * chunks + i_chunk) * KEYS
        b_sum += load_tile(p_partial + o_chunk * SIZE, o_key, o_key < KEYS, SIZE, SIZE, BLOCK)
    i_token = i_tile * KEYS + o_key
    o_sum = ((i_row // KEY_HEADS).to(tl.int64) * length * KEY_HEADS + i_row % KEY_HEADS) * SIZE
    store_tile(p_sum + o_sum, b_sum, i_token.to(tl.int64), i_token < length, KEY_HEADS * SIZE, SIZE, BLOCK)
