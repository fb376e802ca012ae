"""The gradients of RWKV-4: every segment is walked back chunk by chunk, after its states were formed again from the one before it.

An output depends on a state only through `e^p a` and `e^p b`, so what it adds to the gradient of p is `a d_a + b d_b`. Of the
gradient of a final state there is a rest beside that, which stays with the exponent: it goes to the token, or to the first state,
that the maximum is taken from.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - in a kernel a tuple grows by addition alone

import triton
import triton.language as tl

from ejkernel_triton._tokens import place_of, rows_of, store_row
from ejkernel_triton.rwkv4.scan import state_before
from ejkernel_triton.rwkv4.tiles import (
    bonus_of,
    load_number,
    load_state,
    log_at,
    log_decay_of,
    read,
    store_number,
    store_state,
    write,
)


@triton.jit
def head_kernel(
    p_w, p_u, p_k, p_v, p_state, p_d_out, p_ends, length, segments, p_states, p_heads, p_final, P: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """The states before chunks `[b, chunks, 3, c]` and after the last segment, and of each segment `[b, segments, 4, c]`:

    the gradients of numerator and denominator before it, from its own outputs; what multiplies those after it; and 1 where the
    exponent passes it.
    """
    CHUNK: tl.constexpr = P.chunk_size
    BLOCK: tl.constexpr = P.block_i
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i = i_block * BLOCK + tl.arange(0, BLOCK)
    i_member = i_batch.to(tl.int64) * length
    chunks = tl.cdiv(length, CHUNK)
    b_log, b_bonus = log_decay_of(p_w, i_batch, i_block, P), bonus_of(p_u, i_batch, i_block, P)
    b_a, b_b, b_p = state_before(p_state, p_ends, b_log, i_batch, i_segment, i_block, segments, STATE, P)
    b_d_a, b_d_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    b_scale, b_passes = tl.full([BLOCK], 1.0, tl.float32), tl.full([BLOCK], 1.0, tl.float32)
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_first = (i_member + i_t) * P.channels
        b_k = rows_of(p_k + i_first, o_i, rows, P.channels, BLOCK, P, float("-inf"))
        b_v = rows_of(p_v + i_first, o_i, rows, P.channels, BLOCK, P)
        b_d_out = rows_of(p_d_out + i_first, o_i, rows, P.channels, BLOCK, P)
        store_state(p_states, b_a, b_b, b_p, i_batch * chunks + i_t // CHUNK, i_block, P)
        for u in tl.static_range(CHUNK):
            b_out, b_old, _ = read(b_a, b_b, b_p, b_bonus + b_k[u], b_v[u])
            b_part = b_scale * b_d_out[u] * b_old
            b_d_a += b_part
            b_d_b -= b_part * b_out
            b_log_here = log_at(b_log, u, rows, P)
            b_passes = tl.where(b_p + b_log_here >= b_k[u], b_passes, 0.0)
            b_a, b_b, b_p, b_old, _ = write(b_a, b_b, b_p, b_log_here, b_k[u], b_v[u])
            b_scale *= b_old
    i_row = (i_batch * segments + i_segment) * 4
    store_number(p_heads, b_d_a, i_row, i_block, P)
    store_number(p_heads, b_d_b, i_row + 1, i_block, P)
    store_number(p_heads, b_scale, i_row + 2, i_block, P)
    store_number(p_heads, b_passes, i_row + 3, i_block, P)
    if i_segment == segments - 1:
        store_state(p_final, b_a, b_b, b_p, i_batch, i_block, P)


@triton.jit
def gradient_after(p_d_final, p_final, p_heads, i_batch, i_segment, i_block, segments, FINAL: tl.constexpr, P: tl.constexpr):
    """Of the state after a segment: the gradients of numerator and denominator, and the rest of that of the exponent."""
    BLOCK: tl.constexpr = P.block_i
    b_d_a, b_d_b, b_rest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if FINAL:
        b_d_a, b_d_b, b_d_p = load_state(p_d_final, i_batch, i_block, P)
        b_a, b_b, _ = load_state(p_final, i_batch, i_block, P)
        b_rest = b_d_p - b_d_a * b_a - b_d_b * b_b
    for i_back in range(segments - 1 - i_segment):
        i_row = (i_batch * segments + segments - 1 - i_back) * 4
        b_scale = load_number(p_heads, i_row + 2, i_block, P)
        b_d_a = b_scale * b_d_a + load_number(p_heads, i_row, i_block, P)
        b_d_b = b_scale * b_d_b + load_number(p_heads, i_row + 1, i_block, P)
        b_rest *= load_number(p_heads, i_row + 3, i_block, P)
    return b_d_a, b_d_b, b_rest


@triton.jit
def gradient_kernel(
    p_w,
    p_u,
    p_k,
    p_v,
    p_d_out,
    p_d_final,
    p_states,
    p_heads,
    p_final,
    length,
    segments,
    p_d_log,
    p_d_u,
    p_d_k,
    p_d_v,
    p_d_state,
    P: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Gradients of u and of the log decay are of a segment. FINAL: the final state has a gradient."""
    CHUNK: tl.constexpr = P.chunk_size
    BLOCK: tl.constexpr = P.block_i
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i = i_block * BLOCK + tl.arange(0, BLOCK)
    i_member = i_batch.to(tl.int64) * length
    chunks = tl.cdiv(length, CHUNK)
    b_log, b_bonus = log_decay_of(p_w, i_batch, i_block, P), bonus_of(p_u, i_batch, i_block, P)
    b_d_a, b_d_b, b_rest = gradient_after(p_d_final, p_final, p_heads, i_batch, i_segment, i_block, segments, FINAL, P)
    b_d_log, b_d_u = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    begin = i_segment * P.segment_size
    steps = tl.cdiv(tl.minimum(length - begin, P.segment_size), CHUNK)
    for i_back in range(steps):
        i_t = begin + (steps - 1 - i_back) * CHUNK
        rows = length - i_t
        i_first = (i_member + i_t) * P.channels
        b_k = rows_of(p_k + i_first, o_i, rows, P.channels, BLOCK, P, float("-inf"))
        b_v = rows_of(p_v + i_first, o_i, rows, P.channels, BLOCK, P)
        b_d_out = rows_of(p_d_out + i_first, o_i, rows, P.channels, BLOCK, P)
        b_a, b_b, b_p = load_state(p_states, i_batch * chunks + i_t // CHUNK, i_block, P)
        b_states = ()
        b_weights = ()
        for u in tl.static_range(CHUNK):
            b_states = b_states + ((b_a, b_b, b_p),)
            b_a, b_b, b_p, b_old, b_new = write(b_a, b_b, b_p, log_at(b_log, u, rows, P), b_k[u], b_v[u])
            b_weights = b_weights + ((b_old, b_new),)
        for u in tl.static_range(CHUNK - 1, -1, -1):
            b_a, b_b, b_p = b_states[u]
            b_old, b_new = b_weights[u]
            m_passes = b_p + log_at(b_log, u, rows, P) >= b_k[u]
            b_d_old = b_old * (b_d_a * b_a + b_d_b * b_b)
            b_d_v = b_d_a * b_new
            b_d_k = b_new * (b_d_a * b_v[u] + b_d_b) + tl.where(m_passes, 0.0, b_rest)
            b_rest = tl.where(m_passes, b_rest, 0.0)
            if P.whole:
                b_d_log += b_d_old + b_rest
            else:
                b_d_log += tl.where(u < rows, b_d_old + b_rest, 0.0)
            b_d_a *= b_old
            b_d_b *= b_old
            b_out, b_old, b_new = read(b_a, b_b, b_p, b_bonus + b_k[u], b_v[u])
            b_d_a += b_d_out[u] * b_old
            b_d_b -= b_d_out[u] * b_old * b_out
            b_d_v += b_d_out[u] * b_new
            b_d_logit = b_d_out[u] * b_new * (b_v[u] - b_out)
            b_d_u += b_d_logit
            store_row(p_d_k + i_first, b_d_k + b_d_logit, u, o_i, rows, P.channels, BLOCK, P)
            store_row(p_d_v + i_first, b_d_v, u, o_i, rows, P.channels, BLOCK, P)
    i_index = i_batch * segments + i_segment
    store_number(p_d_log, b_d_log, i_index, i_block, P)
    store_number(p_d_u, b_d_u, i_index, i_block, P)
    if i_segment == 0:
        b_a, b_b, _ = load_state(p_states, i_batch * chunks, i_block, P)
        store_state(p_d_state, b_d_a, b_d_b, b_d_a * b_a + b_d_b * b_b + b_rest, i_batch, i_block, P)
