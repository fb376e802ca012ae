"""The walks over the chunks of a sequence: the state forwards, its gradient backwards. One program per sequence, segment, head and
block of channels of value, with its part of the state in registers.

With the state S before a chunk, keys and queries under their decays, and T the inverse that `prepare` made:
`delta = T (v - read_key S)`, `out = read_query S + scores delta`, and S after the chunk is `decay S + write_key^T delta`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.tiles import (
    READ_KEY,
    READ_QUERY,
    WRITE_KEY,
    first_token,
    load_state,
    narrow,
    numbers_of,
    product,
    sequence_of,
    square_of,
    store_state,
    total_of,
)
from ejkernel_triton.linear_recurrence.tiles import load_tile, store_tile


@triton.jit
def chunk_decay(p_rows, p_totals, i_square, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr):
    """The decay of the state over a chunk `[BLOCK_K, 1]`."""
    if R.decay == "channel":
        o_row = tl.arange(0, BLOCK_K)
        p_total = p_totals + i_square.to(tl.int64) * R.width + o_row
        b_total = tl.load(p_total, mask=o_row < R.width, other=0.0)[:, None]
    else:
        b_total = tl.full([1, 1], 0.0, tl.float32) + total_of(p_rows, i_square, CHUNK)
    return tl.exp2(b_total)


@triton.jit
def program_of(members, BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, R: tl.constexpr):
    """Block of channels, head, segment, sequence and member of the batch of this program."""
    i_rest = tl.program_id(0) // (BLOCKS * R.heads)
    i_segment = i_rest % SEGMENTS
    i_rest = i_rest // SEGMENTS
    return tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % R.heads, i_segment, i_rest % members, i_rest // members


@triton.jit
def chunks_of_segment(begin, end, i_segment, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr):
    """The first chunk of a segment of a sequence, and the one after its last."""
    first, last = 0, tl.cdiv(end - begin, CHUNK)
    if SEGMENTS > 1:
        share = tl.cdiv(last, SEGMENTS)
        first = tl.minimum(i_segment * share, last)
        last = tl.minimum(first + share, last)
    return first, last


@triton.jit
def chunk_delta(
    b_before, p_read_key, p_value, p_inverse, p_rows, p_totals, i_token, i_square, i_head, i_column, rows, R: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WHOLE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The deltas of a chunk `[CHUNK, BLOCK_V]`, and what `state_after` takes besides. Without VALUES, values are 0."""
    BY_CHANNEL: tl.constexpr = R.decay == "channel"
    KEY_HEADS: tl.constexpr = R.heads if BY_CHANNEL else R.key_heads
    b_decay, b_write_scale = 0.0, 0.0
    if R.decay != "none":
        b_decay = chunk_decay(p_rows, p_totals, i_square, CHUNK, BLOCK_K, R)
    if not BY_CHANNEL:
        b_key_scale = tl.load(numbers_of(p_rows, i_square, READ_KEY, CHUNK))[:, None]
        b_write_scale = tl.load(numbers_of(p_rows, i_square, WRITE_KEY, CHUNK))[:, None]
    b_key = load_tile(p_read_key, i_token, i_head, 0, rows, KEY_HEADS, R.width, BLOCK_K, CHUNK, WHOLE, R)
    b_value = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    if VALUES:
        b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
    b_inverse = tl.load(square_of(p_inverse, i_square, CHUNK))
    b_read = product(b_key, b_before, R)
    if not BY_CHANNEL:
        b_read *= b_key_scale
    b_delta = product(b_inverse, b_value.to(tl.float32) - b_read, R)
    return b_delta, b_key, b_write_scale, b_decay


@triton.jit
def state_after(
    b_state, b_delta, b_key, b_write_scale, b_decay, p_write_key, i_token, i_head, rows, R: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The state after a chunk."""
    if R.decay == "channel":
        b_key = load_tile(p_write_key, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
    else:
        b_delta *= b_write_scale
    if R.decay != "none":
        b_state *= b_decay
    return b_state + product(tl.trans(b_key), b_delta, R)


@triton.jit
def state_scan_kernel(
    p_query,
    p_read_key,
    p_write_key,
    p_value,
    p_inverse,
    p_scores,
    p_rows,
    p_totals,
    p_initial,
    p_bounds,
    p_first,
    length,
    chunks,
    sequences,
    p_out,
    p_delta,
    p_states,
    p_final,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    INITIAL: tl.constexpr,
    OUT: tl.constexpr,
    KEEP: tl.constexpr,
    FINAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """OUT: outputs are wanted. KEEP: deltas and the states before chunks are. FINAL: the states after sequences are. Initial states
    are those before SEGMENTS segments of each sequence."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    BY_CHANNEL: tl.constexpr = R.decay == "channel"
    QUERY_HEADS: tl.constexpr = R.heads if BY_CHANNEL else R.query_heads
    members = sequences + 1 if R.packed else sequences
    i_block, i_head, i_segment, i_sequence, i_batch = program_of(members, BLOCKS, SEGMENTS, R)
    i_column = i_block * BLOCK_V
    begin, end, i_chunk = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_chunk += i_batch * chunks
    i_member = i_batch.to(tl.int64) * length
    first, last = chunks_of_segment(begin, end, i_segment, CHUNK, SEGMENTS)
    if i_sequence < sequences:
        i_state = i_batch * sequences + i_sequence
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if INITIAL:
            i_given = i_state * SEGMENTS + i_segment
            b_state = load_state(p_initial, i_given, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
        for i_step in range(first, last):
            i_position = i_step * CHUNK
            rows = end - begin - i_position
            i_token = i_member + first_token(begin, end, i_position, R)
            i_square = (i_chunk + i_step) * R.heads + i_head
            if OUT and not BY_CHANNEL:
                b_query_scale = tl.load(numbers_of(p_rows, i_square, READ_QUERY, CHUNK))[:, None]
            b_before = narrow(b_state, R)
            if KEEP:
                store_state(p_states, b_before, i_chunk + i_step, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
            b_delta, b_key, b_write_scale, b_decay = chunk_delta(
                b_before, p_read_key, p_value, p_inverse, p_rows, p_totals, i_token, i_square, i_head, i_column, rows, R, CHUNK,
                BLOCK_K, BLOCK_V, WHOLE, True,
            )  # fmt: skip
            if KEEP:
                store_tile(p_delta, b_delta, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            if OUT:
                b_query = load_tile(p_query, i_token, i_head, 0, rows, QUERY_HEADS, R.width, BLOCK_K, CHUNK, WHOLE, R)
                b_scores = tl.load(square_of(p_scores, i_square, CHUNK))
                b_out = product(b_query, b_before, R)
                if not BY_CHANNEL:
                    b_out *= b_query_scale
                b_out += product(b_scores, b_delta, R)
                store_tile(p_out, b_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_state = state_after(
                b_state, b_delta, b_key, b_write_scale, b_decay, p_write_key, i_token, i_head, rows, R, CHUNK, BLOCK_K, WHOLE
            )
        if FINAL and i_segment == SEGMENTS - 1:
            store_state(p_final, b_state, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    elif OUT:
        b_zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for i_step in range(first, last):
            i_token = i_member + first_token(begin, end, i_step * CHUNK, R)
            rows = end - begin - i_step * CHUNK
            store_tile(p_out, b_zero, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)


@triton.jit
def state_scan_backward_kernel(
    p_query,
    p_read_key,
    p_write_key,
    p_d_out,
    p_inverse,
    p_scores,
    p_rows,
    p_totals,
    p_d_final,
    p_bounds,
    p_first,
    length,
    chunks,
    sequences,
    p_d_value,
    p_d_states,
    p_d_initial,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    KEEP: tl.constexpr,
    FINAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The gradients of values, and of the states after chunks and before sequences. FINAL: final states, those after SEGMENTS
    segments of each sequence, have gradients. Without KEEP only the gradients of the states before all segments but the first."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    BY_CHANNEL: tl.constexpr = R.decay == "channel"
    QUERY_HEADS: tl.constexpr = R.heads if BY_CHANNEL else R.query_heads
    KEY_HEADS: tl.constexpr = R.heads if BY_CHANNEL else R.key_heads
    members = sequences + 1 if R.packed else sequences
    i_block, i_head, i_segment, i_sequence, i_batch = program_of(members, BLOCKS, SEGMENTS, R)
    i_column = i_block * BLOCK_V
    begin, end, i_chunk = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_chunk += i_batch * chunks
    i_member = i_batch.to(tl.int64) * length
    first, last = chunks_of_segment(begin, end, i_segment, CHUNK, SEGMENTS)
    if i_sequence < sequences:
        i_state = i_batch * sequences + i_sequence
        i_given = i_state * SEGMENTS + i_segment
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if FINAL:
            b_state = load_state(p_d_final, i_given, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
        if not KEEP:
            last = tl.where(i_segment == 0, first, last)
        for i_back in range(last - first):
            i_step = last - 1 - i_back
            i_position = i_step * CHUNK
            rows = end - begin - i_position
            i_token = i_member + first_token(begin, end, i_position, R)
            i_square = (i_chunk + i_step) * R.heads + i_head
            if R.decay != "none":
                b_decay = chunk_decay(p_rows, p_totals, i_square, CHUNK, BLOCK_K, R)
            if not BY_CHANNEL:
                b_key_scale = tl.load(numbers_of(p_rows, i_square, READ_KEY, CHUNK))[:, None]
                b_write_scale = tl.load(numbers_of(p_rows, i_square, WRITE_KEY, CHUNK))[:, None]
                b_query_scale = tl.load(numbers_of(p_rows, i_square, READ_QUERY, CHUNK))[:, None]
            b_key = load_tile(p_write_key, i_token, i_head, 0, rows, KEY_HEADS, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_query = load_tile(p_query, i_token, i_head, 0, rows, QUERY_HEADS, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_inverse = tl.load(square_of(p_inverse, i_square, CHUNK))
            b_scores = tl.load(square_of(p_scores, i_square, CHUNK))
            b_after = narrow(b_state, R)
            if KEEP:
                store_state(p_d_states, b_after, i_chunk + i_step, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
            b_d_delta = product(b_key, b_after, R)  # [CHUNK, BLOCK_V]
            if not BY_CHANNEL:
                b_d_delta *= b_write_scale
            b_d_delta += product(tl.trans(b_scores), b_d_out, R)
            b_d_value = product(tl.trans(b_inverse), b_d_delta, R)
            if KEEP:
                store_tile(p_d_value, b_d_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            if BY_CHANNEL:
                b_key = load_tile(p_read_key, i_token, i_head, 0, rows, KEY_HEADS, R.width, BLOCK_K, CHUNK, WHOLE, R)
            else:
                b_d_value *= b_key_scale
                b_d_out = b_d_out.to(tl.float32) * b_query_scale
            if R.decay != "none":
                b_state *= b_decay
            b_state += product(tl.trans(b_query), b_d_out, R)
            b_state -= product(tl.trans(b_key), b_d_value, R)
        if not KEEP:
            store_state(p_d_initial, b_state, i_given, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        elif i_segment == 0:
            store_state(p_d_initial, b_state, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    elif KEEP:
        b_zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for i_step in range(first, last):
            i_token = i_member + first_token(begin, end, i_step * CHUNK, R)
            rows = end - begin - i_step * CHUNK
            store_tile(p_d_value, b_zero, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
