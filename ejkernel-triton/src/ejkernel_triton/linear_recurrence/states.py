"""Kernels that compute the state before every segment: each segment from zero, then a scan over segments."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.tiles import (
    add_to_state,
    edge_decays,
    hi_plus_lo,
    load_scales,
    load_tile,
    log2_decays,
    position_of,
    scalar_logs,
    segment_of,
    split_hi_lo,
    state_of,
    stored_values,
    token_at,
    totals_of,
)


@triton.jit
def sums_kernel(
    p_g,
    p_gamma,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_hi,
    p_lo,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Cumulative scalar log decays of each chunk `[b, segments, H, SEGMENT]`; missing tokens add 0."""
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    BLOCKS: tl.constexpr = (R.heads + HEADS - 1) // HEADS
    i_block = tl.program_id(0) % BLOCKS
    i_chunk = tl.program_id(0) // BLOCKS % CHUNKS
    i_segment = tl.program_id(0) // (BLOCKS * CHUNKS) % segments
    i_batch = tl.program_id(0) // (BLOCKS * CHUNKS) // segments
    _, i_token, count, valid, _, _ = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    o_row, i_head = tl.arange(0, CHUNK), i_block * HEADS + tl.arange(0, HEADS)
    i_position = i_chunk * CHUNK + o_row
    m_log = ((i_position < count) & valid)[:, None] & (i_head < R.heads)[None, :]
    i_token = i_batch.to(tl.int64) * length + i_token
    if R.reverse:
        i_token = i_token - i_position
    else:
        i_token = i_token + i_position
    o_log = i_token[:, None] * R.g_heads + (i_head // (R.heads // R.g_heads))[None, :]
    b_log = tl.load(p_g + o_log, mask=m_log, other=0.0).to(tl.float32)  # [CHUNK, HEADS]
    if R.gamma_heads > 0:
        o_gamma = i_head // (R.heads // R.gamma_heads)
        if R.gamma_batch:
            o_gamma += i_batch * R.gamma_heads
        b_log += tl.load(p_gamma + o_gamma, mask=i_head < R.heads, other=0.0).to(tl.float32)[None, :]
    b_hi, b_lo = split_hi_lo(log2_decays(tl.where(m_log, b_log, 0.0)), R)
    o_sum = ((i_batch * segments + i_segment).to(tl.int64) * R.heads + i_head[None, :]) * SEGMENT + i_position[:, None]
    m_sum = (i_head < R.heads)[None, :] & (o_row >= 0)[:, None]
    tl.store(p_hi + o_sum, tl.cumsum(b_hi, axis=0), mask=m_sum)
    if R.hi_lo:
        tl.store(p_lo + o_sum, tl.cumsum(b_lo, axis=0), mask=m_sum)


@triton.jit
def segment_states_kernel(
    p_key,
    p_value,
    p_scale,
    p_hi,
    p_lo,
    p_gamma,
    p_totals,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_state,
    p_log,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    FINAL: tl.constexpr,
):
    """The state after a segment that starts from zero, and the base-2 logarithm of its decay. FINAL: also after the segments that
    no other one of their sequence follows; nothing is stored for those otherwise."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_segment = tl.program_id(0) // (BLOCKS * R.heads) % segments
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // segments
    i_column = i_block * BLOCK_V
    _, i_first, count, wanted, last, i_position = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    if not FINAL:
        if R.back:
            wanted = wanted & (i_position > 0)
        else:
            wanted = wanted & (last == 0)
    count = tl.where(wanted, count, 0)
    i_first = i_batch.to(tl.int64) * length + i_first
    chunks = tl.cdiv(count, CHUNK)
    o_sums = ((i_batch * segments + i_segment).to(tl.int64) * R.heads + i_head) * SEGMENT

    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if R.decay == "key":
        b_total = tl.zeros([BLOCK_K], tl.float32)
    else:
        b_total = 0.0
    for i_step in range(chunks):
        i_position = position_of(i_step, chunks, CHUNK, R)
        rows = count - i_position
        i_token = token_at(i_first, i_position, R)
        b_key = load_tile(p_key, i_token, i_head, 0, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
        b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
        if R.value_scale_heads > 0:
            b_scale = load_scales(p_scale, i_token, i_head, rows, CHUNK, FULL_CHUNKS, R)
        if R.decay == "scalar":
            b_hi, b_lo, hi, lo = scalar_logs(
                p_hi, p_lo, p_gamma, i_batch, i_head, o_sums + i_position, rows, CHUNK, FULL_CHUNKS, R
            )
            b_weight = edge_decays(b_hi, b_lo, hi, lo, R)[1]
            if R.value_scale_heads > 0:
                b_weight *= b_scale
            b_value = stored_values(b_value * (b_weight * R.update_scale)[:, None], b_value, R)
            b_sum = hi_plus_lo(hi, lo, R)
            b_state *= tl.exp2(b_sum)
            b_total += b_sum
        elif R.decay == "key":
            b_sum = totals_of(p_totals, o_sums + i_position, 0, rows, CHUNK, R.width, BLOCK_K)
            b_state *= tl.exp2(b_sum)[:, None]
            b_total += b_sum
        elif R.value_scale_heads > 0:
            b_value = stored_values(b_value * b_scale[:, None], b_value, R)
        elif R.update_scale != 1.0:
            b_value = (b_value.to(tl.float32) * R.update_scale).to(b_key.dtype)
        b_state = add_to_state(b_state, tl.trans(b_key), b_value, R)

    i_state = i_batch * segments + i_segment
    p_out, m_out = state_of(p_state, i_state, i_head, i_column, R, BLOCK_K, BLOCK_V)
    tl.store(p_out, b_state, mask=m_out & wanted)
    if R.decay == "key":
        o_row = tl.arange(0, BLOCK_K)
        p_log += (i_state.to(tl.int64) * R.heads + i_head) * R.width
        tl.store(p_log + o_row, b_total, mask=(o_row < R.width) & (i_block == 0) & wanted)
    elif R.decay == "scalar":
        tl.store(p_log + i_state.to(tl.int64) * R.heads + i_head, b_total, mask=(i_block == 0) & wanted)


@triton.jit
def scan_states_kernel(
    p_state,
    p_log,
    p_initial,
    p_first,
    segments,
    sequences,
    p_before,
    p_final,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
):
    """The state before each segment, and if FINAL after the last one of a sequence. Backward in time, "before" means later."""
    SIZE: tl.constexpr = R.width * R.channels
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_sequence = tl.program_id(0) // (BLOCKS * R.heads) % sequences
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // sequences
    o_state = i_block * BLOCK + tl.arange(0, BLOCK)
    m_state = o_state < SIZE
    if R.packed:
        p_first += (0 if R.shared else i_batch) * (sequences + 3) + i_sequence + 1
        first, end = tl.load(p_first), tl.load(p_first + 1)
    else:
        first, end = 0, segments
    o_sequence = ((i_batch * sequences + i_sequence).to(tl.int64) * R.heads + i_head) * SIZE
    b_state = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        b_state = tl.load(p_initial + o_sequence + o_state, mask=m_state, other=0.0).to(tl.float32)
    for i_step in tl.range(0, end - first, num_stages=4):
        if R.back:
            i_segment = end - 1 - i_step
        else:
            i_segment = first + i_step
        o_segment = (i_batch * segments + i_segment).to(tl.int64) * R.heads + i_head
        read = (i_step + 1 < end - first) | FINAL
        b_own = tl.load(p_state + o_segment * SIZE + o_state, mask=m_state & read, other=0.0)
        tl.store(p_before + o_segment * SIZE + o_state, b_state, mask=m_state)
        if R.decay == "key":
            b_state *= tl.exp2(tl.load(p_log + o_segment * R.width + o_state // R.channels, mask=m_state & read, other=0.0))
        elif R.decay == "scalar":
            b_state *= tl.exp2(tl.load(p_log + o_segment, mask=read, other=0.0))
        b_state += b_own
    if FINAL:
        tl.store(p_final + o_sequence + o_state, b_state, mask=m_state)
