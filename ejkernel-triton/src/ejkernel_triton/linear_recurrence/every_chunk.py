"""Gradients of all chunks at once, from states that are stored for every chunk.

For scalar decays, where heads share queries and keys as in Mamba-2. A program holds queries and keys of a chunk and runs heads one
after the other; the gradients that they share are summed in its registers. Those of scores are summed over heads before they are
multiplied by keys and queries. Gradients of log decays have the terms of `fused_chunk`. A chunk lies in one sequence: packed ones
have a table of chunks, those of tokens outside of every sequence included.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM102, SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.tiles import (
    edge_decays,
    load_scales,
    load_tile,
    row_of,
    scalar_logs,
    segment_of,
    skip_of,
    state_of,
    store_tile,
)


@triton.jit
def chunk_states_kernel(
    p_key,
    p_value,
    p_scale,
    p_hi,
    p_lo,
    p_gamma,
    p_initial,
    p_others,
    p_chunk,
    chunks,
    p_bounds,
    p_first,
    p_sequence,
    length,
    segments,
    sequences,
    p_before,
    p_final,
    p_around,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    INITIAL: tl.constexpr,
    WHOLE: tl.constexpr,
    AROUND: tl.constexpr,
):
    """The states before all chunks `[b, chunks, H, d, v]`, rounded, and after sequences with tokens `[b, n, H, d, v]`. Backward in
    time, "before" means later.

    One program computes BLOCK_K rows and BLOCK_V columns of one head's states in a segment. BLOCK_K divides the rows or holds all.
    p_chunk: the first chunk of each sequence. INITIAL: p_initial has the states before segments, or, if WHOLE, before sequences,
    each of which is a segment.
    AROUND: where R.back, also what pairs of tokens around each chunk give to the gradients of its log decays, `[b, chunks, H,
    programs]`: the state before it, from p_others, times the gradient of that after it.
    """
    ROWS: tl.constexpr = (R.width + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    i_row = tl.program_id(0) % ROWS * BLOCK_K
    i_column = tl.program_id(0) // ROWS % BLOCKS * BLOCK_V
    i_head = tl.program_id(0) // (ROWS * BLOCKS) % R.heads
    i_segment = tl.program_id(0) // (ROWS * BLOCKS * R.heads) % segments
    i_batch = tl.program_id(0) // (ROWS * BLOCKS * R.heads) // segments
    i_sequence, i_first, count, valid, last, i_place = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R, SEGMENT
    )
    i_first = i_batch.to(tl.int64) * length + i_first
    i_begin = i_place // CHUNK
    if R.packed:
        i_begin += tl.load(p_chunk + (0 if R.shared else i_batch) * (sequences + 3) + i_sequence + 1)
    steps = tl.cdiv(tl.where(valid, count, 0), CHUNK)
    i_end = i_batch * sequences + i_sequence
    b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        if WHOLE:
            i_start = i_end
        else:
            i_start = i_batch * segments + i_segment
        p_start, m_start = state_of(p_initial + i_row * R.channels, i_start, i_head, i_column, R, BLOCK_K, BLOCK_V)
        b_state = tl.load(p_start, mask=m_start & valid, other=0.0).to(tl.float32)
    for i_step in range(steps):
        if R.back:
            i_local = steps - 1 - i_step
        else:
            i_local = i_step
        i_chunk = i_begin + i_local
        i_position = i_local * CHUNK
        rows = count - i_position
        if R.reverse:
            i_token = i_first - i_position
        else:
            i_token = i_first + i_position
        b_key = load_tile(p_key, i_token, i_head, i_row, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
        b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
        o_sums = ((i_batch * chunks + i_chunk).to(tl.int64) * R.heads + i_head) * CHUNK
        b_hi, b_lo, hi, lo = scalar_logs(p_hi, p_lo, p_gamma, i_batch, i_head, o_sums, rows, CHUNK, FULL_CHUNKS, R)
        b_update = edge_decays(b_hi, b_lo, hi, lo, R)[1]
        if R.value_scale_heads > 0:
            b_update *= load_scales(p_scale, i_token, i_head, rows, CHUNK, FULL_CHUNKS, R)
        p_tile, m_tile = state_of(
            p_before + i_row * R.channels, i_batch * chunks + i_chunk, i_head, i_column, R, BLOCK_K, BLOCK_V
        )
        tl.store(p_tile, b_state.to(p_before.dtype.element_ty), mask=m_tile)
        if AROUND:
            i_around = i_batch * chunks + i_chunk
            p_other, m_other = state_of(p_others + i_row * R.channels, i_around, i_head, i_column, R, BLOCK_K, BLOCK_V)
            around = tl.sum(tl.sum(tl.load(p_other, mask=m_other, other=0.0) * b_state, axis=1), axis=0)
            p_around_chunk = p_around + (i_around.to(tl.int64) * R.heads + i_head) * (ROWS * BLOCKS)
            tl.store(p_around_chunk + tl.program_id(0) % (ROWS * BLOCKS), around * tl.exp2(hi))
        b_weighted = (b_value * (b_update * R.update_scale)[:, None]).to(b_key.dtype)
        b_state *= tl.exp2(hi)
        b_state = tl.dot(tl.trans(b_key), b_weighted, b_state)
    p_last, m_last = state_of(p_final + i_row * R.channels, i_end, i_head, i_column, R, BLOCK_K, BLOCK_V)
    final = (i_place == 0) if R.back else last
    tl.store(p_last, b_state, mask=m_last & valid & final)


@triton.jit
def load_state(p, i_index, i_head, i_column, rows, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """The state `[BLOCK_K, BLOCK_V]` of one head, 0 where there is none: in packed sequences, if a chunk has no rows."""
    p_tile, m_tile = state_of(p, i_index, i_head, i_column, R, BLOCK_K, BLOCK_V)
    if R.packed:
        m_tile = m_tile & (rows > 0)
    if R.width % BLOCK_K == 0 and R.channels % BLOCK_V == 0 and not R.packed:
        b_state = tl.load(p_tile)
    else:
        b_state = tl.load(p_tile, mask=m_tile, other=0.0)
    return b_state


@triton.jit
def chunk_of(
    p_bounds, p_first, p_sequence, length, chunks, sequences, PARTS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr
):
    """A program's part of the heads, batch member and chunk; the chunk's first token, its tokens, and those that take part."""
    i_chunk = tl.program_id(0) // PARTS % chunks
    i_batch = tl.program_id(0) // PARTS // chunks
    _, i_token, count, valid, _, _ = segment_of(
        p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R, CHUNK
    )
    i_token = i_batch.to(tl.int64) * length + i_token
    return tl.program_id(0) % PARTS, i_batch, i_chunk, i_token, count, tl.where(valid, count, 0)


@triton.jit
def sum_tile_of(p, i_token, i_part, rows, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):
    """Pointers to a part's sums `[CHUNK, BLOCK_K]`, from `[tokens, PARTS, d]`, and which of them exist."""
    o_row, o_column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    m_sum = (o_row < rows)[:, None] & (o_column < R.width)[None, :]
    if R.reverse:
        o_row = -o_row
    p_sum = p + (i_token * PARTS + i_part) * R.width
    return p_sum + o_row[:, None] * (PARTS * R.width) + o_column[None, :], m_sum


@triton.jit
def state_and_decays(
    p_states, p_hi, p_lo, p_gamma, i_batch, i_chunk, chunks, batch, i_head, i_block, rows, R: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FULL_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a block of value channels of a head: the state, log decays, their `edge_decays`, and where gradients of the
    logs are stored."""
    i_row = i_batch * chunks + i_chunk
    b_state = load_state(p_states, i_row, i_head, i_block * BLOCK_V, rows, R, BLOCK_K, BLOCK_V)
    o_sums = (i_row.to(tl.int64) * R.heads + i_head) * CHUNK
    b_hi, b_lo, hi, lo = scalar_logs(p_hi, p_lo, p_gamma, i_batch, i_head, o_sums, rows, CHUNK, FULL_CHUNKS, R)
    b_read, b_update = edge_decays(b_hi, b_lo, hi, lo, R)
    o_log = o_sums + (i_block * batch).to(tl.int64) * chunks * (R.heads * CHUNK)
    return b_state, b_hi, b_read, b_update, o_log + tl.arange(0, CHUNK)


@triton.jit
def query_gradients_kernel(
    p_query,
    p_d_out,
    p_hi,
    p_lo,
    p_gamma,
    p_before,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_query,
    p_log,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The part of d_query that comes from states, and `query . d_query` of it. R is that of the forward phase.

    p_before: the states before all chunks. MEMBERS: blocks of value channels, of one or more heads of a group, that a program runs.
    d_query `[b, t, parts, d]` are their sums, p_log `[blocks, b, chunks, H, CHUNK]` is that of each.
    """
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = R.heads * BLOCKS // MEMBERS
    i_part, i_batch, i_chunk, i_token, stored, rows = chunk_of(
        p_bounds, p_first, p_sequence, length, chunks, sequences, PARTS, CHUNK, R
    )
    if R.packed:
        if stored == 0:  # the table has room for more chunks than there are
            return
    batch = tl.num_programs(0) // PARTS // chunks
    i_any = i_part * MEMBERS // BLOCKS
    b_query = load_tile(p_query, i_token, i_any, 0, rows, R.query_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
    b_d_query = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for i_member in range(MEMBERS):
        i_head, i_block = (i_part * MEMBERS + i_member) // BLOCKS, (i_part * MEMBERS + i_member) % BLOCKS
        i_column = i_block * BLOCK_V
        b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
        b_before, _, b_read, _, o_log = state_and_decays(
            p_before, p_hi, p_lo, p_gamma, i_batch, i_chunk, chunks, batch, i_head, i_block, rows, R, CHUNK, BLOCK_K, BLOCK_V,
            FULL_CHUNKS,
        )  # fmt: skip
        b_read *= R.scale
        b_log = tl.sum(tl.dot(b_query, b_before) * b_d_out, axis=1) * b_read
        tl.store(p_log + o_log, b_log)
        b_d_query = tl.dot((b_d_out * b_read[:, None]).to(b_d_out.dtype), tl.trans(b_before), b_d_query)
    p_sum, m_sum = sum_tile_of(p_d_query, i_token, i_part, stored, PARTS, BLOCK_K, CHUNK, R)
    tl.store(p_sum, b_d_query, mask=m_sum)


@triton.jit
def key_gradients_kernel(
    p_query,
    p_key,
    p_value,
    p_scale,
    p_skip,
    p_d_out,
    p_hi,
    p_lo,
    p_gamma,
    p_after,
    p_from_states,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_query,
    p_d_key,
    p_d_value,
    p_log,
    p_d_scale,
    p_d_skip,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The gradients of value and key, and of query, whose part that comes from states is p_from_states.

    p_after: the gradients of the states after all chunks. p_log `[2, blocks, b, chunks, H, CHUNK]`: `query . d_query - key . d_key`
    of pairs in the chunk, then `key . d_key` of what later chunks read. Scores are computed anew for every head: registers do not
    hold them beside the sums. Shapes as in `query_gradients_kernel`; of the gradients of factors, p_d_scale `[blocks, b, t, H]` and
    p_d_skip `[blocks, b, chunks, H]`.
    """
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = R.heads * BLOCKS // MEMBERS
    i_part, i_batch, i_chunk, i_token, stored, rows = chunk_of(
        p_bounds, p_first, p_sequence, length, chunks, sequences, PARTS, CHUNK, R
    )
    if R.packed:
        if stored == 0:  # the table has room for more chunks than there are
            return
    batch = tl.num_programs(0) // PARTS // chunks
    o_row = tl.arange(0, CHUNK)
    m_seen = o_row[:, None] <= o_row[None, :]  # rows are keys, columns queries
    i_any = i_part * MEMBERS // BLOCKS
    b_query = load_tile(p_query, i_token, i_any, 0, rows, R.query_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
    b_key = load_tile(p_key, i_token, i_any, 0, rows, R.key_heads, R.width, BLOCK_K, CHUNK, FULL_CHUNKS, R)
    b_d_key = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    b_d_pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for i_member in range(MEMBERS):
        i_head, i_block = (i_part * MEMBERS + i_member) // BLOCKS, (i_part * MEMBERS + i_member) % BLOCKS
        i_column = i_block * BLOCK_V
        b_value = load_tile(p_value, i_token, i_head, i_column, rows, R.value_heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
        b_d_out = load_tile(p_d_out, i_token, i_head, i_column, rows, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)
        b_after, b_hi, _, b_update, o_log = state_and_decays(
            p_after, p_hi, p_lo, p_gamma, i_batch, i_chunk, chunks, batch, i_head, i_block, rows, R, CHUNK, BLOCK_K, BLOCK_V,
            FULL_CHUNKS,
        )  # fmt: skip
        b_weight = b_update
        if R.value_scale_heads > 0:
            b_scale = load_scales(p_scale, i_token, i_head, rows, CHUNK, FULL_CHUNKS, R)
            b_weight = b_update * b_scale
        b_d_key = tl.dot((b_value * b_weight[:, None]).to(b_value.dtype), tl.trans(b_after), b_d_key)
        b_decay = tl.where(m_seen, tl.exp2(b_hi[None, :] - b_hi[:, None]), 0.0)

        b_pairs = tl.dot(b_key, tl.trans(b_query)) * R.scale
        b_grad = tl.dot(b_value, tl.trans(b_d_out)) * b_decay
        if R.value_scale_heads > 0:
            b_d_pairs += b_grad * b_scale[:, None]
        else:
            b_d_pairs += b_grad
        if R.skip_heads > 0:
            m_own = o_row[:, None] == o_row[None, :]
            d_skip = tl.sum(tl.sum(tl.where(m_own, b_grad, 0.0), axis=1), axis=0)
            o_skip = ((i_block * batch + i_batch).to(tl.int64) * chunks + i_chunk) * R.heads + i_head
            tl.store(p_d_skip + o_skip, d_skip)
        b_grad *= b_pairs
        if R.value_scale_heads > 0:
            b_d_scale = tl.sum(b_grad, axis=1)
            b_log = tl.sum(b_grad * b_scale[:, None], axis=0) - b_d_scale * b_scale
            b_pairs *= b_scale[:, None]
        else:
            b_log = tl.sum(b_grad, axis=0) - tl.sum(b_grad, axis=1)
        b_pairs *= b_decay
        if R.skip_heads > 0:
            b_pairs += tl.where(m_own, skip_of(p_skip, i_batch, i_head, R), 0.0)  # the output takes as much of its own value
        b_weighted = b_pairs.to(b_d_out.dtype)
        b_d_value = tl.dot(b_key, b_after)
        if R.value_scale_heads > 0:
            b_product = tl.sum(b_d_value * b_value, axis=1)
            p_row = row_of(p_d_scale, i_block * batch.to(tl.int64) * length + i_token, i_head, R.heads, CHUNK, R)
            tl.store(p_row, b_d_scale + b_product * b_update, mask=o_row < stored)
            b_d_value *= b_weight[:, None]
            b_later = b_product * b_weight
        else:
            b_d_value *= b_update[:, None]
            b_later = tl.sum(b_d_value * b_value, axis=1)
        tl.store(p_log + o_log, b_log)
        tl.store(p_log + (BLOCKS * batch).to(tl.int64) * chunks * (R.heads * CHUNK) + o_log, b_later)
        b_d_value = tl.dot(b_weighted, b_d_out, b_d_value)
        store_tile(p_d_value, b_d_value, i_token, i_head, i_column, stored, R.heads, R.channels, BLOCK_V, CHUNK, FULL_CHUNKS, R)

    b_d_pairs = (b_d_pairs * R.scale).to(b_query.dtype)
    b_d_key = tl.dot(b_d_pairs, b_query, b_d_key)
    p_sum, m_sum = sum_tile_of(p_d_key, i_token, i_part, stored, PARTS, BLOCK_K, CHUNK, R)
    tl.store(p_sum, b_d_key.to(p_d_key.dtype.element_ty), mask=m_sum)
    p_sum, m_sum = sum_tile_of(p_from_states, i_token, i_part, rows, PARTS, BLOCK_K, CHUNK, R)
    b_d_query = tl.dot(tl.trans(b_d_pairs), b_key, tl.load(p_sum, mask=m_sum, other=0.0))
    p_sum, m_sum = sum_tile_of(p_d_query, i_token, i_part, stored, PARTS, BLOCK_K, CHUNK, R)
    tl.store(p_sum, b_d_query.to(p_d_query.dtype.element_ty), mask=m_sum)


@triton.jit
def log_gradients_kernel(
    p_from_states,
    p_rest,
    p_around,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_d_log,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The gradients of log decays `[b, t, H]` of a chunk: sums of `query . d_query` from each token on, of `key . d_key` before it,
    and what pairs around the chunk give.

    BLOCKS: of the logs. PROGRAMS: that computed what is around.
    """
    PARTS: tl.constexpr = (R.heads + HEADS - 1) // HEADS
    i_part, i_batch, i_chunk, i_token, count, rows = chunk_of(
        p_bounds, p_first, p_sequence, length, chunks, sequences, PARTS, CHUNK, R
    )
    batch = tl.num_programs(0) // PARTS // chunks
    i_head = i_part * HEADS + tl.arange(0, HEADS)
    o_row = tl.arange(0, CHUNK)
    m_log = (o_row < count)[:, None] & (i_head < R.heads)[None, :]
    i_row = i_batch * chunks + i_chunk
    b_log = tl.zeros([CHUNK, HEADS], tl.float32)
    b_later = tl.zeros([CHUNK, HEADS], tl.float32)
    for i_block in tl.static_range(BLOCKS):
        i_log = (i_block * batch).to(tl.int64) * chunks + i_row
        o_log = (i_log * R.heads + i_head[None, :]) * CHUNK + o_row[:, None]
        b_log += tl.load(p_from_states + o_log, mask=m_log, other=0.0)
        b_log += tl.load(p_rest + o_log, mask=m_log, other=0.0)
        o_log += (BLOCKS * batch).to(tl.int64) * chunks * (R.heads * CHUNK)
        b_later += tl.load(p_rest + o_log, mask=m_log, other=0.0)
    b_around = tl.zeros([HEADS], tl.float32)
    for i_program in tl.static_range(PROGRAMS):
        o_around = (i_row.to(tl.int64) * R.heads + i_head) * PROGRAMS + i_program
        b_around += tl.load(p_around + o_around, mask=(i_head < R.heads) & (rows > 0), other=0.0)
    b_d_log = tl.cumsum(b_log, axis=0, reverse=True) + (tl.cumsum(b_later, axis=0) - b_later) + b_around[None, :]
    if R.reverse:
        o_token = i_token - o_row
    else:
        o_token = i_token + o_row
    tl.store(p_d_log + o_token[:, None] * R.heads + i_head[None, :], b_d_log, mask=m_log)
