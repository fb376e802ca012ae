"""The scan itself, and what each segment does to a state, which lets segments run beside each other."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton._tokens import place_of, row_of, rows_of, store_row
from ejkernel_triton.selective_scan.tiles import (
    BITS,
    LAST,
    RESET,
    channels_of,
    exponents_of,
    hold_state,
    inside,
    load_state,
    marks_of,
    state_at,
    store_channels,
    store_state,
)


@triton.jit
def advance(b_state, b_A, b_x, b_B, b_dt):
    """The state after a token, and its decay."""
    b_decay = tl.exp2(b_A * b_dt[:, None])
    return b_decay * b_state + (b_dt * b_x)[:, None] * b_B[None, :], b_decay


@triton.jit
def inputs_of(p_x, p_B, p_dt, i_token, o_i, o_n, rows, P: tl.constexpr):
    """x, B and dt of all tokens of a chunk."""
    b_x = rows_of(p_x + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
    b_dt = rows_of(p_dt + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
    b_B = rows_of(p_B + i_token * P.width, o_n, rows, P.width, P.block_n, P)
    return b_x, b_B, b_dt


@triton.jit
def step(
    b_state,
    p_x,
    p_B,
    p_dt,
    b_A,
    p_initial,
    p_chunk,
    u,
    i_token,
    o_i,
    o_n,
    rows,
    i_block,
    P: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Token u of a chunk with edges: the state after it, its decay, and its x, B and dt."""
    i_mark = tl.load(p_chunk + u)
    b_x = inside(row_of(p_x + i_token * P.channels, u, o_i, rows, P.channels, P.block_i, P, 0.0), i_mark)
    b_dt = inside(row_of(p_dt + i_token * P.channels, u, o_i, rows, P.channels, P.block_i, P, 0.0), i_mark)
    b_B = inside(row_of(p_B + i_token * P.width, u, o_n, rows, P.width, P.block_n, P, 0.0), i_mark)
    b_state, b_decay = advance(state_at(b_state, i_mark, p_initial, i_block, INITIAL, P), b_A, b_x, b_B, b_dt)
    return b_state, b_decay, b_x, b_B, b_dt


@triton.jit
def segment_chunk(
    b_state, b_sum, b_product, b_head, p_x, p_B, p_C, p_dt, p_d_out, b_A, i_token, o_i, o_n, rows, P: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """The numbers of `segment_kernel` after a chunk without edges."""
    CHUNK: tl.constexpr = P.chunk_size
    b_x, b_B, b_dt = inputs_of(p_x, p_B, p_dt, i_token, o_i, o_n, rows, P)
    if BACKWARD:
        b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        b_d_out = rows_of(p_d_out + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
    for u in tl.static_range(CHUNK):
        b_state, b_decay = advance(b_state, b_A, b_x[u], b_B[u], b_dt[u])
        b_sum += b_dt[u]
        if BACKWARD:
            b_product *= b_decay
            b_head += b_product * (b_d_out[u][:, None] * b_C[u][None, :])
    return b_state, b_sum, b_product, b_head


@triton.jit
def segment_edges(
    b_state, b_sum, b_product, b_head, p_x, p_B, p_C, p_dt, p_d_out, b_A, p_initial, p_d_final, m_reached, p_chunk, i_token,
    o_i, o_n, rows, i_block, P: tl.constexpr, INITIAL: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """As `segment_chunk`, of a chunk with edges, token after token."""
    CHUNK: tl.constexpr = P.chunk_size
    for u in range(CHUNK):
        i_mark = tl.load(p_chunk + u)
        b_state, b_decay, _, _, b_dt = step(
            b_state, p_x, p_B, p_dt, b_A, p_initial, p_chunk, u, i_token, o_i, o_n, rows, i_block, P, INITIAL
        )
        b_sum = tl.where((i_mark & RESET) != 0, 0.0, b_sum) + b_dt
        if BACKWARD:
            b_C = inside(row_of(p_C + i_token * P.width, u, o_n, rows, P.width, P.block_n, P, 0.0), i_mark)
            b_d_out = inside(row_of(p_d_out + i_token * P.channels, u, o_i, rows, P.channels, P.block_i, P, 0.0), i_mark)
            m_reached = m_reached & ((i_mark & RESET) == 0)
            b_product *= b_decay
            b_head = tl.where(m_reached, b_head + b_product * (b_d_out[:, None] * b_C[None, :]), b_head)
            if P.packed and m_reached & ((i_mark & LAST) != 0):
                b_head += b_product * load_state(p_d_final, i_mark >> BITS, i_block, P)
    return b_state, b_sum, b_product, b_head


@triton.jit
def tokens_of(length, segments, P: tl.constexpr):
    """Tokens of all members."""
    BLOCKS: tl.constexpr = (P.channels + P.block_i - 1) // P.block_i
    return (tl.num_programs(0) // BLOCKS // segments).to(tl.int64) * length


@triton.jit
def segment_kernel(
    p_x,
    p_A,
    p_B,
    p_C,
    p_dt,
    p_d_out,
    p_initial,
    p_d_final,
    p_marks,
    length,
    segments,
    p_ends,
    p_totals,
    p_heads,
    p_sums,
    p_d_x,
    p_d_dt,
    p_rest,
    p_d_A,
    P: tl.constexpr,
    INITIAL: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Of each segment, from a state of zeros: the state after it, and the sum of dt, which is its decay.

    BACKWARD: also the gradient of the state before it, from this segment's outputs alone; and of each chunk the sum of dt up to it
    and the state before it, which arrays hold that `gradient_kernel` will fill with gradients.

    After a reset, states and sums are as they were from it on, and nothing is added to the gradient of the state before.
    """
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i, o_n = i_block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    i_member = i_batch.to(tl.int64) * length
    chunks = tl.cdiv(length, CHUNK)
    b_A = exponents_of(p_A, i_batch, i_block, P)
    b_state = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    b_head = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    b_product = tl.full([BLOCK_I, BLOCK_N], 1.0, tl.float32)
    b_sum = tl.zeros([BLOCK_I], tl.float32)
    begin, i_index = i_segment * P.segment_size, i_batch * segments + i_segment
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_token = i_member + i_t
        if BACKWARD:
            tokens = tokens_of(length, segments, P)
            hold_state(p_d_x, p_d_dt, p_rest, p_d_A, b_state, i_token, rows, tokens, i_index, i_block, P)
            store_channels(p_sums, b_sum, i_batch * chunks + i_t // CHUNK, i_block, P)
        m_edges, m_reached, p_chunk = False, True, p_marks
        if P.cut:
            m_edges, m_reached, p_chunk = marks_of(p_marks, i_batch * chunks + i_t // CHUNK, P)
        if P.cut and m_edges:
            b_state, b_sum, b_product, b_head = segment_edges(
                b_state, b_sum, b_product, b_head, p_x, p_B, p_C, p_dt, p_d_out, b_A, p_initial, p_d_final, m_reached, p_chunk,
                i_token, o_i, o_n, rows, i_block, P, INITIAL, BACKWARD,
            )  # fmt: skip
        else:
            b_before = b_head
            b_state, b_sum, b_product, b_head = segment_chunk(
                b_state, b_sum, b_product, b_head, p_x, p_B, p_C, p_dt, p_d_out, b_A, i_token, o_i, o_n, rows, P, BACKWARD,
            )  # fmt: skip
            if P.cut and BACKWARD:
                b_head = tl.where(m_reached, b_head, b_before)
    store_state(p_ends, b_state, i_index, i_block, P)
    store_channels(p_totals, b_sum, i_index, i_block, P)
    if BACKWARD:
        store_state(p_heads, b_head, i_index, i_block, P)


@triton.jit
def state_before(
    p_initial, p_ends, p_totals, p_reach, b_A, i_batch, i_segment, i_block, segments, INITIAL: tl.constexpr, P: tl.constexpr
):
    """The state before a segment, from what the segments before it do, back to the last that has a reset."""
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    b_state = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    if INITIAL and not P.packed:
        b_state = load_state(p_initial, i_batch, i_block, P)
    i_first = 0
    if P.cut:
        i_reset = tl.load(p_reach + (i_batch * segments + i_segment) * 2)
        i_first = i_reset + 1
        if i_reset >= 0:
            b_state = load_state(p_ends, i_batch * segments + i_reset, i_block, P)
    for i_earlier in range(i_first, i_segment):
        i_index = i_batch * segments + i_earlier
        b_total = channels_of(p_totals, i_index, i_block, P)
        b_state = tl.exp2(b_A * b_total[:, None]) * b_state + load_state(p_ends, i_index, i_block, P)
    return b_state


@triton.jit
def scan_chunk(
    b_state, p_x, p_B, p_C, p_dt, b_A, b_D, p_out, i_token, o_i, o_n, rows, i_block, P: tl.constexpr
):  # fmt: skip
    """Stores the outputs of a chunk without edges; the state after it."""
    CHUNK: tl.constexpr = P.chunk_size
    b_x, b_B, b_dt = inputs_of(p_x, p_B, p_dt, i_token, o_i, o_n, rows, P)
    b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
    for u in tl.static_range(CHUNK):
        b_state, _ = advance(b_state, b_A, b_x[u], b_B[u], b_dt[u])
        b_out = tl.sum(b_state * b_C[u][None, :], axis=1)
        if P.skip:
            b_out += b_D * b_x[u]
        store_row(p_out + i_token * P.channels, b_out, u, o_i, rows, P.channels, P.block_i, P)
    return b_state


@triton.jit
def scan_edges(
    b_state, p_x, p_B, p_C, p_dt, b_A, b_D, p_initial, p_out, p_final, p_chunk, i_token, o_i, o_n, rows, i_block, P: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """As `scan_chunk`, of a chunk with edges, token after token; stores the states after packed sequences too."""
    CHUNK: tl.constexpr = P.chunk_size
    for u in range(CHUNK):
        i_mark = tl.load(p_chunk + u)
        b_state, _, b_x, _, _ = step(
            b_state, p_x, p_B, p_dt, b_A, p_initial, p_chunk, u, i_token, o_i, o_n, rows, i_block, P, INITIAL
        )
        b_C = inside(row_of(p_C + i_token * P.width, u, o_n, rows, P.width, P.block_n, P, 0.0), i_mark)
        b_out = tl.sum(b_state * b_C[None, :], axis=1)
        if P.skip:
            b_out += b_D * b_x
        store_row(p_out + i_token * P.channels, inside(b_out, i_mark), u, o_i, rows, P.channels, P.block_i, P)
        if P.packed and (i_mark & LAST) != 0:
            store_state(p_final, b_state, i_mark >> BITS, i_block, P)
    return b_state


@triton.jit
def scan_kernel(
    p_x,
    p_A,
    p_B,
    p_C,
    p_D,
    p_dt,
    p_initial,
    p_ends,
    p_totals,
    p_marks,
    p_reach,
    length,
    segments,
    p_out,
    p_final,
    P: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """The outputs of each segment, and the state after the last, or after every packed sequence that has tokens."""
    BLOCK_I: tl.constexpr = P.block_i
    CHUNK: tl.constexpr = P.chunk_size
    BLOCK_N: tl.constexpr = P.block_n
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i, o_n = i_block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    i_member = i_batch.to(tl.int64) * length
    b_A = exponents_of(p_A, i_batch, i_block, P)
    b_state = state_before(p_initial, p_ends, p_totals, p_reach, b_A, i_batch, i_segment, i_block, segments, INITIAL, P)
    b_D = 0.0
    if P.skip:
        b_D = channels_of(p_D, i_batch if P.skip_per_member else i_batch * 0, i_block, P)
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_token = i_member + i_t
        m_edges, p_chunk = False, p_marks
        if P.cut:
            m_edges, _, p_chunk = marks_of(p_marks, i_batch * tl.cdiv(length, CHUNK) + i_t // CHUNK, P)
        if P.cut and m_edges:
            b_state = scan_edges(
                b_state,
                p_x,
                p_B,
                p_C,
                p_dt,
                b_A,
                b_D,
                p_initial,
                p_out,
                p_final,
                p_chunk,
                i_token,
                o_i,
                o_n,
                rows,
                i_block,
                P,
                INITIAL,
            )
        else:
            b_state = scan_chunk(b_state, p_x, p_B, p_C, p_dt, b_A, b_D, p_out, i_token, o_i, o_n, rows, i_block, P)
    if not P.packed and i_segment == segments - 1:
        store_state(p_final, b_state, i_batch, i_block, P)
