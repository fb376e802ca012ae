"""The recurrence as it is written, token after token, in the general form. One program per sequence, head and block of channels of
value, with its part of the state in registers: for a few tokens, where reading and writing the state is all the work."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton.delta_rule.tiles import first_token, inverse_length, load_state, sequence_of, squares_of, store_state
from ejkernel_triton.linear_recurrence.recurrent import is_finite
from ejkernel_triton.linear_recurrence.tiles import MIN_LOG, load_vector, vector_at


@triton.jit
def recurrent_kernel(
    p_query,
    p_key,
    p_value,
    p_beta,
    p_decay,
    p_a,
    p_b,
    p_initial,
    p_bounds,
    p_first,
    p_found,
    length,
    sequences,
    p_out,
    p_final,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    DEPTH: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """INITIAL, FINAL: whether there are states before sequences, and whether those after them are wanted. REPAIR: p_found has the
    outputs, which p_out aliases, and only sequences whose last one is not finite are walked, see `linear_recurrence.recurrent`."""
    BLOCKS: tl.constexpr = (R.channels + BLOCK_V - 1) // BLOCK_V
    members = sequences + 1 if R.packed else sequences
    i_block = tl.program_id(0) % BLOCKS
    i_head = tl.program_id(0) // BLOCKS % R.heads
    i_sequence = tl.program_id(0) // (BLOCKS * R.heads) % members
    i_batch = tl.program_id(0) // (BLOCKS * R.heads) // members
    i_column = i_block * BLOCK_V
    begin, end, _ = sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R)
    i_member = i_batch.to(tl.int64) * length
    wanted = True
    if REPAIR:
        i_last = i_member + first_token(begin, end, tl.maximum(end - begin - 1, 0), R)
        p_row, m_row = vector_at(p_found, i_last, i_head, i_column, R.heads, R.channels, BLOCK_V, R)
        wanted = not is_finite(p_row, m_row & (end > begin) & (i_sequence < sequences))
    if wanted & (i_sequence < sequences):
        i_state = i_batch * sequences + i_sequence
        b_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if INITIAL:
            b_state = load_state(p_initial, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V).to(tl.float32)
        for i_step in tl.range(0, end - begin, num_stages=DEPTH):
            i_token = i_member + first_token(begin, end, i_step, R)
            b_query = load_vector(p_query, i_token, i_head, 0, R.query_heads, R.width, BLOCK_K, R)
            b_key = load_vector(p_key, i_token, i_head, 0, R.key_heads, R.width, BLOCK_K, R)
            b_value = load_vector(p_value, i_token, i_head, i_column, R.value_heads, R.channels, BLOCK_V, R)
            if R.normalised:
                b_query *= inverse_length(squares_of(b_query, 0))
                b_key *= inverse_length(squares_of(b_key, 0))
            if R.beta_heads > 0:
                beta = tl.load(p_beta + i_token * R.beta_heads + i_head // (R.heads // R.beta_heads)).to(tl.float32)
            else:
                beta = 1.0
            if R.b_heads > 0:
                b_read = load_vector(p_b, i_token, i_head, 0, R.b_heads, R.width, BLOCK_K, R)
                b_held = tl.sum(b_state * b_read[:, None], axis=0)  # [BLOCK_V]
            if R.decay == "channel":
                b_log = load_vector(p_decay, i_token, i_head, 0, R.decay_heads, R.width, BLOCK_K, R)
                b_state *= tl.exp(tl.where(b_log < MIN_LOG, MIN_LOG, b_log))[:, None]
            if R.decay == "scalar":
                log = tl.load(p_decay + i_token * R.decay_heads + i_head // (R.heads // R.decay_heads)).to(tl.float32)
                b_state *= tl.exp(tl.where(log < MIN_LOG, MIN_LOG, log))
            if R.b_heads == 0:
                b_held = tl.sum(b_state * b_key[:, None], axis=0)
            if R.a_heads > 0:
                b_write = load_vector(p_a, i_token, i_head, 0, R.a_heads, R.width, BLOCK_K, R)
                b_state += b_write[:, None] * b_held[None, :] + b_key[:, None] * (beta * b_value)[None, :]
            else:
                b_state += b_key[:, None] * (beta * (b_value - b_held))[None, :]
            b_out = tl.sum(b_state * (b_query * R.scale)[:, None], axis=0)
            p_row, m_row = vector_at(p_out, i_token, i_head, i_column, R.heads, R.channels, BLOCK_V, R)
            tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_row)
        if FINAL:
            store_state(p_final, b_state, i_state, i_head, 0, i_column, R, BLOCK_K, BLOCK_V)
    if (not REPAIR) & (i_sequence >= sequences):
        for i_step in range(end - begin):
            i_token = i_member + first_token(begin, end, i_step, R)
            p_row, m_row = vector_at(p_out, i_token, i_head, i_column, R.heads, R.channels, BLOCK_V, R)
            tl.store(p_row, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=m_row)
