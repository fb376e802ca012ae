"""The recurrence as it is written, token after token: for a few tokens, where reading and writing the state is all the work, and
for outputs before the first value that is not finite, once more.

The products inside a chunk multiply every token by 0 that others do not see, and 0 times NaN is NaN: a token that is not finite
reaches the earlier ones of its chunk. It also reaches every later output, so the last one of a segment tells, and only then is the
segment walked token after token.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.tiles import MIN_LOG, gamma_of, load_vector, segment_of, skip_of, state_of, vector_at


@triton.jit
def is_finite(p_row, m_row):
    """Whether all numbers of a row are."""
    b_row = tl.load(p_row, mask=m_row, other=0.0).to(tl.float32)
    return tl.sum(b_row * 0.0, axis=0) == 0.0


@triton.jit
def recurrent_kernel(
    p_query,
    p_key,
    p_value,
    p_scale,
    p_skip,
    p_g,
    p_gamma,
    p_gk,
    p_bonus,
    p_before,
    p_found,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_out,
    p_final,
    R: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BEFORE: tl.constexpr,
    FINAL: tl.constexpr,
    BONUS_HEADS: tl.constexpr,
    BONUS_BATCH: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """Outputs of a segment's tokens. BEFORE, FINAL: whether there are states before segments, and whether those after them are
    wanted. BONUS_HEADS, BONUS_BATCH: of the bonus, 0 without, and whether each batch member has its own. REPAIR: p_found has the
    outputs, which p_out aliases, and only segments whose last one is not finite are walked."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    i_column = tl.program_id(0) % BLOCKS * BLOCK_V
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_segment = tl.program_id(0) // (BLOCKS * R.heads) % segments
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // segments
    _, i_first, count, valid, _, _ = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    i_first = i_batch.to(tl.int64) * length + i_first
    if R.reverse:
        step = -1
    else:
        step = 1
    wanted = valid
    if REPAIR:
        p_row, m_row = vector_at(p_found, i_first + (count - 1) * step, i_head, i_column, R.heads, R.channels, BLOCK_V, R)
        wanted = valid & (count > 1)
        if wanted:
            wanted = not is_finite(p_row, m_row)
    if wanted:
        p_tile, m_tile = state_of(p_before, i_batch * segments + i_segment, i_head, i_column, R, BLOCK_K, BLOCK_V)
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if BEFORE:
            b_state = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
        if R.skip_heads > 0:
            skip = skip_of(p_skip, i_batch, i_head, R)
        for i_step in range(count):
            i_token = i_first + i_step * step
            b_query = load_vector(p_query, i_token, i_head, 0, R.query_heads, R.width, BLOCK_K, R) * R.scale
            b_key = load_vector(p_key, i_token, i_head, 0, R.key_heads, R.width, BLOCK_K, R)
            b_value = load_vector(p_value, i_token, i_head, i_column, R.value_heads, R.channels, BLOCK_V, R)
            if R.skip_heads > 0:
                b_skipped = skip * b_value
            if R.value_scale_heads > 0:
                p_factor = p_scale + i_token * R.value_scale_heads + i_head // (R.heads // R.value_scale_heads)
                b_value *= tl.load(p_factor).to(tl.float32)
            if BONUS_HEADS > 0:
                i_row = i_batch if BONUS_BATCH else 0
                b_bonus = load_vector(p_bonus, i_row, i_head, 0, BONUS_HEADS, R.width, BLOCK_K, R)
                b_out = tl.sum(b_state * b_query[:, None], axis=0) + tl.sum(b_query * b_bonus * b_key, axis=0) * b_value
            if R.decay == "key":
                b_log = load_vector(p_gk, i_token, i_head, 0, R.gk_heads, R.width, BLOCK_K, R)
                b_state *= tl.exp(tl.where(b_log < MIN_LOG, MIN_LOG, b_log))[:, None]
            if R.decay == "scalar":
                log = 0.0
                if R.g_heads > 0:
                    log += tl.load(p_g + i_token * R.g_heads + i_head // (R.heads // R.g_heads)).to(tl.float32)
                if R.gamma_heads > 0:
                    log += gamma_of(p_gamma, i_batch, i_head, R)
                b_state *= tl.exp(tl.where(log < MIN_LOG, MIN_LOG, log))
            b_state += b_key[:, None] * b_value[None, :]
            if BONUS_HEADS == 0:
                b_out = tl.sum(b_state * b_query[:, None], axis=0)
            if R.skip_heads > 0:
                b_out += b_skipped
            p_row, m_row = vector_at(p_out, i_token, i_head, i_column, R.heads, R.channels, BLOCK_V, R)
            tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_row)
        if FINAL:
            p_tile, m_tile = state_of(p_final, i_batch * segments + i_segment, i_head, i_column, R, BLOCK_K, BLOCK_V)
            tl.store(p_tile, b_state, mask=m_tile)
