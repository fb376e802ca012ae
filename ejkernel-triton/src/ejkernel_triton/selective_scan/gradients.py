"""The gradients: every segment is walked back chunk by chunk, after its states were formed again from the one before the chunk.

With g the gradient of a state `h_t = decay_t h_(t-1) + dt_t x_t B_t`, and `e = g decay_t h_(t-1)` that of the exponent `A dt_t`:
C takes `d_out_t h_t` and B `g dt_t x_t`, summed over channels; dt takes `x_t (g . B_t) + e . A`, x `dt_t (g . B_t)`, A `e dt_t`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - in a kernel a tuple grows by addition alone

import triton
import triton.language as tl

from ejkernel_triton._tokens import place_of, rows_of, store_row
from ejkernel_triton.selective_scan.scan import state_before
from ejkernel_triton.selective_scan.tiles import (
    LN_2,
    channels_of,
    exponents_of,
    kept_state_of,
    load_state,
    store_channels,
    store_state,
)


@triton.jit
def gradient_after(p_d_final, p_heads, p_totals, b_A, i_batch, i_segment, i_block, segments, P: tl.constexpr):
    """The gradient of the state after a segment, from what the segments after it do."""
    b_d_state = load_state(p_d_final, i_batch, i_block, P)
    for i_back in range(segments - 1 - i_segment):
        i_index = i_batch * segments + segments - 1 - i_back
        b_total = channels_of(p_totals, i_index, i_block, P)
        b_d_state = tl.exp2(b_A * b_total[:, None]) * b_d_state + load_state(p_heads, i_index, i_block, P)
    return b_d_state


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
    p_states,
    p_sums,
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
    """Gradients of B and C are of a block of channels, those of A and D of a segment."""
    BLOCK_I: tl.constexpr = P.block_i
    BLOCK_N: tl.constexpr = P.block_n
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i, o_n = i_block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    i_member = i_batch.to(tl.int64) * length
    BLOCKS: tl.constexpr = (P.channels + P.block_i - 1) // P.block_i
    members = (tl.num_programs(0) // BLOCKS // segments).to(tl.int64)
    chunks = tl.cdiv(length, CHUNK)
    b_A = exponents_of(p_A, i_batch, i_block, P)
    b_before = state_before(p_initial, p_ends, p_totals, b_A, i_batch, i_segment, i_block, segments, INITIAL, P)
    b_d_state = gradient_after(p_d_final, p_heads, p_totals, b_A, i_batch, i_segment, i_block, segments, P)
    b_d_A = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    b_d_D = tl.zeros([BLOCK_I], tl.float32)
    if P.skip:
        b_D = channels_of(p_D, i_batch if P.skip_per_member else i_batch * 0, i_block, P)
    begin = i_segment * P.segment_size
    steps = tl.cdiv(tl.minimum(length - begin, P.segment_size), CHUNK)
    for i_back in range(steps):
        i_t = begin + (steps - 1 - i_back) * CHUNK
        rows = length - i_t
        i_token = i_member + i_t
        b_x = rows_of(p_x + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_dt = rows_of(p_dt + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_d_out = rows_of(p_d_out + i_token * P.channels, o_i, rows, P.channels, P.block_i, P)
        b_B = rows_of(p_B + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        b_C = rows_of(p_C + i_token * P.width, o_n, rows, P.width, P.block_n, P)
        i_chunk = i_batch * chunks + i_t // CHUNK
        b_sum = channels_of(p_sums, i_chunk, i_block, P)
        b_state = tl.load(kept_state_of(p_states, i_chunk, i_block, P)).to(tl.float32)
        b_state += tl.exp2(b_A * b_sum[:, None]) * b_before
        b_states = (b_state,)
        b_decays = ()
        for u in tl.static_range(CHUNK):
            b_decay = tl.exp2(b_A * b_dt[u][:, None])
            b_state = b_decay * b_state + (b_dt[u] * b_x[u])[:, None] * b_B[u][None, :]
            b_states = b_states + (b_state,)
            b_decays = b_decays + (b_decay,)
        i_part = i_block * members * length + i_token
        for u in tl.static_range(CHUNK - 1, -1, -1):
            b_d_state += b_d_out[u][:, None] * b_C[u][None, :]
            b_d_C = tl.sum(b_d_out[u][:, None] * b_states[u + 1], axis=0)
            b_d_B = tl.sum(b_d_state * (b_dt[u] * b_x[u])[:, None], axis=0)
            store_row(p_d_C + i_part * P.width, b_d_C, u, o_n, rows, P.width, P.block_n, P)
            store_row(p_d_B + i_part * P.width, b_d_B, u, o_n, rows, P.width, P.block_n, P)
            b_d_written = tl.sum(b_d_state * b_B[u][None, :], axis=1)
            b_d_state *= b_decays[u]
            b_d_exponent = b_d_state * b_states[u]
            b_d_A += b_d_exponent * b_dt[u][:, None]
            b_d_dt = b_x[u] * b_d_written + tl.sum(b_d_exponent * b_A, axis=1) * LN_2
            b_d_x = b_dt[u] * b_d_written
            if P.skip:
                b_d_x += b_D * b_d_out[u]
                b_d_D += b_x[u] * b_d_out[u]
            store_row(p_d_x + i_token * P.channels, b_d_x, u, o_i, rows, P.channels, P.block_i, P)
            store_row(p_d_dt + i_token * P.channels, b_d_dt, u, o_i, rows, P.channels, P.block_i, P)
    i_index = i_batch * segments + i_segment
    store_state(p_d_A, b_d_A, i_index, i_block, P)
    if P.skip:
        store_channels(p_d_D, b_d_D, i_index, i_block, P)
    if i_segment == 0:
        store_state(p_d_initial, b_d_state, i_batch, i_block, P)
