"""The walks of the general form over the chunks of a sequence: the state forwards, its gradient backwards. One program per
sequence, head and block of channels of value, with its part of the state in registers; `general_prepare` says what a chunk does.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.state_scan import chunk_decay
from ejkernel_triton.delta_rule.tiles import first_token, load_state, narrow, product, sequence_of, store_state
from ejkernel_triton.linear_recurrence.tiles import load_tile, store_tile


@triton.jit
def general_scan_kernel(
    p_read,
    p_read_query,
    p_write_key,
    p_write_a,
    p_totals,
    p_held,
    p_inner,
    p_value,
    p_initial,
    p_bounds,
    p_first,
    length,
    chunks,
    sequences,
    p_out,
    p_reads,
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
):
    """OUT: outputs are wanted. KEEP: what is read through b, and states before chunks. FINAL: states after sequences."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    members = sequences + 1 if R.packed else sequences
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_sequence = tl.program_id(0) // (BLOCKS * R.heads) % members
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // members
    i_column = i_block * BLOCK_V
    begin, end, i_chunk = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_chunk += i_batch * chunks
    i_member = i_batch.to(tl.int64) * length
    if i_sequence < sequences:
        i_state = i_batch * sequences + i_sequence
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if INITIAL:
            b_state = load_state(p_initial, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
        for i_step in range(tl.cdiv(end - begin, CHUNK)):
            i_position = i_step * CHUNK
            rows = end - begin - i_position
            i_token = i_member + first_token(begin, end, i_position, R)
            b_decay = chunk_decay(p_totals, p_totals, (i_chunk + i_step) * R.heads + i_head, CHUNK, BLOCK_K, R)
            b_read = load_tile(p_read, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_key = load_tile(p_write_key, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_a = load_tile(p_write_a, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
            b_held = load_tile(p_held, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_before = narrow(b_state, R)
            b_held = b_held.to(tl.float32) + product(b_read, b_before, R)
            if KEEP:
                store_state(p_states, b_before, i_chunk + i_step, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
                store_tile(p_reads, b_held, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            if OUT:
                b_query = load_tile(p_read_query, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
                b_out = load_tile(p_inner, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
                b_out = b_out.to(tl.float32) + product(b_query, b_before, R)
                store_tile(p_out, b_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
            b_state = b_state * b_decay + product(tl.trans(b_key), b_value, R)
            b_state += product(tl.trans(b_a), b_held, R)
        if FINAL:
            store_state(p_final, b_state, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    elif OUT:
        b_zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for i_position in range(0, end - begin, CHUNK):
            i_token = i_member + first_token(begin, end, i_position, R)
            rows = end - begin - i_position
            store_tile(p_out, b_zero, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)


@triton.jit
def general_scan_backward_kernel(
    p_read,
    p_read_query,
    p_write_a,
    p_totals,
    p_d_out,
    p_d_final,
    p_bounds,
    p_first,
    length,
    chunks,
    sequences,
    p_d_states,
    p_d_initial,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    FINAL: tl.constexpr,
):
    """The gradients of the states after chunks and before sequences. FINAL: final states have gradients."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_sequence = tl.program_id(0) // (BLOCKS * R.heads) % sequences
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // sequences
    i_column = i_block * BLOCK_V
    begin, end, i_chunk = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_chunk += i_batch * chunks
    i_member = i_batch.to(tl.int64) * length
    i_state = i_batch * sequences + i_sequence
    b_d_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FINAL:
        b_d_state = load_state(p_d_final, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
    steps = tl.cdiv(end - begin, CHUNK)
    for i_back in range(steps):
        i_step = steps - 1 - i_back
        rows = end - begin - i_step * CHUNK
        i_token = i_member + first_token(begin, end, i_step * CHUNK, R)
        b_decay = chunk_decay(p_totals, p_totals, (i_chunk + i_step) * R.heads + i_head, CHUNK, BLOCK_K, R)
        b_read = load_tile(p_read, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_query = load_tile(p_read_query, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_a = load_tile(p_write_a, i_token, i_head, 0, rows, R.heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
        b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, WHOLE, R)
        b_after = narrow(b_d_state, R)
        store_state(p_d_states, b_after, i_chunk + i_step, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        b_d_held = product(b_a, b_after, R)  # [CHUNK, BLOCK_V]
        b_d_state = b_d_state * b_decay + product(tl.trans(b_query), b_d_out, R)
        b_d_state += product(tl.trans(b_read), b_d_held, R)
    store_state(p_d_initial, b_d_state, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
