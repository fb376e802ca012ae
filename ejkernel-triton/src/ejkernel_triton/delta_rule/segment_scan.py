"""What lets segments of a sequence be scanned in parallel: the state before each of them.

The state after a segment is `M S + L` of the state S before it. L is what the segment leaves of zeros, and M, the product of the
transitions of its chunks, what it leaves of the identity where nothing is written: both come from all segments at once. From one
segment to the next, states are carried by M, and their gradients back by its transpose.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.state_scan import chunk_delta, chunks_of_segment, program_of, state_after
from ejkernel_triton.delta_rule.tiles import first_token, load_state, matrix_of, narrow, sequence_of, store_state

GROUP = tl.constexpr(16)
"""Chunks between two looks at whether a product of transitions is 0, as decays make it in the end."""


@triton.jit
def walk_chunks(
    b_state, first, last, p_read_key, p_write_key, p_value, p_inverse, p_rows, p_totals, begin, end, i_member, i_chunk, i_head,
    i_column, R: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WHOLE: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """The state after chunks; without VALUES nothing is written."""
    for i_step in range(first, last):
        i_position = i_step * CHUNK
        rows = end - begin - i_position
        i_token = i_member + first_token(begin, end, i_position, R)
        i_square = (i_chunk + i_step) * R.heads + i_head
        b_delta, b_key, b_write_scale, b_decay = chunk_delta(
            narrow(b_state, R), p_read_key, p_value, p_inverse, p_rows, p_totals, i_token, i_square, i_head, i_column, rows, R,
            CHUNK, BLOCK_K, BLOCK_V, WHOLE, VALUES,
        )  # fmt: skip
        b_state = state_after(
            b_state, b_delta, b_key, b_write_scale, b_decay, p_write_key, i_token, i_head, rows, R, CHUNK, BLOCK_K, WHOLE
        )
    return b_state


@triton.jit
def segment_scan_kernel(
    p_read_key,
    p_write_key,
    p_value,
    p_inverse,
    p_rows,
    p_totals,
    p_bounds,
    p_first,
    length,
    chunks,
    sequences,
    p_local,
    p_transitions,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WHOLE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    FROM_FIRST: tl.constexpr,
    TO_LAST: tl.constexpr,
):
    """One program per segment, head and block of channels of value, then of key: the states that segments leave of zeros, and the
    products of their transitions. FROM_FIRST, TO_LAST: the transition of the first, of the last segment is wanted, too."""
    VALUE_BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    KEY_BLOCKS: tl.constexpr = (R.width + BLOCK_V - 1) // BLOCK_V
    i_block, i_head, i_segment, i_sequence, i_batch = program_of(sequences, VALUE_BLOCKS + KEY_BLOCKS, SEGMENTS, R)
    begin, end, i_chunk = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_chunk += i_batch * chunks
    i_member = i_batch.to(tl.int64) * length
    first, last = chunks_of_segment(begin, end, i_segment, CHUNK, SEGMENTS)
    i_index = (i_batch * sequences + i_sequence) * SEGMENTS + i_segment
    if i_block < VALUE_BLOCKS:
        if i_segment < SEGMENTS - 1:
            i_column = i_block * BLOCK_V
            b_state = walk_chunks(
                tl.zeros([BLOCK_K, BLOCK_V], tl.float32), first, last, p_read_key, p_write_key, p_value, p_inverse, p_rows,
                p_totals, begin, end, i_member, i_chunk, i_head, i_column, R, CHUNK, BLOCK_K, BLOCK_V, WHOLE, True,
            )  # fmt: skip
            store_state(p_local, b_state, i_index, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    elif (FROM_FIRST or i_segment > 0) and (TO_LAST or i_segment < SEGMENTS - 1):
        i_column = (i_block - VALUE_BLOCKS) * BLOCK_V
        o_row, o_column = tl.arange(0, BLOCK_K), i_column + tl.arange(0, BLOCK_V)
        b_state = tl.where(o_row[:, None] == o_column[None, :], 1.0, 0.0)
        some = True
        for i_group in range(first, last, GROUP):
            stop = tl.where(some, tl.minimum(i_group + GROUP, last), i_group)
            b_state = walk_chunks(
                b_state, i_group, stop, p_read_key, p_write_key, p_value, p_inverse, p_rows, p_totals, begin, end, i_member,
                i_chunk, i_head, i_column, R, CHUNK, BLOCK_K, BLOCK_V, WHOLE, False,
            )  # fmt: skip
            some = tl.max(tl.max(tl.abs(b_state), axis=1), axis=0) != 0.0
        p_tile, m_tile = matrix_of(p_transitions, i_index, i_head, 0, i_column, R.width, R, BLOCK_K, BLOCK_V)
        tl.store(p_tile, b_state, mask=m_tile)


@triton.jit
def carried_rows(
    b_state, p_local, p_transitions, p_carried, i_index, i_next, i_head, i_row, i_column, R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rows of the state on the other side of a segment, which are stored."""
    if BACK:
        p_tile, m_tile = matrix_of(p_transitions, i_index, i_head, 0, i_row, R.width, R, BLOCK_K, ROWS)
        b_tile = tl.trans(tl.load(p_tile, mask=m_tile, other=0.0))
    else:
        p_tile, m_tile = matrix_of(p_transitions, i_index, i_head, i_row, 0, R.width, R, ROWS, BLOCK_K)
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0)
    b_rows = tl.dot(b_tile, b_state, input_precision=R.precision)
    b_rows += load_state(p_local, i_index, i_head, i_row, i_column, R, ROWS, BLOCK_V)
    store_state(p_carried, b_rows, i_next, i_head, i_row, i_column, R, ROWS, BLOCK_V)
    return b_rows


@triton.jit
def carry_kernel(
    p_given,
    p_local,
    p_transitions,
    p_carried,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GIVEN: tl.constexpr,
    BACK: tl.constexpr,
):
    """States before segments; with BACK gradients of the states after them, from the last segment on. GIVEN: there are states
    before sequences, gradients of those after them. One program per sequence, head and block of channels of value; ROWS rows of a
    state at a time."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    STEP: tl.constexpr = -1 if BACK else 1
    i_column = tl.program_id(0) % BLOCKS * BLOCK_V
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_state = tl.program_id(0) // (BLOCKS * R.heads)
    i_index = i_state * SEGMENTS + (SEGMENTS - 1 if BACK else 0)
    if GIVEN:
        b_state = load_state(p_given, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
    else:
        b_zero = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        store_state(p_carried, b_zero, i_index, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        b_state = load_state(p_local, i_index, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        i_index += STEP
    store_state(p_carried, b_state, i_index, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    for _ in range(SEGMENTS - 1 if GIVEN else SEGMENTS - 2):
        i_next = i_index + STEP
        if ROWS < BLOCK_K:
            for i_row in range(0, R.width, ROWS):
                carried_rows(
                    b_state, p_local, p_transitions, p_carried, i_index, i_next, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V,
                    ROWS, BACK,
                )  # fmt: skip
            tl.debug_barrier()  # the threads read what others have stored
            b_state = load_state(p_carried, i_next, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
        else:
            b_state = carried_rows(
                b_state, p_local, p_transitions, p_carried, i_index, i_next, i_head, 0, i_column, R, BLOCK_K, BLOCK_V, ROWS, BACK
            )  # fmt: skip
        i_index = i_next
