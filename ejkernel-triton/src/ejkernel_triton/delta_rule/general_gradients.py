"""The gradients of a chunk's tokens in the general form, from the states around it.

Each array stands in products with a decay: `exp(sum up to its token)` where a query reads, the sum up to the token before where b
does, one by the first where keys and a are written. So the gradient of the sum of log decays up to a token is `query . d_query -
key . d_key - a . d_a` of that token and `b . d_b` of the next, and that of one log decay is the sum of these from its token on.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.general_tiles import exponents_before, through_scores
from ejkernel_triton.delta_rule.prepare import channel_sums
from ejkernel_triton.delta_rule.tiles import chunk_of, load_state, log_tile, narrow, product, square_of
from ejkernel_triton.linear_recurrence.tiles import MIN_LOG, load_tile, select_sums, store_tile


@triton.jit
def general_value_kernel(
    p_write_key,
    p_write_a,
    p_d_out,
    p_d_states,
    p_inverse,
    p_scores_key,
    p_scores_a,
    p_reads_key,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_value,
    p_d_read,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The gradients of values, and of what b reads before the inverse. One program per chunk, head and block of channels."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_chunk = tl.program_id(0) // (BLOCKS * R.heads) % chunks
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // chunks
    i_column = i_block * BLOCK_V
    i_token, count, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    i_chunk += i_batch * chunks
    i_square = i_chunk * R.heads + i_head
    if rows > 0:
        b_key = load_tile(p_write_key, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_a = load_tile(p_write_a, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
        b_d_state = load_state(p_d_states, i_chunk, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        b_scores_a = tl.load(square_of(p_scores_a, i_square, CHUNK))
        b_d_held = product(b_a, b_d_state, R) + product(tl.trans(b_scores_a), b_d_out, R)
        b_inverse = tl.load(square_of(p_inverse, i_square, CHUNK))
        b_d_read = product(tl.trans(b_inverse), b_d_held, R)
        store_tile(p_d_read, b_d_read, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
        b_scores_key = tl.load(square_of(p_scores_key, i_square, CHUNK))
        b_d_value = product(b_key, b_d_state, R) + product(tl.trans(b_scores_key), b_d_out, R)
        b_d_value += product(tl.trans(tl.load(square_of(p_reads_key, i_square, CHUNK))), b_d_read, R)
        store_tile(p_d_value, b_d_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
    else:
        b_zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        store_tile(p_d_value, b_zero, i_token, i_head, i_column, count, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)


@triton.jit
def general_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_decay,
    p_a,
    p_b,
    p_d_out,
    p_d_read,
    p_reads,
    p_states,
    p_d_states,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_query,
    p_d_key,
    p_d_a,
    p_d_b,
    p_d_decay,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One program per chunk, head and block of channels of key."""
    BLOCKS: tl.constexpr = (R.width + BLOCK_K - 1) // BLOCK_K
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_chunk = tl.program_id(0) // (BLOCKS * R.heads) % chunks
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // chunks
    i_row = i_block * BLOCK_K
    i_token, count, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    i_chunk += i_batch * chunks
    o_row = tl.arange(0, CHUNK)
    if rows > 0:
        b_d_scores_key, b_d_scores_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_d_reads_key, b_d_reads_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_d_query, b_d_key = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK, BLOCK_K], tl.float32)
        b_d_a, b_d_b = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK, BLOCK_K], tl.float32)
        b_last = tl.zeros([BLOCK_K], tl.float32)
        for i_column in range(0, R.channels, BLOCK_V):
            b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_reads = load_tile(p_reads, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_d_read = load_tile(p_d_read, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_state = load_state(p_states, i_chunk, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
            b_d_state = load_state(p_d_states, i_chunk, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
            b_d_scores_key += product(b_d_out, tl.trans(b_value), R)  # [CHUNK, CHUNK]
            b_d_scores_a += product(b_d_out, tl.trans(b_reads), R)
            b_d_reads_key += product(b_d_read, tl.trans(b_value), R)
            b_d_reads_a += product(b_d_read, tl.trans(b_reads), R)
            b_d_query += product(b_d_out, tl.trans(b_state), R)  # [CHUNK, BLOCK_K]
            b_d_b += product(b_d_read, tl.trans(b_state), R)
            b_d_key += product(b_value, tl.trans(b_d_state), R)
            b_d_a += product(b_reads, tl.trans(b_d_state), R)
            b_last += tl.sum(b_state.to(tl.float32) * b_d_state.to(tl.float32), axis=1)
        m_past, m_earlier = o_row[:, None] >= o_row[None, :], o_row[:, None] > o_row[None, :]
        b_d_scores_key, b_d_scores_a = tl.where(m_past, b_d_scores_key, 0.0), tl.where(m_past, b_d_scores_a, 0.0)
        b_d_reads_key, b_d_reads_a = tl.where(m_earlier, b_d_reads_key, 0.0), tl.where(m_earlier, b_d_reads_a, 0.0)
        b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_a = load_tile(p_a, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_b = load_tile(p_b, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_query, b_key, b_a, b_b = b_query.to(tl.float32), b_key.to(tl.float32), b_a.to(tl.float32), b_b.to(tl.float32)
        b_log = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
        b_up_to, b_after = channel_sums(b_log, CHUNK, R)
        b_after = tl.exp2(b_after)
        b_d_query *= tl.exp2(b_up_to)
        b_d_b *= tl.exp2(exponents_before(b_log, b_up_to, CHUNK, R))
        b_d_key *= b_after
        b_d_a *= b_after
        b_last *= tl.sum(tl.where((o_row == CHUNK - 1)[:, None], tl.exp2(b_up_to), 0.0), axis=0)
        b_last += tl.sum(b_key * b_d_key + b_a * b_d_a, axis=0)
        b_d_query, b_d_key, b_d_a, b_d_b = through_scores(
            b_d_query, b_d_key, b_d_a, b_d_b, narrow(b_d_scores_key, R), narrow(b_d_scores_a, R), narrow(b_d_reads_key, R),
            narrow(b_d_reads_a, R), b_query, b_key, b_a, b_b, b_log, b_up_to, CHUNK, LEVELS, R,
        )  # fmt: skip
        store_tile(p_d_query, b_d_query, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_key, b_d_key, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_a, b_d_a, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_b, b_d_b, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_from = tl.where(o_row[:, None] <= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
        b_later = tl.where(o_row[:, None] < o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
        b_d_log = select_sums(b_from, b_query * b_d_query - b_key * b_d_key - b_a * b_d_a, False)
        b_d_log += select_sums(b_later, b_b * b_d_b, False) + b_last[None, :]
        b_d_log = tl.where(b_log > MIN_LOG, b_d_log, 0.0)
        store_tile(p_d_decay, b_d_log, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
    else:
        b_zero = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        store_tile(p_d_query, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_key, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_a, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_b, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_decay, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
