"""The scan itself, and what each segment does to a state, which lets segments run beside each other."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton._tokens import place_of, rows_of, store_row
from ejkernel_triton.selective_scan.tiles import (
    channels_of,
    exponents_of,
    kept_state_of,
    load_state,
    store_channels,
    store_state,
)


@triton.jit
def segment_kernel(
    p_x,
    p_A,
    p_B,
    p_C,
    p_dt,
    p_d_out,
    length,
    segments,
    p_ends,
    p_totals,
    p_heads,
    p_states,
    p_sums,
    P: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Of each segment, from a state of zeros: the state after it, and the sum of dt, which is its decay.

    BACKWARD: also the gradient of the state before it, from this segment's outputs alone; and of each chunk the state before it
    and the sum of dt up to it.
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
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_token = i_member + i_t
        b_x = rows_of(p_x + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_dt = rows_of(p_dt + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_B = rows_of(p_B + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        if BACKWARD:
            b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
            b_d_out = rows_of(p_d_out + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
            i_chunk = i_batch * chunks + i_t // CHUNK
            tl.store(kept_state_of(p_states, i_chunk, i_block, P), b_state.to(p_states.dtype.element_ty))
            store_channels(p_sums, b_sum, i_chunk, i_block, P)
        for u in tl.static_range(CHUNK):
            b_decay = tl.exp2(b_A * b_dt[u][:, None])
            b_state = b_decay * b_state + (b_dt[u] * b_x[u])[:, None] * b_B[u][None, :]
            b_sum += b_dt[u]
            if BACKWARD:
                b_product *= b_decay
                b_head += b_product * (b_d_out[u][:, None] * b_C[u][None, :])
    i_index = i_batch * segments + i_segment
    store_state(p_ends, b_state, i_index, i_block, P)
    store_channels(p_totals, b_sum, i_index, i_block, P)
    if BACKWARD:
        store_state(p_heads, b_head, i_index, i_block, P)


@triton.jit
def state_before(
    p_initial, p_ends, p_totals, b_A, i_batch, i_segment, i_block, segments, INITIAL: tl.constexpr, P: tl.constexpr
):
    """The state before a segment, from what the segments before it do."""
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    b_state = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    if INITIAL:
        b_state = load_state(p_initial, i_batch, i_block, P)
    for i_earlier in range(i_segment):
        i_index = i_batch * segments + i_earlier
        b_total = channels_of(p_totals, i_index, i_block, P)
        b_state = tl.exp2(b_A * b_total[:, None]) * b_state + load_state(p_ends, i_index, i_block, P)
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
    length,
    segments,
    p_out,
    p_final,
    P: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """The outputs of each segment, and the state after the last."""
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i, o_n = i_block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    i_member = i_batch.to(tl.int64) * length
    b_A = exponents_of(p_A, i_batch, i_block, P)
    b_state = state_before(p_initial, p_ends, p_totals, b_A, i_batch, i_segment, i_block, segments, INITIAL, P)
    if P.skip:
        b_D = channels_of(p_D, i_batch if P.skip_per_member else i_batch * 0, i_block, P)
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_token = i_member + i_t
        b_x = rows_of(p_x + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_dt = rows_of(p_dt + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_B = rows_of(p_B + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        for u in tl.static_range(CHUNK):
            b_decay = tl.exp2(b_A * b_dt[u][:, None])
            b_state = b_decay * b_state + (b_dt[u] * b_x[u])[:, None] * b_B[u][None, :]
            b_out = tl.sum(b_state * b_C[u][None, :], axis=1)
            if P.skip:
                b_out += b_D * b_x[u]
            store_row(p_out + i_token * P.channels, b_out, u, o_i, rows, P.channels, P.block_i, P)
    if i_segment == segments - 1:
        store_state(p_final, b_state, i_batch, i_block, P)
