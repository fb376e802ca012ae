"""What a chunk of the general form does, before any state is known. One program per chunk and head.

With the scores of `general_tiles` and T the inverse of the identity minus those of b with a: what the tokens read of the state
through b is `T (b S + reads_key v)`. So a chunk is affine in the state S before it: that is `read S + held`, and the outputs are
`read_query S + out`, with matrices and terms that are made here.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.general_tiles import add_scores, exponents_before
from ejkernel_triton.delta_rule.prepare import channel_sums
from ejkernel_triton.delta_rule.tiles import chunk_of, log_tile, narrow, product, square_of, unit_lower_inverse
from ejkernel_triton.linear_recurrence.tiles import LOG2_E, load_tile, store_tile


@triton.jit
def general_prepare_kernel(
    p_query,
    p_key,
    p_value,
    p_decay,
    p_a,
    p_b,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_read,
    p_read_query,
    p_write_key,
    p_write_a,
    p_totals,
    p_held,
    p_out,
    p_inverse,
    p_scores_key,
    p_scores_a,
    p_reads_key,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """KEEP: the matrices of pairs are wanted, which the gradients take."""
    i_head = tl.program_id(0) % R.heads
    i_chunk = tl.program_id(0) // R.heads % chunks
    i_batch = tl.program_id(0) // R.heads // chunks
    i_square = (i_batch * chunks + i_chunk) * R.heads + i_head
    i_token, _, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    if rows > 0:
        o_row = tl.arange(0, CHUNK)
        b_scores_key, b_scores_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_reads_key, b_reads_a = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        for i_row in range(0, R.width, BLOCK_K):
            b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_a = load_tile(p_a, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_b = load_tile(p_b, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_query, b_key, b_a, b_b = b_query.to(tl.float32), b_key.to(tl.float32), b_a.to(tl.float32), b_b.to(tl.float32)
            b_log = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
            b_up_to, b_after = channel_sums(b_log, CHUNK, R)
            b_after = tl.exp2(b_after)
            store_tile(p_write_key, b_key * b_after, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            store_tile(p_write_a, b_a * b_after, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            o_column = i_row + tl.arange(0, BLOCK_K)
            p_total = p_totals + i_square.to(tl.int64) * R.width + o_column
            tl.store(p_total, tl.sum(b_log, axis=0) * LOG2_E, mask=o_column < R.width)
            b_scores_key, b_scores_a, b_reads_key, b_reads_a = add_scores(
                b_scores_key, b_scores_a, b_reads_key, b_reads_a, b_query, b_key, b_a, b_b, b_log, b_up_to, CHUNK, LEVELS, R
            )
        m_past, m_earlier = o_row[:, None] >= o_row[None, :], o_row[:, None] > o_row[None, :]
        b_reads_key = narrow(tl.where(m_earlier, b_reads_key, 0.0), R)
        b_scores_key, b_scores_a = tl.where(m_past, b_scores_key, 0.0), tl.where(m_past, b_scores_a, 0.0)
        b_scores_key, b_scores_a = narrow(b_scores_key, R), narrow(b_scores_a, R)
        b_inverse = unit_lower_inverse(tl.where(m_earlier, -b_reads_a, 0.0), CHUNK, LEVELS, R)
        b_inverse = narrow(b_inverse, R)
        if KEEP:
            tl.store(square_of(p_inverse, i_square, CHUNK), b_inverse)
            tl.store(square_of(p_scores_key, i_square, CHUNK), b_scores_key)
            tl.store(square_of(p_scores_a, i_square, CHUNK), b_scores_a)
            tl.store(square_of(p_reads_key, i_square, CHUNK), b_reads_key)
        for i_row in range(0, R.width, BLOCK_K):
            b_b = load_tile(p_b, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_log = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
            b_up_to, b_after = channel_sums(b_log, CHUNK, R)
            b_read = product(b_inverse, b_b * tl.exp2(exponents_before(b_log, b_up_to, CHUNK, R)), R)
            store_tile(p_read, b_read, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_read = b_query * tl.exp2(b_up_to) + product(b_scores_a, b_read, R)
            store_tile(p_read_query, b_read, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        for i_column in range(0, R.channels, BLOCK_V):
            b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_held = product(b_inverse, product(b_reads_key, b_value, R), R)
            store_tile(p_held, b_held, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_out = product(b_scores_key, b_value, R) + product(b_scores_a, b_held, R)
            store_tile(p_out, b_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
