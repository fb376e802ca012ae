"""The gradients of a chunk's tokens, from the states around it. One program per chunk, head and block of channels of key.

Each query and key stands in products with a decay: `exp(sum up to its token)` where it reads, one by that where a key is written.
So the gradient of the sum of log decays up to a token is `query . d_query + key . (d_read_key - d_write_key)`, and that of one log
decay is the sum of these from its token on. What differs are pairs within the chunk, whose factors are rounded alike and cancel;
what the chunk writes for later ones is summed over the tokens before the decay instead, and what is before the chunk for what is
after it stands apart, so that none is a difference of sums that were rounded apart.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.prepare import channel_sums
from ejkernel_triton.delta_rule.tiles import (
    COARSE,
    FINE,
    KEY_LENGTH,
    QUERY_LENGTH,
    READ_KEY,
    READ_QUERY,
    WRITE_KEY,
    beta_of,
    chunk_of,
    load_state,
    log_tile,
    narrow,
    numbers_of,
    pair_decays,
    product,
    total_of,
)
from ejkernel_triton.linear_recurrence.tiles import (
    MIN_LOG,
    level_decays,
    level_pairs,
    load_tile,
    mild_exponents,
    row_of,
    select_sums,
    store_tile,
)


@triton.jit
def through_length(b_gradient, b_tile, b_length):
    """The gradient of rows that are multiplied by one by their length, from that where the length is a constant."""
    b_tile *= b_length[:, None]
    return b_gradient - b_tile * tl.sum(b_gradient * b_tile, axis=1)[:, None]


@triton.jit
def power_of_two(b_tile):
    """The power of two below each number, which is positive."""
    return (b_tile.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def gradient_kernel(
    p_query,
    p_key,
    p_beta,
    p_decay,
    p_delta,
    p_d_out,
    p_d_value,
    p_states,
    p_d_states,
    p_rows,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_query,
    p_d_key,
    p_d_beta,
    p_d_decay,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """With blocks of channels, gradients of beta and of decays per head are of a block, and lengths of rows are constants."""
    BLOCKS: tl.constexpr = (R.width + BLOCK_K - 1) // BLOCK_K
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_chunk = tl.program_id(0) // (BLOCKS * R.heads) % chunks
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // chunks
    i_row = i_block * BLOCK_K
    i_token, count, rows = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK)
    i_token += i_batch.to(tl.int64) * length
    members = (tl.num_programs(0) // (BLOCKS * R.heads) // chunks).to(tl.int64)
    i_part = i_block * members * length + i_token  # the token in the gradients of this block
    i_chunk += i_batch * chunks
    i_square = i_chunk * R.heads + i_head
    o_row = tl.arange(0, CHUNK)
    if rows > 0:
        b_d_scores, b_d_keys = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        b_d_query = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        b_d_read = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        b_d_write = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        b_last = tl.zeros([BLOCK_K], tl.float32)
        for i_column in range(0, R.channels, BLOCK_V):
            b_delta = load_tile(p_delta, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_d_value = load_tile(p_d_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_state = load_state(p_states, i_chunk, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
            b_d_state = load_state(p_d_states, i_chunk, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
            b_d_scores += product(b_d_out, tl.trans(b_delta), R)  # [CHUNK, CHUNK]
            b_d_keys += product(b_d_value, tl.trans(b_delta), R)
            b_d_query += product(b_d_out, tl.trans(b_state), R)  # [CHUNK, BLOCK_K]
            b_d_read += product(b_d_value, tl.trans(b_state), R)
            b_d_write += product(b_delta, tl.trans(b_d_state), R)
            if R.decay != "none":
                b_last += tl.sum(b_state.to(tl.float32) * b_d_state.to(tl.float32), axis=1)
        b_query = load_tile(p_query, i_token, i_head, i_row, rows, R.query_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.key_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_beta = beta_of(p_beta, i_token, i_head, rows, CHUNK, R)
        b_query_length = tl.full([CHUNK], 1.0, tl.float32)
        b_key_length = b_query_length
        if R.normalised:
            b_query_length = tl.load(numbers_of(p_rows, i_square, QUERY_LENGTH, CHUNK))
            b_key_length = tl.load(numbers_of(p_rows, i_square, KEY_LENGTH, CHUNK))
        b_query_power, b_key_power = power_of_two(b_query_length), power_of_two(b_key_length)
        b_key_rest = b_key_length / b_key_power
        b_d_scores *= (b_query_length / b_query_power * R.scale)[:, None] * (b_beta * b_key_rest)[None, :]
        b_d_keys *= b_key_rest[:, None] * (b_beta * b_key_rest)[None, :]
        b_unit_query, b_unit_key = b_query, b_key
        if R.normalised:  # exact, and products of long or short rows do not leave the range of float32
            b_unit_query = narrow(b_query.to(tl.float32) * b_query_power[:, None], R)
            b_unit_key = narrow(b_key.to(tl.float32) * b_key_power[:, None], R)
        if R.decay == "scalar":
            b_coarse = tl.load(numbers_of(p_rows, i_square, COARSE, CHUNK))
            b_decay = pair_decays(b_coarse, tl.load(numbers_of(p_rows, i_square, FINE, CHUNK)), CHUNK)
            b_d_scores *= b_decay
            b_d_keys *= b_decay
        b_d_scores = narrow(tl.where(o_row[:, None] >= o_row[None, :], b_d_scores, 0.0), R)
        b_d_keys = narrow(tl.where(o_row[:, None] > o_row[None, :], -b_d_keys, 0.0), R)
        if R.decay == "channel":
            b_log = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
            b_up_to, b_after = channel_sums(b_log, CHUNK, R)
            b_factor = tl.exp2(b_up_to)
            b_d_query *= b_factor * (b_query_length * R.scale)[:, None]
            b_d_read *= b_factor * -b_key_length[:, None]
            b_d_write *= tl.exp2(b_after) * (b_beta * b_key_length)[:, None]
            b_last *= tl.sum(tl.where((o_row == CHUNK - 1)[:, None], b_factor, 0.0), axis=0)
            b_written_log = b_key.to(tl.float32) * b_d_write
            b_read_log = b_query.to(tl.float32) * b_d_query + b_key.to(tl.float32) * b_d_read
            b_start, m_mild = mild_exponents(b_up_to)
            b_factor, b_inverse = tl.exp2(b_start), tl.exp2(-b_start)
            b_left, b_right = narrow(b_unit_query * b_factor, R), narrow(b_unit_key * b_inverse, R)
            b_left_key = narrow(b_unit_key * b_factor, R)
            b_scores, b_keys = tl.where(m_mild[:, None], b_d_scores, 0.0), tl.where(m_mild[:, None], b_d_keys, 0.0)
            b_pairs, b_key_pairs = product(b_scores, b_right, R), product(b_keys, b_right, R)
            b_written = product(tl.trans(b_scores), b_left, R) + product(tl.trans(b_keys), b_left_key, R)
            b_d_query += b_factor * b_pairs * b_query_power[:, None]
            b_d_read += b_factor * b_key_pairs * b_key_power[:, None]
            b_d_write += b_inverse * b_written * b_key_power[:, None]
            b_read_log += b_left * b_pairs + b_left_key * b_key_pairs - b_right * b_written
            if tl.sum(m_mild.to(tl.int32), axis=0) < CHUNK:
                b_strong = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
                b_d_scores = tl.where(m_mild[:, None], 0.0, b_d_scores)
                b_d_keys = tl.where(m_mild[:, None], 0.0, b_d_keys)
                m_same = o_row[:, None] == o_row[None, :]
                b_same = tl.sum(tl.where(m_same, b_d_scores.to(tl.float32), 0.0), axis=1)[:, None]
                b_d_query += b_same * b_unit_key * b_query_power[:, None]
                b_d_write += b_same * b_unit_query * b_key_power[:, None]
                for i_level in range(LEVELS):
                    b_factor = level_decays(b_strong, i_level, CHUNK, R)
                    m_pairs = level_pairs(i_level, CHUNK, False)
                    b_scores = tl.where(m_pairs, b_d_scores, 0.0)
                    b_keys = tl.where(m_pairs, b_d_keys, 0.0)
                    b_left, b_right = narrow(b_unit_query * b_factor, R), narrow(b_unit_key * b_factor, R)
                    b_pairs, b_key_pairs = product(b_scores, b_right, R), product(b_keys, b_right, R)
                    b_written = product(tl.trans(b_scores), b_left, R) + product(tl.trans(b_keys), b_right, R)
                    b_d_query += b_factor * b_pairs * b_query_power[:, None]
                    b_d_read += b_factor * b_key_pairs * b_key_power[:, None]
                    b_d_write += b_factor * b_written * b_key_power[:, None]
                    b_read_log += b_left * b_pairs + b_right * (b_key_pairs - b_written)
        else:
            b_d_query *= tl.load(numbers_of(p_rows, i_square, READ_QUERY, CHUNK))[:, None]
            b_d_read *= -tl.load(numbers_of(p_rows, i_square, READ_KEY, CHUNK))[:, None]
            b_d_write *= tl.load(numbers_of(p_rows, i_square, WRITE_KEY, CHUNK))[:, None]
            if R.decay == "scalar":
                last = tl.sum(b_last, axis=0) * tl.exp2(total_of(p_rows, i_square, CHUNK))
                last += tl.sum(tl.sum(b_key.to(tl.float32) * b_d_write, axis=1), axis=0)
            b_d_query += product(b_d_scores, b_unit_key, R) * b_query_power[:, None]
            b_d_read += product(b_d_keys, b_unit_key, R) * b_key_power[:, None]
            b_written = product(tl.trans(b_d_scores), b_unit_query, R)
            b_d_write += (b_written + product(tl.trans(b_d_keys), b_unit_key, R)) * b_key_power[:, None]
        b_query, b_key = b_query.to(tl.float32), b_key.to(tl.float32)
        if R.beta_heads > 0:
            b_d_beta = tl.sum(b_key * b_d_write, axis=1) / b_beta
            tl.store(row_of(p_d_beta, i_part, i_head, R.heads, CHUNK, R), b_d_beta, mask=o_row < rows)
        if R.decay == "scalar":
            b_d_log = tl.sum(b_query * b_d_query + b_key * (b_d_read - b_d_write), axis=1)
            b_d_log = tl.cumsum(b_d_log, axis=0, reverse=True) + last
            p_row = row_of(p_decay, i_token, i_head, R.decay_heads, CHUNK, R)
            b_log = tl.load(p_row, mask=o_row < rows, other=0.0).to(tl.float32)
            b_d_log = tl.where(b_log < MIN_LOG, 0.0, b_d_log)
            tl.store(row_of(p_d_decay, i_part, i_head, R.heads, CHUNK, R), b_d_log, mask=o_row < rows)
        if R.decay == "channel":
            b_later = tl.where(o_row[:, None] <= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
            b_earlier = tl.where(o_row[:, None] > o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
            b_d_log = select_sums(b_later, b_read_log, False) + select_sums(b_earlier, b_written_log, False) + b_last[None, :]
            b_again = log_tile(p_decay, i_token, i_head, i_row, rows, BLOCK_K, CHUNK, WHOLE, R)
            b_d_log = tl.where(b_again > MIN_LOG, b_d_log, 0.0)
            store_tile(p_d_decay, b_d_log, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_d_key = b_d_read + b_d_write
        if R.normalised and BLOCKS == 1:
            b_d_query = through_length(b_d_query, b_query, b_query_length)
            b_d_key = through_length(b_d_key, b_key, b_key_length)
        store_tile(p_d_query, b_d_query, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_key, b_d_key, i_token, i_head, i_row, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
    else:
        b_zero = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        store_tile(p_d_query, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        store_tile(p_d_key, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_zero = tl.zeros([CHUNK], tl.float32)
        if R.beta_heads > 0:
            tl.store(row_of(p_d_beta, i_part, i_head, R.heads, CHUNK, R), b_zero, mask=o_row < count)
        if R.decay == "scalar":
            tl.store(row_of(p_d_decay, i_part, i_head, R.heads, CHUNK, R), b_zero, mask=o_row < count)
        if R.decay == "channel":
            b_zero = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            store_tile(p_d_decay, b_zero, i_token, i_head, i_row, count, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
