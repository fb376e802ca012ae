"""The chunked recurrence kernels: outputs, and gradients, which are outputs of recurrences over the same tokens.

Within a chunk, MMAs compute the scores of token pairs. Scalar decays weight the scores. Decays per channel are factored at some
token. Where those from the start of the chunk up to the query are mild, that token is the start, and one MMA computes all scores.
Other pairs, on either side of the middle of a block of 2, 4, 8 ... tokens, are split there: one MMA of whole tiles per block size,
without positive exponents (cf. Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023, section
4.3). Which it is depends on nothing that comes later.

Gradients of decays: that of log decay s is the sum over pairs j < s <= i of tokens. Pairs around the chunk of s are the state
before it times the gradient of the state after it, pairs of tokens before s with later chunks their `key . d_key`, pairs of s and
tokens after it with earlier chunks their `query . d_query`. None is a difference of sums that were rounded apart, of which strong
decays would leave the rounding alone. The one difference is that of pairs within the chunk, `query . d_query - key . d_key` from s
on: both have the same rounded factors and cancel. In float32 these are products of three TF32 ones, which differ: a token's pair
with itself is left out, and under decays per head the other pairs are summed one by one (`pairs_around`).
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.tiles import (
    LOG2_E,
    add_to_state,
    dot,
    edge_decays,
    hi_plus_lo,
    level_decays,
    level_pairs,
    load_scales,
    load_tile,
    log_tile,
    prefix_decays,
    row_of,
    scalar_logs,
    segment_of,
    select_sums,
    skip_of,
    start_logs,
    state_of,
    store_tile,
    stored_values,
    suffix_decays,
    totals_of,
    weighted_scores,
)

MIN_AROUND = tl.constexpr(-60.0)
"""Exponent of a chunk's decay from which on pairs of tokens around it count, in powers of two."""


@triton.jit
def own_pairs(b_scores, b_value, CHUNK: tl.constexpr):
    """The values of a chunk, each weighted by its token's score with itself."""
    o_row = tl.arange(0, CHUNK)
    return tl.sum(tl.where(o_row[:, None] == o_row[None, :], b_scores, 0.0), axis=1)[:, None] * b_value


@triton.jit
def add_levels(b_out, b_near, b_scores, b_value, b_own, b_log, CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr):
    """Accumulate values weighted by scores and decays per value channel, and own times them, its decays rounded like those of
    values; pairs of two tokens are split at the middle of blocks of each size."""
    for i_level in range(LEVELS):
        b_decay = level_decays(b_log, i_level, CHUNK, R)
        b_pairs = tl.where(level_pairs(i_level, CHUNK, R.back), b_scores, 0.0)
        b_pairs = dot(b_pairs, (b_value * b_decay).to(b_value.dtype), R)
        b_out += b_decay * b_pairs
        b_near += (b_own * b_decay).to(b_own.dtype) * b_pairs
    return b_out, b_near


@triton.jit
def add_pairs(b_out, b_scores, b_value, b_own, b_log, CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr):
    """The same of all pairs, split at the start of the chunk for queries whose decays are mild. Own times a token's pair with
    itself cancels in gradients; in float32, where its two terms would be rounded apart, it is in neither."""
    b_near = tl.zeros_like(b_out)
    if R.hi_lo:
        b_out += own_pairs(b_scores, b_value, CHUNK)
    if R.wide:
        b_out, b_near = add_levels(b_out, b_near, b_scores, b_value, b_own, b_log, CHUNK, LEVELS, R)
    else:
        b_start, m_mild = start_logs(b_log, CHUNK, R)
        o_row = tl.arange(0, CHUNK)
        if R.back:
            b_start = -b_start
            m_seen = o_row[:, None] <= o_row[None, :]
            m_split = m_seen & m_mild[None, :]
        else:
            m_seen = o_row[:, None] >= o_row[None, :]
            m_split = m_seen & m_mild[:, None]
        if R.hi_lo:
            m_split = m_split & (o_row[:, None] != o_row[None, :])
        b_far = (b_value * tl.exp2(-b_start)).to(b_value.dtype)
        b_pairs = dot(tl.where(m_split, b_scores, 0.0), b_far, R)
        b_start = tl.exp2(b_start)
        b_out += b_start * b_pairs
        b_near += (b_own * b_start).to(b_own.dtype) * b_pairs
        if tl.sum(m_mild.to(tl.int32), axis=0) < CHUNK:
            b_scores = tl.where(m_split, 0.0, b_scores)
            if not R.hi_lo:
                b_out += own_pairs(b_scores, b_value, CHUNK)
            b_out, b_near = add_levels(b_out, b_near, b_scores, b_value, b_own, b_log, CHUNK, LEVELS, R)
    return b_out, b_near


@triton.jit
def pairs_around(b_scores, b_own, b_value, CHUNK: tl.constexpr, R: tl.constexpr):
    """What pairs of tokens in a chunk give to the gradients of its log decays `[CHUNK]`: token s gets the sum over pairs j < s <= i
    of `scores own . value`. Rows are the later tokens."""
    o_row = tl.arange(0, CHUNK)
    b_pairs = b_scores * tl.dot(b_own, tl.trans(b_value), input_precision=R.precision)
    m_earlier = o_row[:, None] > o_row[None, :]
    b_pairs = tl.cumsum(tl.where(m_earlier, b_pairs, 0.0), axis=0, reverse=True)
    return tl.sum(tl.where(m_earlier, b_pairs, 0.0), axis=1)


@triton.jit
def level_scores(b_scores, b_query, b_key, b_log, CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr):
    """Accumulate scores with decays per key channel, split in the same way."""
    o_row = tl.arange(0, CHUNK)
    b_pairs = tl.dot(b_query, tl.trans(b_key), input_precision=R.precision)
    b_scores += tl.where(o_row[:, None] == o_row[None, :], b_pairs, 0.0)
    for i_level in range(LEVELS):
        b_decay = level_decays(b_log, i_level, CHUNK, R)
        b_left, b_right = (b_query * b_decay).to(b_query.dtype), (b_key * b_decay).to(b_key.dtype)
        b_pairs = tl.dot(b_left, tl.trans(b_right), input_precision=R.precision)
        b_scores += tl.where(level_pairs(i_level, CHUNK, False), b_pairs, 0.0)
    return b_scores


@triton.jit
def fused_chunk_kernel(
    p_query,
    p_key,
    p_value,
    p_scale,
    p_skip,
    p_hi,
    p_lo,
    p_gamma,
    p_gk,
    p_scores,
    p_totals,
    p_update,
    p_before,
    p_own,
    p_partner,
    p_states,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_out,
    p_last,
    p_log,
    p_kept,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    BEFORE: tl.constexpr,
    LAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LOG: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Outputs of a segment's tokens.

    BEFORE: there are states before the segments. LAST: the states after sequences that have tokens are wanted.
    LOG: 1 writes own . out, of every channel or summed, to p_log (but with PAIRS its share of the gradient of the decays), and the
    states before all chunks to p_kept; 2 takes both, as p_partner and p_states, and writes the gradient of the decays.
    MEMBERS: heads that a program runs one after the other, and whose outputs it sums in p_out, float32 if there are several.
    """
    PARTS: tl.constexpr = R.heads // MEMBERS
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    PAIRS: tl.constexpr = LOG == 1 and R.decay == "scalar" and R.hi_lo
    i_block = tl.program_id(0) % BLOCKS
    i_part = tl.program_id(0) // BLOCKS % PARTS
    i_segment = tl.program_id(0) // (BLOCKS * PARTS) % segments
    i_batch = tl.program_id(0) // (BLOCKS * PARTS) // segments
    i_column = i_block * BLOCK_V
    i_sequence, i_first, count, valid, last, _ = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    i_first = i_batch.to(tl.int64) * length + i_first
    i_state = i_batch * segments + i_segment
    tokens = (tl.num_programs(0) // (BLOCKS * PARTS) // segments).to(tl.int64) * length  # of all members of the batch
    chunks = tl.cdiv(count, CHUNK)
    o_row = tl.arange(0, CHUNK)
    for i_member in range(MEMBERS):
        i_head = i_part * MEMBERS + i_member
        o_sums = ((i_batch * segments + i_segment).to(tl.int64) * R.heads + i_head) * SEGMENT
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if BEFORE:
            p_tile, m_tile = state_of(p_before, i_state, i_head, i_column, R, BLOCK_K, BLOCK_V)
            b_state = tl.load(p_tile, mask=m_tile & valid, other=0.0).to(tl.float32)
        if R.skip_heads > 0:
            skip = skip_of(p_skip, i_batch, i_head, R)
        if TRANSPOSED:
            b_state = tl.trans(b_state)
        for i_step in range(chunks):
            if R.back:
                i_position = (chunks - 1 - i_step) * CHUNK
            else:
                i_position = i_step * CHUNK
            stored = count - i_position
            rows = tl.where(valid, stored, 0)
            if R.reverse:
                i_token = i_first - i_position
            else:
                i_token = i_first + i_position
            if LOG > 0:
                i_kept = i_state * (SEGMENT // CHUNK) + i_position // CHUNK
            if LOG == 1:
                p_kept_tile, m_kept = state_of(p_kept, i_kept, i_head, i_column, R, BLOCK_K, BLOCK_V)
                b_kept = b_state.to(p_kept.dtype.element_ty)
                if TRANSPOSED:
                    b_kept = tl.trans(b_kept)
                tl.store(p_kept_tile, b_kept, mask=m_kept)
            if R.decay == "scalar":
                b_hi, b_lo, hi, lo = scalar_logs(
                    p_hi, p_lo, p_gamma, i_batch, i_head, o_sums + i_position, rows, CHUNK, FULL_CHUNKS, R
                )
            if LOG == 2:
                b_around = tl.zeros([BLOCK_V], tl.float32)
                if R.decay == "scalar":
                    most = hi
                else:
                    b_total = totals_of(p_totals, o_sums + i_position, i_column, rows, CHUNK, R.channels, BLOCK_V)
                    most = tl.max(b_total, axis=0)
                if most > MIN_AROUND:
                    p_kept_tile, m_kept = state_of(p_states, i_kept, i_head, i_column, R, BLOCK_K, BLOCK_V)
                    b_kept = tl.load(p_kept_tile, mask=m_kept, other=0.0)
                    if TRANSPOSED:
                        b_around = tl.sum(b_state * tl.trans(b_kept), axis=1)
                    else:
                        b_around = tl.sum(b_state * b_kept, axis=0)

            b_query = load_tile(p_query, i_token, i_head, 0, rows, R.query_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_key = load_tile(p_key, i_token, i_head, 0, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_value = load_tile(
                p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
            )
            if R.value_scale_heads > 0:
                b_scale = load_scales(p_scale, i_token, i_head, rows, CHUNK, FULL_CHUNKS, R)
            if LOG == 2 or PAIRS or R.decay == "value":
                b_own = load_tile(
                    p_own, i_token, i_head, i_column, rows, R.own_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                )

            if R.decay == "key":
                b_scores = load_tile(p_scores, i_token, i_head, 0, rows, R.heads, CHUNK, CHUNK, CHUNK, FULL_CHUNKS, R)
                b_total = totals_of(p_totals, o_sums + i_position, 0, rows, CHUNK, R.width, BLOCK_K)
                if R.back:
                    b_scores = tl.trans(b_scores)
                b_out = dot(b_query, b_state, R)
                b_out += dot(b_scores, b_value, R)
                b_state *= tl.exp2(b_total)[:, None]
                b_state = tl.dot(tl.trans(b_key), b_value, b_state, input_precision=R.precision)
            elif TRANSPOSED:
                b_scores = tl.dot(b_key, tl.trans(b_query), input_precision=R.precision)
                b_out = dot(b_state, tl.trans(b_query), R)  # [BLOCK_V, CHUNK]
                if R.decay == "scalar":
                    b_read, b_update = edge_decays(b_hi, b_lo, hi, lo, R)
                    if R.value_scale_heads > 0:
                        b_update *= b_scale
                    b_scores = weighted_scores(b_scores, b_hi, b_lo, CHUNK, R, not R.back)
                    b_out *= (b_read * R.read_scale)[None, :]
                    if LOG == 2 or PAIRS:
                        b_far = tl.sum(tl.trans(b_own) * b_out, axis=0)
                    if PAIRS:
                        b_near = pairs_around(tl.trans(b_scores), b_own, b_value, CHUNK, R)
                    b_state *= tl.exp2(hi_plus_lo(hi, lo, R))
                    b_weighted = stored_values(b_value * (b_update * R.update_scale)[:, None], b_value, R)
                else:
                    b_scores = weighted_scores(b_scores, 0.0, 0.0, CHUNK, R, not R.back)
                    b_out *= R.read_scale
                    b_weighted = b_value.to(tl.float32) * R.update_scale
                    if R.value_scale_heads > 0:
                        b_weighted *= b_scale[:, None]
                    b_weighted = stored_values(b_weighted, b_value, R)
                if R.value_scale_heads > 0:
                    b_scores *= b_scale[:, None]
                b_out += dot(tl.trans(b_value), b_scores, R)
                b_out = tl.trans(b_out)
                b_state = add_to_state(b_state, tl.trans(b_weighted), b_key, R)
            else:
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=R.precision)
                b_out = dot(b_query, b_state, R)
                if R.decay == "scalar":
                    b_read, b_update = edge_decays(b_hi, b_lo, hi, lo, R)
                    b_scores = weighted_scores(b_scores, b_hi, b_lo, CHUNK, R, R.back)
                    if R.value_scale_heads > 0:
                        b_update *= b_scale
                        b_scores *= b_scale[None, :]
                    b_out *= (b_read * R.read_scale)[:, None]
                    if LOG == 2 or PAIRS:
                        b_far = tl.sum(b_own * b_out, axis=1)  # [CHUNK]
                    if PAIRS:
                        b_near = pairs_around(b_scores, b_own, b_value, CHUNK, R)
                    b_out += dot(b_scores, b_value, R)
                    b_state *= tl.exp2(hi_plus_lo(hi, lo, R))
                    b_weighted = stored_values(b_value * (b_update * R.update_scale)[:, None], b_value, R)
                elif R.decay == "value":
                    b_log = log_tile(p_gk, i_token, i_head, i_column, rows, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
                    b_scores *= R.scale
                    b_weighted = load_tile(
                        p_update, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                    )
                    b_total = totals_of(p_totals, o_sums + i_position, i_column, rows, CHUNK, R.channels, BLOCK_V)
                    if R.back:
                        b_read = suffix_decays(b_log, CHUNK, R)
                    else:
                        b_read = prefix_decays(b_log, CHUNK, R)
                    b_out *= b_read * R.read_scale
                    b_far = b_own * b_out
                    b_out, b_near = add_pairs(b_out, b_scores, b_value, b_own, b_log, CHUNK, LEVELS, R)
                    b_state *= tl.exp2(b_total)[None, :]
                else:
                    if R.read_scale != 1.0:
                        b_out *= R.read_scale
                    b_scores = weighted_scores(b_scores, 0.0, 0.0, CHUNK, R, R.back)
                    b_weighted = b_value
                    if R.value_scale_heads > 0:
                        b_scores *= b_scale[None, :]
                        b_weighted = stored_values(b_value * b_scale[:, None], b_value, R)
                    b_out += dot(b_scores, b_value, R)
                    if R.update_scale != 1.0:
                        b_weighted = (b_value.to(tl.float32) * R.update_scale).to(b_value.dtype)
                b_state = add_to_state(b_state, tl.trans(b_key), b_weighted, R)

            if R.skip_heads > 0:
                b_out += b_value * skip
            b_sum_out = b_out
            if MEMBERS > 1:
                earlier = tl.where(i_member > 0, stored, 0)
                b_sum_out += load_tile(p_out, i_token, i_head, i_column, earlier, PARTS, R.channels, BLOCK_V, CHUNK, False, R)
            store_tile(p_out, b_sum_out, i_token, i_head, i_column, stored, PARTS, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
            if LOG > 0:
                if R.decay == "scalar":
                    if PAIRS:
                        b_log = tl.cumsum(b_far, axis=0, reverse=True) + b_near
                    elif not R.hi_lo:
                        b_own = load_tile(
                            p_own, i_token, i_head, i_column, rows, R.own_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                        )
                        b_log = tl.sum(b_own * b_out, axis=1)  # [CHUNK]
                    p_row = row_of(p_log, i_block * tokens + i_token, i_head, R.heads, CHUNK, R)
                    if LOG == 2:
                        p_other = row_of(p_partner, i_block * tokens + i_token, i_head, R.heads, CHUNK, R)
                        b_other = tl.load(p_other, mask=o_row < rows, other=0.0)
                        if R.hi_lo:
                            b_log = b_other
                        else:
                            b_log = tl.cumsum(b_other - (b_log - b_far), axis=0, reverse=True)
                        b_log += tl.cumsum(b_far, axis=0) - b_far
                        b_log += tl.exp2(hi_plus_lo(hi, lo, R)) * tl.sum(b_around, axis=0)
                        b_log = tl.where(o_row < rows, b_log, 0.0)
                    tl.store(p_row, b_log, mask=o_row < stored)
                else:
                    if LOG == 2:
                        b_other = load_tile(
                            p_partner, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                        )
                        b_later = tl.where(o_row[:, None] <= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
                        b_before = tl.where(o_row[:, None] > o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
                        b_log = select_sums(b_later, b_other - b_near, False) + select_sums(b_before, b_far, False)
                        b_log += (tl.exp2(b_total) * b_around)[None, :]
                        b_log = tl.where((o_row < rows)[:, None], b_log, 0.0)
                    else:
                        b_log = b_far + b_near
                    store_tile(
                        p_log, b_log, i_token, i_head, i_column, stored, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                    )
        if LAST:
            if TRANSPOSED:
                b_state = tl.trans(b_state)
            p_tile, m_tile = state_of(p_last, i_batch * sequences + i_sequence, i_head, i_column, R, BLOCK_K, BLOCK_V)
            tl.store(p_tile, b_state, mask=m_tile & valid & last)
        if MEMBERS > 1:
            tl.debug_barrier()  # the next head's threads read what others have stored


@triton.jit
def scores_kernel(
    p_query,
    p_key,
    p_gk,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_scores,
    p_read,
    p_update,
    p_totals,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """With decays per key channel: the scores of a chunk, queries decayed from the chunk's start, keys decayed to its end, and
    the base-2 logarithm of the chunk's decay. One program per chunk."""
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    i_head = tl.program_id(0) % R.heads
    i_chunk = tl.program_id(0) // R.heads % CHUNKS
    i_segment = tl.program_id(0) // (CHUNKS * R.heads) % segments
    i_batch = tl.program_id(0) // (CHUNKS * R.heads) // segments
    _, i_token, count, valid, _, _ = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    i_token = i_batch.to(tl.int64) * length + i_token
    rows = tl.where(valid, count - i_chunk * CHUNK, 0)
    if rows > 0:
        if R.reverse:
            i_token -= i_chunk * CHUNK
        else:
            i_token += i_chunk * CHUNK
        o_row = tl.arange(0, CHUNK)
        b_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for i_column in range(0, R.width, BLOCK_K):
            b_query = load_tile(
                p_query, i_token, i_head, i_column, rows, R.query_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R
            )
            b_key = load_tile(p_key, i_token, i_head, i_column, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_log = log_tile(p_gk, i_token, i_head, i_column, rows, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_read = b_query * (prefix_decays(b_log, CHUNK, R) * R.scale)
            store_tile(p_read, b_read, i_token, i_head, i_column, rows, R.heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_update = b_key * suffix_decays(b_log, CHUNK, R)
            store_tile(p_update, b_update, i_token, i_head, i_column, rows, R.heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            o_column = i_column + tl.arange(0, BLOCK_K)
            i_total = ((i_batch * segments + i_segment).to(tl.int64) * R.heads + i_head) * CHUNKS + i_chunk
            tl.store(p_totals + i_total * R.width + o_column, tl.sum(b_log, axis=0) * LOG2_E, mask=o_column < R.width)
            if R.wide:
                b_scores = level_scores(b_scores, b_query, b_key, b_log, CHUNK, LEVELS, R)
            else:
                b_start, m_mild = start_logs(b_log, CHUNK, R)
                b_left = (b_query * tl.exp2(b_start)).to(b_query.dtype)
                b_right = (b_key * tl.exp2(-b_start)).to(b_key.dtype)
                b_pairs = tl.dot(b_left, tl.trans(b_right), input_precision=R.precision)
                b_scores += tl.where((o_row[:, None] >= o_row[None, :]) & m_mild[:, None], b_pairs, 0.0)
                if tl.sum(m_mild.to(tl.int32), axis=0) < CHUNK:
                    b_zero = tl.zeros([CHUNK, CHUNK], tl.float32)
                    b_levels = level_scores(b_zero, b_query, b_key, b_log, CHUNK, LEVELS, R)
                    b_scores += tl.where(m_mild[:, None], 0.0, b_levels)
        store_tile(p_scores, b_scores * R.scale, i_token, i_head, 0, rows, R.heads, CHUNK, CHUNK, CHUNK, FULL_CHUNKS, R)
