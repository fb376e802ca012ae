"""The gradients: every segment is walked back chunk by chunk, after its states were formed again from the one before the chunk.

With g the gradient of a state `h_t = decay_t h_(t-1) + dt_t x_t B_t`, and `e = g decay_t h_(t-1)` that of the exponent `A dt_t`:
C takes `d_out_t h_t` and B `g dt_t x_t`, summed over channels; dt takes `x_t (g . B_t) + e . A`, x `dt_t (g . B_t)`, A `e dt_t`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - in a kernel a tuple grows by addition alone

import triton
import triton.language as tl

from ejkernel_triton._tokens import joined, place_of, row_of, rows_of, store_row, store_rows
from ejkernel_triton.selective_scan.scan import advance, inputs_of, state_before, step, tokens_of
from ejkernel_triton.selective_scan.tiles import (
    BITS,
    FIRST,
    LAST,
    LN_2,
    RESET,
    channels_of,
    exponents_of,
    held_state,
    inside,
    load_state,
    marks_of,
    state_at,
    store_channels,
    store_state,
    sum_of_channels,
    sum_of_warps,
)


@triton.jit
def gradient_after(p_d_final, p_heads, p_totals, p_reach, b_A, i_batch, i_segment, i_block, segments, P: tl.constexpr):
    """The gradient of the state after a segment, from what the segments after it do, up to the first that has a reset."""
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    b_d_state = tl.zeros([BLOCK_I, BLOCK_N], tl.float32) if P.packed else load_state(p_d_final, i_batch, i_block, P)
    i_last = segments
    if P.cut:
        i_last = tl.load(p_reach + (i_batch * segments + i_segment) * 2 + 1)
        if i_last < segments:
            b_d_state = load_state(p_heads, i_batch * segments + i_last, i_block, P)
    for i_back in range(i_last - 1 - i_segment):
        i_index = i_batch * segments + i_last - 1 - i_back
        b_total = channels_of(p_totals, i_index, i_block, P)
        b_d_state = tl.exp2(b_A * b_total[:, None]) * b_d_state + load_state(p_heads, i_index, i_block, P)
    return b_d_state


@triton.jit
def state_in_segment(b_held, b_sum, b_before, b_A, m_reached, P: tl.constexpr):
    """The state before a chunk: what was held of it, and what the state before the segment adds after so much dt."""
    tl.debug_barrier()  # what was held is overwritten from here on
    b_first = tl.exp2(b_A * b_sum[:, None]) * b_before
    if P.cut:
        b_first = tl.where(m_reached, b_first, 0.0)
    return b_held + b_first


@triton.jit
def gradient_chunk(
    b_d_state, b_d_A, b_d_D, b_before, p_x, p_B, p_C, p_dt, p_d_out, b_held, b_sum, b_A, b_D, m_reached, p_d_x, p_d_B, p_d_C,
    p_d_dt, i_token, i_part, o_i, o_n, rows, P: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of the tokens of a chunk without edges, from that of the state after it.

    Returns the gradient of the state before it, and those of A and D with what it adds. b_before: the state before the segment.
    i_part: the first token, where gradients of B and C are summed.
    """
    CHUNK: tl.constexpr = P.chunk_size
    b_x, b_B, b_dt = inputs_of(p_x, p_B, p_dt, i_token, o_i, o_n, rows, P)
    b_d_out = rows_of(p_d_out + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
    b_state = state_in_segment(b_held, b_sum, b_before, b_A, m_reached, P)
    b_states, b_decays, b_d_C = (), (), ()
    for u in tl.static_range(CHUNK):
        b_states = b_states + (b_state,)
        b_state, b_decay = advance(b_state, b_A, b_x[u], b_B[u], b_dt[u])
        b_decays = b_decays + (b_decay,)
        b_d_C = b_d_C + (sum_of_warps(b_d_out[u][:, None] * b_state, P),)
    b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
    store_rows(p_d_C + i_part * P.width, sum_of_channels(b_d_C, P), o_n, rows, P.width, P.block_n, P)
    b_d_x, b_d_B, b_d_dt = (), (), ()
    for u in tl.static_range(CHUNK - 1, -1, -1):
        b_d_state += b_d_out[u][:, None] * b_C[u][None, :]
        b_d_B = (sum_of_warps(b_d_state * (b_dt[u] * b_x[u])[:, None], P),) + b_d_B
        b_d_written = tl.sum(b_d_state * b_B[u][None, :], axis=1)
        b_d_state *= b_decays[u]
        b_d_exponent = b_d_state * b_states[u]
        b_d_A += b_d_exponent * b_dt[u][:, None]
        b_row_dt = b_x[u] * b_d_written + tl.sum(b_d_exponent * b_A, axis=1) * LN_2
        b_row_x = b_dt[u] * b_d_written
        if P.skip:
            b_row_x += b_D * b_d_out[u]
            b_d_D += b_x[u] * b_d_out[u]
        b_d_x = (b_row_x.to(p_d_x.dtype.element_ty),) + b_d_x
        b_d_dt = (b_row_dt.to(p_d_dt.dtype.element_ty),) + b_d_dt
    store_rows(p_d_x + i_token * P.channels, joined(b_d_x, P.block_i, P), o_i, rows, P.channels, P.block_i, P)
    store_rows(p_d_dt + i_token * P.channels, joined(b_d_dt, P.block_i, P), o_i, rows, P.channels, P.block_i, P)
    store_rows(p_d_B + i_part * P.width, sum_of_channels(b_d_B, P), o_n, rows, P.width, P.block_n, P)
    return b_d_state, b_d_A, b_d_D


@triton.jit
def gradient_edges(
    b_d_state, b_d_A, b_d_D, b_before, p_x, p_B, p_C, p_dt, p_d_out, b_held, b_sum, b_A, b_D, p_initial, p_d_final, m_reached,
    p_chunk, p_d_x, p_d_B, p_d_C, p_d_dt, p_d_initial, i_token, i_part, o_i, o_n, rows, i_block, P: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """As `gradient_chunk`, of a chunk with edges, token after token; every state is formed again from the one before the chunk."""
    CHUNK: tl.constexpr = P.chunk_size
    b_first = state_in_segment(b_held, b_sum, b_before, b_A, m_reached, P)
    for u_back in range(CHUNK):
        u = CHUNK - 1 - u_back
        b_state = b_first
        for v in range(u):
            b_state, _, _, _, _ = step(
                b_state, p_x, p_B, p_dt, b_A, p_initial, p_chunk, v, i_token, o_i, o_n, rows, i_block, P, INITIAL
            )
        i_mark = tl.load(p_chunk + u)
        b_state = state_at(b_state, i_mark, p_initial, i_block, INITIAL, P)
        b_after, b_decay, b_x, b_B, b_dt = step(
            b_state, p_x, p_B, p_dt, b_A, p_initial, p_chunk, u, i_token, o_i, o_n, rows, i_block, P, INITIAL
        )
        b_d_out = inside(row_of(p_d_out + i_token * P.channels, u, o_i, rows, P.channels, P.block_i, P, 0.0), i_mark)
        b_C = inside(row_of(p_C + i_token * P.width, u, o_n, rows, P.width, P.block_n, P, 0.0), i_mark)
        if P.packed and (i_mark & LAST) != 0:
            b_d_state = load_state(p_d_final, i_mark >> BITS, i_block, P)
        b_d_state += b_d_out[:, None] * b_C[None, :]
        b_d_C = inside(tl.sum(b_d_out[:, None] * b_after, axis=0), i_mark)
        b_d_B = inside(tl.sum(b_d_state * (b_dt * b_x)[:, None], axis=0), i_mark)
        store_row(p_d_C + i_part * P.width, b_d_C, u, o_n, rows, P.width, P.block_n, P)
        store_row(p_d_B + i_part * P.width, b_d_B, u, o_n, rows, P.width, P.block_n, P)
        b_d_written = tl.sum(b_d_state * b_B[None, :], axis=1)
        b_d_state *= b_decay
        b_d_exponent = b_d_state * b_state
        b_d_A += b_d_exponent * b_dt[:, None]
        b_d_dt = b_x * b_d_written + tl.sum(b_d_exponent * b_A, axis=1) * LN_2
        b_d_x = b_dt * b_d_written
        if P.skip:
            b_d_x += b_D * b_d_out
            b_d_D += b_x * b_d_out
        store_row(p_d_x + i_token * P.channels, inside(b_d_x, i_mark), u, o_i, rows, P.channels, P.block_i, P)
        store_row(p_d_dt + i_token * P.channels, inside(b_d_dt, i_mark), u, o_i, rows, P.channels, P.block_i, P)
        if P.packed and INITIAL and (i_mark & FIRST) != 0:
            store_state(p_d_initial, b_d_state, i_mark >> BITS, i_block, P)
        b_d_state = tl.where((i_mark & RESET) != 0, 0.0, b_d_state)
    return b_d_state, b_d_A, b_d_D


@triton.jit
def gradient_kernel(
    p_x,
    p_A,
    p_B,
    p_C,
    p_D,
    p_dt,
    p_initial,
    p_d_out,
    p_d_final,
    p_ends,
    p_totals,
    p_heads,
    p_sums,
    p_rest,
    p_marks,
    p_reach,
    p_held_x,
    p_held_dt,
    p_held_A,
    length,
    segments,
    p_d_x,
    p_d_A,
    p_d_B,
    p_d_C,
    p_d_D,
    p_d_dt,
    p_d_initial,
    P: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Gradients of B and C are of a block of channels, those of A and D of a segment.

    p_d_x, p_d_dt and p_d_A begin with what `segment_kernel` held in them, as p_held_x, p_held_dt and p_held_A.
    """
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i, o_n = i_block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    i_member = i_batch.to(tl.int64) * length
    tokens = tokens_of(length, segments, P)
    chunks = tl.cdiv(length, CHUNK)
    b_A = exponents_of(p_A, i_batch, i_block, P)
    b_before = state_before(p_initial, p_ends, p_totals, p_reach, b_A, i_batch, i_segment, i_block, segments, INITIAL, P)
    b_d_state = gradient_after(p_d_final, p_heads, p_totals, p_reach, b_A, i_batch, i_segment, i_block, segments, P)
    b_d_A = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    b_d_D = tl.zeros([BLOCK_I], tl.float32)
    b_D = 0.0
    if P.skip:
        b_D = channels_of(p_D, i_batch if P.skip_per_member else i_batch * 0, i_block, P)
    begin, i_index = i_segment * P.segment_size, i_batch * segments + i_segment
    steps = tl.cdiv(tl.minimum(length - begin, P.segment_size), CHUNK)
    for i_back in range(steps):
        i_t = begin + (steps - 1 - i_back) * CHUNK
        rows = length - i_t
        i_token = i_member + i_t
        i_part = i_block * tokens + i_token
        b_held = held_state(p_d_x, p_d_dt, p_rest, p_d_A, i_token, rows, tokens, i_index, i_block, P)
        b_sum = channels_of(p_sums, i_batch * chunks + i_t // CHUNK, i_block, P)
        m_edges, m_reached, p_chunk = False, True, p_marks
        if P.cut:
            m_edges, m_reached, p_chunk = marks_of(p_marks, i_batch * chunks + i_t // CHUNK, P)
        if P.cut and m_edges:
            b_d_state, b_d_A, b_d_D = gradient_edges(
                b_d_state, b_d_A, b_d_D, b_before, p_x, p_B, p_C, p_dt, p_d_out, b_held, b_sum, b_A, b_D, p_initial, p_d_final,
                m_reached, p_chunk, p_d_x, p_d_B, p_d_C, p_d_dt, p_d_initial, i_token, i_part, o_i, o_n, rows, i_block, P,
                INITIAL,
            )  # fmt: skip
        else:
            b_d_state, b_d_A, b_d_D = gradient_chunk(
                b_d_state, b_d_A, b_d_D, b_before, p_x, p_B, p_C, p_dt, p_d_out, b_held, b_sum, b_A, b_D, m_reached, p_d_x,
                p_d_B, p_d_C, p_d_dt, i_token, i_part, o_i, o_n, rows, P,
            )  # fmt: skip
    store_state(p_d_A, b_d_A, i_index, i_block, P)
    if P.skip:
        store_channels(p_d_D, b_d_D, i_index, i_block, P)
    if not P.packed and i_segment == 0:
        store_state(p_d_initial, b_d_state, i_batch, i_block, P)
