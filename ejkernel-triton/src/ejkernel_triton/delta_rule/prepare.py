"""What a chunk does to its own tokens, before any state is known. One program per chunk and head.

With A what a token takes of earlier ones, `A_ij = beta_j (k_i . k_j) exp(decay from j to i)`: the inverse of `I + A`, and the
scores `scale beta_j (q_i . k_j) exp(decay from j to i)`. beta stands with the token that is written.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.tiles import (
    COARSE,
    FINE,
    KEY_LENGTH,
    QUERY_LENGTH,
    READ_KEY,
    READ_QUERY,
    SHORTEST,
    WRITE_KEY,
    beta_of,
    chunk_of,
    inverse_length,
    log_sums,
    log_tile,
    narrow,
    numbers_of,
    pair_decays,
    product,
    square_of,
    squares_of,
    unit_lower_inverse,
)
from ejkernel_triton.linear_recurrence.tiles import (
    LOG2_E,
    level_decays,
    level_pairs,
    load_tile,
    mild_exponents,
    select_sums,
    store_tile,
)


@triton.jit
def lengths_of(
    p_query, p_key, i_token, i_head, rows, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr
):
    """One by the lengths of a chunk's queries and keys, or ones."""
    WIDTH: tl.constexpr = R.width
    b_query_length = tl.full([CHUNK], 1.0, tl.float32)
    b_key_length = b_query_length
    if R.normalised:
        b_query_sum, b_key_sum = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for i_row in tl.static_range(0, WIDTH, BLOCK_K):
            b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.query_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.key_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_query_sum += squares_of(b_query, 1)
            b_key_sum += squares_of(b_key, 1)
        b_query_length, b_key_length = inverse_length(b_query_sum), inverse_length(b_key_sum)
    return b_query_length, b_key_length


@triton.jit
def prepare_kernel(
    p_query,
    p_key,
    p_beta,
    p_decay,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_inverse,
    p_scores,
    p_rows,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Decays per head, or none. The numbers of each token are kept for the kernels that follow."""
    WIDTH: tl.constexpr = R.width
    i_head = tl.program_id(0) % R.heads
    i_chunk = tl.program_id(0) // R.heads % chunks
    i_batch = tl.program_id(0) // R.heads // chunks
    i_square = (i_batch * chunks + i_chunk) * R.heads + i_head
    i_token, _, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    if rows > 0:
        o_row = tl.arange(0, CHUNK)
        b_keys, b_scores = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_query_sum, b_key_sum = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for i_row in tl.static_range(0, WIDTH, BLOCK_K):
            b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.query_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.key_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_keys += product(b_key, tl.trans(b_key), R)  # [CHUNK, CHUNK]
            b_scores += product(b_query, tl.trans(b_key), R)
            if R.normalised:
                b_query_sum += squares_of(b_query, 1)
                b_key_sum += squares_of(b_key, 1)
        b_write = beta_of(p_beta, i_token, i_head, rows, CHUNK, R)
        b_read_key = tl.full([CHUNK], 1.0, tl.float32)
        b_read_query = tl.full([CHUNK], R.scale, tl.float32)
        large = False
        if R.normalised:
            b_query_length, b_key_length = inverse_length(b_query_sum), inverse_length(b_key_sum)
            large = tl.min(tl.minimum(b_query_length, b_key_length), axis=0) < SHORTEST
            tl.store(numbers_of(p_rows, i_square, QUERY_LENGTH, CHUNK), b_query_length)
            tl.store(numbers_of(p_rows, i_square, KEY_LENGTH, CHUNK), b_key_length)
            b_read_key *= b_key_length
            b_read_query *= b_query_length
            b_write *= b_key_length
        if large:  # products of rows may have overflowed
            b_keys, b_scores = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
            for i_part in range(0, WIDTH, 16):
                b_left = load_tile(p_query, i_token, i_head, i_part, rows, R.query_heads, R.width, 16, CHUNK, WHOLE, R)
                b_right = load_tile(p_key, i_token, i_head, i_part, rows, R.key_heads, R.width, 16, CHUNK, WHOLE, R)
                b_left = b_left.to(tl.float32) * b_read_query[:, None]
                b_right = b_right.to(tl.float32) * b_read_key[:, None]
                b_keys += product(b_right, tl.trans(b_right), R)
                b_scores += product(b_left, tl.trans(b_right), R)
            b_beta = beta_of(p_beta, i_token, i_head, rows, CHUNK, R)[None, :]
            b_keys, b_scores = b_keys * b_beta, b_scores * b_beta
        else:
            b_keys *= b_read_key[:, None] * b_write[None, :]
            b_scores *= b_read_query[:, None] * b_write[None, :]
        if R.decay == "scalar":
            b_coarse, b_fine, b_after = log_sums(p_decay, i_token, i_head, rows, CHUNK, R)
            tl.store(numbers_of(p_rows, i_square, COARSE, CHUNK), b_coarse)
            tl.store(numbers_of(p_rows, i_square, FINE, CHUNK), b_fine)
            b_decay = pair_decays(b_coarse, b_fine, CHUNK)
            b_keys *= b_decay
            b_scores *= b_decay
            b_up_to = tl.exp2(b_coarse + b_fine)
            b_read_key *= b_up_to
            b_read_query *= b_up_to
            b_write *= tl.exp2(b_after)
        tl.store(numbers_of(p_rows, i_square, READ_KEY, CHUNK), b_read_key)
        tl.store(numbers_of(p_rows, i_square, WRITE_KEY, CHUNK), b_write)
        tl.store(numbers_of(p_rows, i_square, READ_QUERY, CHUNK), b_read_query)
        b_scores = tl.where(o_row[:, None] >= o_row[None, :], b_scores, 0.0)
        tl.store(square_of(p_scores, i_square, CHUNK), b_scores.to(p_scores.dtype.element_ty))
        b_keys = tl.where(o_row[:, None] > o_row[None, :], b_keys, 0.0)
        b_inverse = unit_lower_inverse(b_keys, CHUNK, LEVELS, R)
        tl.store(square_of(p_inverse, i_square, CHUNK), b_inverse.to(p_inverse.dtype.element_ty))


@triton.jit
def channel_sums(b_log, CHUNK: tl.constexpr, R: tl.constexpr):
    """Exponents `[CHUNK, BLOCK]` of the decays up to each token and after it, from natural log decays."""
    o_row = tl.arange(0, CHUNK)
    m_up_to = o_row[:, None] >= o_row[None, :]
    b_up_to = select_sums(tl.where(m_up_to, 1.0, 0.0).to(tl.bfloat16), b_log, R.exact_logs) * LOG2_E
    if R.bfloat16:
        b_after = tl.sum(b_log, axis=0)[None, :] * LOG2_E - b_up_to
        b_after = tl.where(b_after < 0.0, b_after, 0.0)
    else:
        b_after = select_sums(tl.where(m_up_to, 0.0, 1.0).to(tl.bfloat16), b_log, R.exact_logs) * LOG2_E
    return b_up_to, b_after


@triton.jit
def prepare_channels_kernel(
    p_query,
    p_key,
    p_beta,
    p_decay,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_inverse,
    p_scores,
    p_read_key,
    p_write_key,
    p_read_query,
    p_totals,
    p_rows,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Decays per channel. Queries and keys are kept under the decays between them and the edges of the chunk."""
    i_head = tl.program_id(0) % R.heads
    i_chunk = tl.program_id(0) // R.heads % chunks
    i_batch = tl.program_id(0) // R.heads // chunks
    i_square = (i_batch * chunks + i_chunk) * R.heads + i_head
    i_token, _, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    if rows > 0:
        o_row = tl.arange(0, CHUNK)
        b_keys, b_scores = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_write = beta_of(p_beta, i_token, i_head, rows, CHUNK, R)
        b_query_length, b_key_length = lengths_of(p_query, p_key, i_token, i_head, rows, BLOCK_K, CHUNK, WHOLE, R)
        if R.normalised:
            tl.store(numbers_of(p_rows, i_square, QUERY_LENGTH, CHUNK), b_query_length)
            tl.store(numbers_of(p_rows, i_square, KEY_LENGTH, CHUNK), b_key_length)
        for i_row in range(0, R.width, BLOCK_K):
            b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.query_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.key_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_query = b_query.to(tl.float32) * b_query_length[:, None]
            b_key = b_key.to(tl.float32) * b_key_length[:, None]
            b_log = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
            b_up_to, b_after = channel_sums(b_log, CHUNK, R)
            b_factor = tl.exp2(b_up_to)
            b_tile = b_query * b_factor * R.scale
            store_tile(p_read_query, b_tile, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_tile = b_key * b_factor
            store_tile(p_read_key, b_tile, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_tile = b_key * tl.exp2(b_after) * b_write[:, None]
            store_tile(p_write_key, b_tile, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            o_column = i_row + tl.arange(0, BLOCK_K)
            p_total = p_totals + i_square.to(tl.int64) * R.width + o_column
            tl.store(p_total, tl.sum(b_log, axis=0) * LOG2_E, mask=o_column < R.width)
            b_start, m_mild = mild_exponents(b_up_to)
            b_factor = tl.exp2(b_start)
            b_right = narrow(b_key * tl.exp2(-b_start), R)
            b_keys += tl.where(m_mild[:, None], product(b_key * b_factor, tl.trans(b_right), R), 0.0)
            b_scores += tl.where(m_mild[:, None], product(b_query * b_factor, tl.trans(b_right), R), 0.0)
            if tl.sum(m_mild.to(tl.int32), axis=0) < CHUNK:
                m_strong = (m_mild == 0)[:, None]
                b_pairs = product(b_query, tl.trans(b_key), R)
                b_scores += tl.where((o_row[:, None] == o_row[None, :]) & m_strong, b_pairs, 0.0)
                for i_level in range(LEVELS):
                    b_factor = level_decays(b_log, i_level, CHUNK, R)
                    m_pairs = level_pairs(i_level, CHUNK, False) & m_strong
                    b_right = narrow(b_key * b_factor, R)
                    b_keys += tl.where(m_pairs, product(b_right, tl.trans(b_right), R), 0.0)
                    b_scores += tl.where(m_pairs, product(b_query * b_factor, tl.trans(b_right), R), 0.0)
        b_scores *= (b_write * R.scale)[None, :]
        b_scores = tl.where(o_row[:, None] >= o_row[None, :], b_scores, 0.0)
        tl.store(square_of(p_scores, i_square, CHUNK), b_scores.to(p_scores.dtype.element_ty))
        b_keys *= b_write[None, :]
        b_keys = tl.where(o_row[:, None] > o_row[None, :], b_keys, 0.0)
        b_inverse = unit_lower_inverse(b_keys, CHUNK, LEVELS, R)
        tl.store(square_of(p_inverse, i_square, CHUNK), b_inverse.to(p_inverse.dtype.element_ty))
