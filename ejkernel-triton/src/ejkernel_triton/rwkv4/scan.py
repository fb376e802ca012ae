"""The recurrence, and what each segment does to a state, which lets segments run beside each other."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton._tokens import place_of, rows_of, store_row
from ejkernel_triton.rwkv4.tiles import bonus_of, load_state, log_at, log_decay_of, nothing_seen, read, store_state, write


@triton.jit
def segment_kernel(p_w, p_k, p_v, length, segments, p_ends, P: tl.constexpr):
    """The state after each segment, where nothing was seen before it."""
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i = i_block * P.block_i + tl.arange(0, P.block_i)
    i_member = i_batch.to(tl.int64) * length
    b_log = log_decay_of(p_w, i_batch, i_block, P)
    b_a, b_b, b_p = nothing_seen(P)
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_first = (i_member + i_t) * P.channels
        b_k = rows_of(p_k + i_first, o_i, rows, P.channels, P.block_i, P, float("-inf"))
        b_v = rows_of(p_v + i_first, o_i, rows, P.channels, P.block_i, P)
        for u in tl.static_range(CHUNK):
            b_a, b_b, b_p, _, _ = write(b_a, b_b, b_p, log_at(b_log, u, rows, P), b_k[u], b_v[u])
    store_state(p_ends, b_a, b_b, b_p, i_batch * segments + i_segment, i_block, P)


@triton.jit
def state_before(p_state, p_ends, b_log, i_batch, i_segment, i_block, segments, STATE: tl.constexpr, P: tl.constexpr):
    """The state before a segment. STATE: there is one before the first."""
    b_a, b_b, b_p = nothing_seen(P)
    if STATE:
        b_a, b_b, b_p = load_state(p_state, i_batch, i_block, P)
    for i_earlier in range(i_segment):
        b_a_end, b_b_end, b_p_end = load_state(p_ends, i_batch * segments + i_earlier, i_block, P)
        b_p_old = b_p + b_log * P.segment_size
        b_p = tl.maximum(b_p_old, b_p_end)
        b_old, b_new = tl.exp(b_p_old - b_p), tl.exp(b_p_end - b_p)
        b_a, b_b = b_old * b_a + b_new * b_a_end, b_old * b_b + b_new * b_b_end
    return b_a, b_b, b_p


@triton.jit
def scan_kernel(
    p_w, p_u, p_k, p_v, p_state, p_ends, length, segments, p_out, p_final, P: tl.constexpr, STATE: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """Outputs, and the state after the last segment. FINAL: it is wanted."""
    CHUNK: tl.constexpr = P.chunk_size
    i_batch, i_segment, i_block = place_of(segments, P)
    o_i = i_block * P.block_i + tl.arange(0, P.block_i)
    i_member = i_batch.to(tl.int64) * length
    b_log, b_bonus = log_decay_of(p_w, i_batch, i_block, P), bonus_of(p_u, i_batch, i_block, P)
    b_a, b_b, b_p = state_before(p_state, p_ends, b_log, i_batch, i_segment, i_block, segments, STATE, P)
    begin = i_segment * P.segment_size
    for i_t in range(begin, tl.minimum(begin + P.segment_size, length), CHUNK):
        rows = length - i_t
        i_first = (i_member + i_t) * P.channels
        b_k = rows_of(p_k + i_first, o_i, rows, P.channels, P.block_i, P, float("-inf"))
        b_v = rows_of(p_v + i_first, o_i, rows, P.channels, P.block_i, P)
        for u in tl.static_range(CHUNK):
            b_out, _, _ = read(b_a, b_b, b_p, b_bonus + b_k[u], b_v[u])
            store_row(p_out + i_first, b_out, u, o_i, rows, P.channels, P.block_i, P)
            b_a, b_b, b_p, _, _ = write(b_a, b_b, b_p, log_at(b_log, u, rows, P), b_k[u], b_v[u])
    if FINAL and i_segment == segments - 1:
        store_state(p_final, b_a, b_b, b_p, i_batch, i_block, P)
