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

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
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
    position_of,
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
    token_at,
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
def store_state(
    p, b_state, i_index, i_head, i_column, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TRANSPOSED: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Store a program's part of the state before a chunk."""
    p_tile, m_tile = state_of(p, i_index, i_head, i_column, R, BLOCK_K, BLOCK_V)
    b_stored = b_state.to(p.dtype.element_ty)
    if TRANSPOSED:
        b_stored = tl.trans(b_stored)
    tl.store(p_tile, b_stored, mask=m_tile)


@triton.jit
def state_products(
    p_states, b_state, i_index, i_head, i_column,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TRANSPOSED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The state before a chunk, of the other recurrence, times the state here, summed over the channels of key `[BLOCK_V]`: what
    pairs of tokens around the chunk give to the gradient of its log decays, but for the chunk's own decay."""
    p_tile, m_tile = state_of(p_states, i_index, i_head, i_column, R, BLOCK_K, BLOCK_V)
    b_other = tl.load(p_tile, mask=m_tile, other=0.0)
    if TRANSPOSED:
        b_sums = tl.sum(b_state * tl.trans(b_other), axis=1)
    else:
        b_sums = tl.sum(b_state * b_other, axis=0)
    return b_sums


@triton.jit
def prepared_chunk(b_state, b_query, b_key, b_value, b_scores, b_total, R: tl.constexpr):
    """Outputs and the next state with decays per channel of key, which `scores_kernel` has multiplied into query, key and scores:
    `out = query S + scores value; S <- exp2(total) S + key^T value`."""
    if R.back:
        b_scores = tl.trans(b_scores)
    b_out = dot(b_query, b_state, R)
    b_out += dot(b_scores, b_value, R)
    b_state *= tl.exp2(b_total)[:, None]
    b_state = tl.dot(tl.trans(b_key), b_value, b_state, input_precision=R.precision)
    return b_out, b_state


@triton.jit
def chunk_products(b_state, b_query, b_key, R: tl.constexpr):
    """Scores of the tokens `[query, key]` and reads of the state before the chunk, without decays and scales."""
    b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=R.precision)
    return b_scores, dot(b_query, b_state, R)


@triton.jit
def channel_decay_chunk(
    b_state, b_scores, b_out, b_key, b_value, b_update, b_own, b_log, b_total,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Outputs and the next state with decays per channel of value, and own times the outputs' two terms: that of the state before
    the chunk and that of pairs within it. `b_update` is the value decayed to the next state."""
    if R.back:
        b_read = suffix_decays(b_log, CHUNK, R)
    else:
        b_read = prefix_decays(b_log, CHUNK, R)
    b_out *= b_read * R.read_scale
    b_far = b_own * b_out
    b_out, b_near = add_pairs(b_out, b_scores, b_value, b_own, b_log, CHUNK, LEVELS, R)
    b_state *= tl.exp2(b_total)[None, :]
    b_state = add_to_state(b_state, tl.trans(b_key), b_update, R)
    return b_out, b_state, b_far, b_near


@triton.jit
def scalar_decay_chunk(
    b_state, b_scores, b_out, b_key, b_value, b_scale, b_own, logs,
    CHUNK: tl.constexpr, FAR: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Outputs and the next state with decays per head. FAR asks for own times the outputs' term of the state before the chunk,
    PAIRS for `pairs_around`; they are 0 otherwise."""
    b_hi, b_lo, hi, lo = logs
    b_far, b_near = 0.0, 0.0
    b_read, b_update = edge_decays(b_hi, b_lo, hi, lo, R)
    b_scores = weighted_scores(b_scores, b_hi, b_lo, CHUNK, R, R.back)
    if R.value_scale_heads > 0:
        b_update *= b_scale
        b_scores *= b_scale[None, :]
    b_out *= (b_read * R.read_scale)[:, None]
    if FAR:
        b_far = tl.sum(b_own * b_out, axis=1)  # [CHUNK]
    if PAIRS:
        b_near = pairs_around(b_scores, b_own, b_value, CHUNK, R)
    b_out += dot(b_scores, b_value, R)
    b_state *= tl.exp2(hi_plus_lo(hi, lo, R))
    b_weighted = stored_values(b_value * (b_update * R.update_scale)[:, None], b_value, R)
    b_state = add_to_state(b_state, tl.trans(b_key), b_weighted, R)
    return b_out, b_state, b_far, b_near


@triton.jit
def undecayed_chunk(b_state, b_scores, b_out, b_key, b_value, b_scale, CHUNK: tl.constexpr, R: tl.constexpr):
    """Outputs and the next state without decays."""
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
    return b_out, b_state


@triton.jit
def transposed_chunk(
    b_state, b_query, b_key, b_value, b_scale, b_own, logs,
    CHUNK: tl.constexpr, FAR: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """`scalar_decay_chunk` or `undecayed_chunk` with the state `[BLOCK_V, BLOCK_K]`, scores `[key, query]` and all products
    transposed."""
    b_far, b_near = 0.0, 0.0
    b_scores = tl.dot(b_key, tl.trans(b_query), input_precision=R.precision)
    b_out = dot(b_state, tl.trans(b_query), R)  # [BLOCK_V, CHUNK]
    if R.decay == "scalar":
        b_hi, b_lo, hi, lo = logs
        b_read, b_update = edge_decays(b_hi, b_lo, hi, lo, R)
        if R.value_scale_heads > 0:
            b_update *= b_scale
        b_scores = weighted_scores(b_scores, b_hi, b_lo, CHUNK, R, not R.back)
        b_out *= (b_read * R.read_scale)[None, :]
        if FAR:
            b_far = tl.sum(tl.trans(b_own) * b_out, axis=0)  # [CHUNK]
        if PAIRS:
            b_near = pairs_around(tl.trans(b_scores), b_own, b_value, CHUNK, R)
        b_state *= tl.exp2(hi_plus_lo(hi, lo, R))
        b_weighted = b_value * (b_update * R.update_scale)[:, None]
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
    return b_out, b_state, b_far, b_near


@triton.jit
def scalar_log_gradients(b_products, p_partner, b_far, b_around, logs, o_row, rows, R: tl.constexpr):
    """Gradients of log decays per head `[CHUNK]`, from both recurrences; this one, the second, runs backward in time.

    Pairs within the chunk are `partner - (products - far)` summed from a token on, and with hi_lo the partner itself. Then come
    pairs of the chunk's earlier tokens with later chunks, and pairs around the chunk."""
    b_other = tl.load(p_partner, mask=o_row < rows, other=0.0)
    if R.hi_lo:
        b_log = b_other
    else:
        b_log = tl.cumsum(b_other - (b_products - b_far), axis=0, reverse=True)
    b_log += tl.cumsum(b_far, axis=0) - b_far
    b_log += tl.exp2(hi_plus_lo(logs[2], logs[3], R)) * tl.sum(b_around, axis=0)
    return tl.where(o_row < rows, b_log, 0.0)


@triton.jit
def channel_log_gradients(b_partner, b_far, b_near, b_around, b_total, o_row, rows):
    """The same per channel `[CHUNK, BLOCK_V]`."""
    b_later = tl.where(o_row[:, None] <= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
    b_before = tl.where(o_row[:, None] > o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
    b_log = select_sums(b_later, b_partner - b_near, False) + select_sums(b_before, b_far, False)
    b_log += (tl.exp2(b_total) * b_around)[None, :]
    return tl.where((o_row < rows)[:, None], b_log, 0.0)


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
    LOGS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Outputs of a segment's tokens, chunk after chunk, with the state S in registers.

    With `a_i` the sum of a chunk's log decays up to token i, A that of all of them, and c_j the factors of values:

        out_i = read_scale exp(a_i) q_i S + scale sum_{j <= i} exp(a_i - a_j) (q_i . k_j) c_j v_j + skip v_i
        S <- exp(A) S + update_scale sum_j exp(A - a_j) k_j^T c_j v_j

    Backward in time the sum is over j >= i, with `exp(a_j - a_i)`, and `exp(a_i)` and `exp(A - a_j)` change places. With decays per
    channel the exponentials multiply channels of query and key, or of value.

    Sizes: CHUNK and SEGMENT tokens; BLOCK_K and BLOCK_V channels; FULL_CHUNKS, no chunk has a tail; LEVELS, how often a chunk is
    halved; TRANSPOSED, the state is `[BLOCK_V, BLOCK_K]`; MEMBERS heads that a program runs one after the other, and whose outputs
    it sums in p_out, float32 if there are several.
    States: BEFORE, there are some before the segments; LAST, those after sequences that have tokens are wanted.
    LOGS, gradients of log decays: "first" writes own . out, of every channel or summed, to p_log (but per head with hi_lo its share
    of the gradient), and the states before all chunks to p_kept; "second" takes both, as p_partner and p_states, and writes the
    gradient; "none".
    """
    PARTS: tl.constexpr = R.heads // MEMBERS
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    PAIRS: tl.constexpr = LOGS == "first" and R.decay == "scalar" and R.hi_lo
    FAR: tl.constexpr = LOGS == "second" or PAIRS
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
        o_sums = (i_state.to(tl.int64) * R.heads + i_head) * SEGMENT
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if BEFORE:
            p_tile, m_tile = state_of(p_before, i_state, i_head, i_column, R, BLOCK_K, BLOCK_V)
            b_state = tl.load(p_tile, mask=m_tile & valid, other=0.0).to(tl.float32)
        if R.skip_heads > 0:
            skip = skip_of(p_skip, i_batch, i_head, R)
        if TRANSPOSED:
            b_state = tl.trans(b_state)
        for i_step in range(chunks):
            i_position = position_of(i_step, chunks, CHUNK, R)
            stored = count - i_position
            rows = tl.where(valid, stored, 0)
            i_token = token_at(i_first, i_position, R)
            i_chunk = i_state * (SEGMENT // CHUNK) + i_position // CHUNK
            if LOGS == "first":
                store_state(p_kept, b_state, i_chunk, i_head, i_column, BLOCK_K, BLOCK_V, TRANSPOSED, R)
            logs = None
            if R.decay == "scalar":
                logs = scalar_logs(p_hi, p_lo, p_gamma, i_batch, i_head, o_sums + i_position, rows, CHUNK, FULL_CHUNKS, R)
            if LOGS == "second":
                b_around = tl.zeros([BLOCK_V], tl.float32)
                if R.decay == "scalar":
                    most = logs[2]
                else:
                    b_total = totals_of(p_totals, o_sums + i_position, i_column, rows, CHUNK, R.channels, BLOCK_V)
                    most = tl.max(b_total, axis=0)
                if most > MIN_AROUND:
                    b_around = state_products(p_states, b_state, i_chunk, i_head, i_column, BLOCK_K, BLOCK_V, TRANSPOSED, R)

            b_query = load_tile(p_query, i_token, i_head, 0, rows, R.query_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_key = load_tile(p_key, i_token, i_head, 0, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
            b_value = load_tile(
                p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
            )
            b_scale, b_own = None, None
            if R.value_scale_heads > 0:
                b_scale = load_scales(p_scale, i_token, i_head, rows, CHUNK, FULL_CHUNKS, R)
            if FAR or R.decay == "value":
                b_own = load_tile(
                    p_own, i_token, i_head, i_column, rows, R.own_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                )

            if R.decay == "key":
                b_scores = load_tile(p_scores, i_token, i_head, 0, rows, R.heads, CHUNK, CHUNK, CHUNK, FULL_CHUNKS, R)
                b_total = totals_of(p_totals, o_sums + i_position, 0, rows, CHUNK, R.width, BLOCK_K)
                b_out, b_state = prepared_chunk(b_state, b_query, b_key, b_value, b_scores, b_total, R)
            elif R.decay == "value":
                b_scores, b_out = chunk_products(b_state, b_query, b_key, R)
                b_log = log_tile(p_gk, i_token, i_head, i_column, rows, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
                b_scores *= R.scale
                b_update = load_tile(
                    p_update, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                )
                b_total = totals_of(p_totals, o_sums + i_position, i_column, rows, CHUNK, R.channels, BLOCK_V)
                b_out, b_state, b_far, b_near = channel_decay_chunk(
                    b_state, b_scores, b_out, b_key, b_value, b_update, b_own, b_log, b_total, CHUNK, LEVELS, R
                )
            elif TRANSPOSED:
                b_out, b_state, b_far, b_near = transposed_chunk(
                    b_state, b_query, b_key, b_value, b_scale, b_own, logs, CHUNK, FAR, PAIRS, R
                )
            elif R.decay == "scalar":
                b_scores, b_out = chunk_products(b_state, b_query, b_key, R)
                b_out, b_state, b_far, b_near = scalar_decay_chunk(
                    b_state, b_scores, b_out, b_key, b_value, b_scale, b_own, logs, CHUNK, FAR, PAIRS, R
                )
            else:
                b_scores, b_out = chunk_products(b_state, b_query, b_key, R)
                b_out, b_state = undecayed_chunk(b_state, b_scores, b_out, b_key, b_value, b_scale, CHUNK, R)

            if R.skip_heads > 0:
                b_out += b_value * skip
            b_sum_out = b_out
            if MEMBERS > 1:
                earlier = tl.where(i_member > 0, stored, 0)
                b_sum_out += load_tile(p_out, i_token, i_head, i_column, earlier, PARTS, R.channels, BLOCK_V, CHUNK, False, R)
            store_tile(p_out, b_sum_out, i_token, i_head, i_column, stored, PARTS, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)

            if LOGS != "none" and R.decay == "scalar":
                b_log = None
                if PAIRS:
                    b_log = tl.cumsum(b_far, axis=0, reverse=True) + b_near
                elif not R.hi_lo:
                    b_own = load_tile(
                        p_own, i_token, i_head, i_column, rows, R.own_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                    )
                    b_log = tl.sum(b_own * b_out, axis=1)  # [CHUNK]
                p_row = row_of(p_log, i_block * tokens + i_token, i_head, R.heads, CHUNK, R)
                if LOGS == "second":
                    p_other = row_of(p_partner, i_block * tokens + i_token, i_head, R.heads, CHUNK, R)
                    b_log = scalar_log_gradients(b_log, p_other, b_far, b_around, logs, o_row, rows, R)
                tl.store(p_row, b_log, mask=o_row < stored)
            elif LOGS != "none":
                if LOGS == "second":
                    b_other = load_tile(
                        p_partner, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R
                    )
                    b_log = channel_log_gradients(b_other, b_far, b_near, b_around, b_total, o_row, rows)
                else:
                    b_log = b_far + b_near
                store_tile(p_log, b_log, i_token, i_head, i_column, stored, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
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
