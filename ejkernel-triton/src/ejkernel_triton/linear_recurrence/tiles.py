"""Device functions that the kernels share: tiles of tokens, decays and dots. `R` is a `RecurrenceParams`.

Each exponent is the sum of the log decays between two tokens, without the rounding of a difference of two long sums: a strong decay
costs the weak ones beside it no precision, and exponents are not positive where decays are not. The one exception are decays per
channel that are mild up to a token, see `MAX_START_EXPONENT`. Exponents are powers of two.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

MIN_LOG = tl.constexpr(-90.0)
"""Log decays are clipped here, where the decay is 0 in float32; differences of infinities would be NaN."""
MAX_START_EXPONENT = tl.constexpr(40.0)
"""Largest exponent, in powers of two, between the start of a chunk and a token whose decays are split at the start: they and
their inverses are far from the ends of the range, and in float32 as precise as products."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def segment_of(
    p_bounds, p_first, p_sequence, i_batch, i_segment, length, segments, sequences, R: tl.constexpr, SEGMENT: tl.constexpr
):
    """Sequence of a segment, its first token in time order, its token count, whether the sequence is valid, whether the segment is
    its last, and the segment's position in it.

    The table pads the call's sequences with two invalid ones: the tokens before and after them.
    """
    if R.packed:
        i_member = 0 if R.shared else i_batch
        i_sequence = tl.load(p_sequence + i_member * segments + i_segment)
        used = i_sequence < sequences + 2
        o_bounds = i_member * (sequences + 3) + tl.minimum(i_sequence, sequences + 1)
        begin, end = tl.load(p_bounds + o_bounds), tl.load(p_bounds + o_bounds + 1)
        i_position = (i_segment - tl.load(p_first + o_bounds)) * SEGMENT
        count = tl.where(used, tl.minimum(end - begin - i_position, SEGMENT), 0)
        valid = used & (i_sequence > 0) & (i_sequence <= sequences)
        last = i_segment + 1 == tl.load(p_first + o_bounds + 1)
        i_sequence = tl.minimum(tl.maximum(i_sequence - 1, 0), tl.maximum(sequences - 1, 0))
    else:
        begin, end = 0, length
        i_position = i_segment * SEGMENT
        count = tl.minimum(length - i_position, SEGMENT)
        valid = count > 0
        last = i_segment + 1 == segments
        i_sequence = i_segment * 0
    if R.reverse:
        i_token = end - 1 - i_position
    else:
        i_token = begin + i_position
    return i_sequence, i_token, count, valid, last, i_position


@triton.jit
def position_of(i_step, chunks, CHUNK: tl.constexpr, R: tl.constexpr):
    """A chunk's first token in its segment, in time order; recurrences that run backward in time take the last chunk first."""
    if R.back:
        i_position = (chunks - 1 - i_step) * CHUNK
    else:
        i_position = i_step * CHUNK
    return i_position


@triton.jit
def token_at(i_first, i_position, R: tl.constexpr):
    """The token at a position of a segment whose first one is i_first."""
    if R.reverse:
        i_token = i_first - i_position
    else:
        i_token = i_first + i_position
    return i_token


@triton.jit
def tile_of(
    p,
    i_token,
    i_head,
    i_column,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    R: tl.constexpr,
):
    """Pointers to the rows of a chunk `[CHUNK, BLOCK]`, from token i_token of `[tokens, HEADS, SIZE]` on."""
    o_row = tl.arange(0, CHUNK)
    if R.reverse:
        o_row = -o_row
    o_column = i_column + tl.arange(0, BLOCK)
    p_row = p + i_token.to(tl.int64) * (HEADS * SIZE) + i_head // (R.heads // HEADS) * SIZE
    return p_row + o_row[:, None] * (HEADS * SIZE) + o_column[None, :]


@triton.jit
def load_tile(
    p, i_token, i_head, i_column, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Rows of a chunk, 0 from `rows` on and beyond SIZE. FULL_CHUNKS: no chunk has a tail."""
    p_tile = tile_of(p, i_token, i_head, i_column, HEADS, SIZE, BLOCK, CHUNK, R)
    m_row = tl.arange(0, CHUNK) < rows
    m_column = i_column + tl.arange(0, BLOCK) < SIZE
    if SIZE % BLOCK == 0:
        if FULL_CHUNKS:
            b_tile = tl.load(p_tile)
        else:
            b_tile = tl.load(p_tile, mask=m_row[:, None], other=0.0)
    else:
        b_tile = tl.load(p_tile, mask=m_row[:, None] & m_column[None, :], other=0.0)
    return b_tile


@triton.jit
def store_tile(
    p, b_tile, i_token, i_head, i_column, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    FULL_CHUNKS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    p_tile = tile_of(p, i_token, i_head, i_column, HEADS, SIZE, BLOCK, CHUNK, R)
    m_row = tl.arange(0, CHUNK) < rows
    m_column = i_column + tl.arange(0, BLOCK) < SIZE
    b_tile = b_tile.to(p.dtype.element_ty)
    if FULL_CHUNKS and SIZE % BLOCK == 0:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=m_row[:, None] & m_column[None, :])


@triton.jit
def row_of(p, i_token, i_head, HEADS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):
    """Pointers to one number of every token of a chunk, from `[tokens, HEADS]`."""
    o_row = tl.arange(0, CHUNK)
    if R.reverse:
        o_row = -o_row
    return p + i_token.to(tl.int64) * HEADS + i_head // (R.heads // HEADS) + o_row * HEADS


@triton.jit
def load_scales(p_scale, i_token, i_head, rows, CHUNK: tl.constexpr, FULL_CHUNKS: tl.constexpr, R: tl.constexpr):
    """Factors of the values of a chunk `[CHUNK]`, in float32; 0 from `rows` on."""
    p_row = row_of(p_scale, i_token, i_head, R.value_scale_heads, CHUNK, R)
    if FULL_CHUNKS:
        b_scale = tl.load(p_row)
    else:
        b_scale = tl.load(p_row, mask=tl.arange(0, CHUNK) < rows, other=0.0)
    return b_scale.to(tl.float32)


@triton.jit
def skip_of(p_skip, i_batch, i_head, R: tl.constexpr):
    """How much of the value itself the outputs of a head take."""
    p_skip += i_head // (R.heads // R.skip_heads)
    if R.skip_batch:
        p_skip += i_batch * R.skip_heads
    return tl.load(p_skip).to(tl.float32)


@triton.jit
def vector_at(p, i_token, i_head, i_column, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """Pointers to channels of one head of a token, from `[tokens, HEADS, SIZE]`, and which of them exist, `[BLOCK]`."""
    o_column = i_column + tl.arange(0, BLOCK)
    return p + (i_token * HEADS + i_head // (R.heads // HEADS)) * SIZE + o_column, o_column < SIZE


@triton.jit
def load_vector(p, i_token, i_head, i_column, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """The same in float32."""
    p_vector, m_vector = vector_at(p, i_token, i_head, i_column, HEADS, SIZE, BLOCK, R)
    if SIZE % BLOCK == 0:
        b_vector = tl.load(p_vector)
    else:
        b_vector = tl.load(p_vector, mask=m_vector, other=0.0)
    return b_vector.to(tl.float32)


@triton.jit
def state_of(p, i_index, i_head, i_column, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Pointers to the state `[BLOCK_K, BLOCK_V]` of one head, and which of them exist."""
    o_row, o_column = tl.arange(0, BLOCK_K), i_column + tl.arange(0, BLOCK_V)
    p_state = p + (i_index.to(tl.int64) * R.heads + i_head) * (R.width * R.channels)
    m_state = (o_row < R.width)[:, None] & (o_column < R.channels)[None, :]
    if R.transposed:
        p_state += o_row[:, None] + o_column[None, :] * R.width
    else:
        p_state += o_row[:, None] * R.channels + o_column[None, :]
    return p_state, m_state


@triton.jit
def dot(b_left, b_right, R: tl.constexpr):
    """Dot of two tiles, in the dtype of the one that is not scores or a state, or wider."""
    if R.wide:
        b_product = tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), input_precision="tf32")
    elif b_left.dtype == tl.float32:
        b_product = tl.dot(b_left.to(b_right.dtype), b_right, input_precision=R.precision)
    else:
        b_product = tl.dot(b_left, b_right.to(b_left.dtype), input_precision=R.precision)
    return b_product


@triton.jit
def stored_values(b_weighted, b_value, R: tl.constexpr):
    """Values times decays and factors, which states take, as an operand: of TF32 where float16 does not hold products with factors.
    Rounded here, as tensor cores drop digits."""
    if R.wide and R.value_scale_heads > 0:
        b_bits = (b_weighted.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        b_weighted = tl.where(tl.abs(b_weighted) < float("inf"), b_bits.to(tl.float32, bitcast=True), b_weighted)
    else:
        b_weighted = b_weighted.to(b_value.dtype)
    return b_weighted


@triton.jit
def add_to_state(b_state, b_left, b_right, R: tl.constexpr):
    """A state and the dot of two tiles, of which one may be `stored_values`."""
    if b_left.dtype != b_right.dtype:
        b_state = tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), b_state, input_precision="tf32")
    else:
        b_state = tl.dot(b_left, b_right, b_state, input_precision=R.precision)
    return b_state


@triton.jit
def log2_decays(b_log):
    """Natural log decays as base-2 exponents."""
    return tl.where(b_log < MIN_LOG, MIN_LOG, b_log) * LOG2_E


@triton.jit
def scalar_logs(
    p_hi, p_lo, p_gamma, i_batch, i_head, i_row, rows, CHUNK: tl.constexpr, FULL_CHUNKS: tl.constexpr, R: tl.constexpr
):
    """Cumulative log decays of a chunk and their total, each as hi and lo, as `sums_kernel` stored them.

    The hi parts are multiples of 2^-8, whose sums and differences are exact; the lo parts are small. For bfloat16 hi is the
    whole sum: sums are below 2^14 and lose less than 2^-10, less than the rounding of scores.
    """
    o_row = tl.arange(0, CHUNK)
    if R.g_heads > 0:
        b_hi, hi = tl.load(p_hi + i_row + o_row), tl.load(p_hi + i_row + (CHUNK - 1))
        b_lo, lo = b_hi, hi
        if R.hi_lo:
            b_lo, lo = tl.load(p_lo + i_row + o_row), tl.load(p_lo + i_row + (CHUNK - 1))
    else:
        hi, lo = split_hi_lo(log2_decays(gamma_of(p_gamma, i_batch, i_head, R)), R)
        if FULL_CHUNKS:
            count = CHUNK * 1.0
            b_count = (o_row + 1).to(tl.float32)
        else:
            count = tl.minimum(tl.maximum(rows, 0), CHUNK).to(tl.float32)
            b_count = tl.minimum((o_row + 1).to(tl.float32), count)
        b_hi, b_lo = hi * b_count, lo * b_count
        hi, lo = hi * count, lo * count
    return b_hi, b_lo, hi, lo


@triton.jit
def gamma_of(p_gamma, i_batch, i_head, R: tl.constexpr):
    p_gamma += i_head // (R.heads // R.gamma_heads)
    if R.gamma_batch:
        p_gamma += i_batch * R.gamma_heads
    return tl.load(p_gamma).to(tl.float32)


@triton.jit
def split_hi_lo(b_log, R: tl.constexpr):
    b_lo = b_log * 0.0
    if R.hi_lo:
        b_hi = tl.floor(b_log * 256.0) * 0.00390625
        b_lo = b_log - b_hi
        b_log = b_hi
    return b_log, b_lo


@triton.jit
def hi_plus_lo(b_hi, b_lo, R: tl.constexpr):
    if R.hi_lo:
        b_hi += b_lo
    return b_hi


@triton.jit
def edge_decays(b_hi, b_lo, hi, lo, R: tl.constexpr):
    """Decays from the chunk's start to each token, for reads of the state, and from each token to the chunk's end, for updates."""
    b_up_to = tl.exp2(hi_plus_lo(b_hi, b_lo, R))
    b_from = tl.exp2(hi_plus_lo(hi - b_hi, lo - b_lo, R))
    if R.back:
        b_up_to, b_from = b_from, b_up_to
    return b_up_to, b_from


@triton.jit
def weighted_scores(b_scores, b_hi, b_lo, CHUNK: tl.constexpr, R: tl.constexpr, LATER_COLUMNS: tl.constexpr):
    """Scores times scalar decays, causally masked. LATER_COLUMNS: columns come after rows in time."""
    o_row = tl.arange(0, CHUNK)
    if LATER_COLUMNS:
        m_seen = o_row[:, None] <= o_row[None, :]
    else:
        m_seen = o_row[:, None] >= o_row[None, :]
    if R.decay == "scalar":
        b_log = b_hi[:, None] - b_hi[None, :]
        if R.hi_lo:
            b_log += b_lo[:, None] - b_lo[None, :]
        if LATER_COLUMNS:
            b_log = -b_log
        b_scores = b_scores * tl.exp2(b_log)
    return tl.where(m_seen, b_scores * R.scale, 0.0)


@triton.jit
def select_sums(b_matrix, b_tile, EXACT: tl.constexpr):
    """Sums over rows that a 0/1 matrix selects. float32 values are split into three bfloat16 terms."""
    b_first = b_tile.to(tl.bfloat16)
    b_sum = tl.dot(b_matrix, b_first)
    if not EXACT:
        b_rest = b_tile - b_first.to(tl.float32)
        b_second = b_rest.to(tl.bfloat16)
        b_third = (b_rest - b_second.to(tl.float32)).to(tl.bfloat16)
        b_sum = tl.dot(b_matrix, b_third, tl.dot(b_matrix, b_second, b_sum))
    return b_sum


@triton.jit
def prefix_decays(b_log, CHUNK: tl.constexpr, R: tl.constexpr):
    """Decay from the start of a chunk up to each token, that of the token included."""
    o_row = tl.arange(0, CHUNK)
    b_matrix = tl.where(o_row[:, None] >= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
    return tl.exp2(select_sums(b_matrix, b_log, R.exact_logs) * LOG2_E)


@triton.jit
def suffix_decays(b_log, CHUNK: tl.constexpr, R: tl.constexpr):
    """Decay after each token up to the end of a chunk."""
    o_row = tl.arange(0, CHUNK)
    b_matrix = tl.where(o_row[:, None] < o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
    return tl.exp2(select_sums(b_matrix, b_log, R.exact_logs) * LOG2_E)


@triton.jit
def start_logs(b_log, CHUNK: tl.constexpr, R: tl.constexpr):
    """`mild_exponents` of the decays from the start of a chunk to each token."""
    o_row = tl.arange(0, CHUNK)
    b_matrix = tl.where(o_row[:, None] >= o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
    return mild_exponents(select_sums(b_matrix, b_log, R.exact_logs) * LOG2_E)


@triton.jit
def mild_exponents(b_start):
    """Exponents from the start of a chunk, 0 from the first token on at which one is large; the tokens before that.

    Nothing of a token depends on later ones, whose decays must not change its rounding.
    """
    b_strong = tl.where(tl.max(tl.abs(b_start), axis=1) < MAX_START_EXPONENT, 0, 1)
    m_mild = tl.cumsum(b_strong, axis=0) == 0
    return tl.where(m_mild[:, None], b_start, 0.0), m_mild


@triton.jit
def level_decays(b_log, level, CHUNK: tl.constexpr, R: tl.constexpr):
    """In blocks of 2^(level + 1) tokens: the decay between each token and the middle of its block."""
    o_row = tl.arange(0, CHUNK)
    o_middle = (o_row >> level | 1) << level
    b_after = (o_row[None, :] >= o_middle[:, None]) & (o_row[None, :] <= o_row[:, None])
    b_before = (o_row[None, :] < o_middle[:, None]) & (o_row[None, :] > o_row[:, None])
    return tl.exp2(select_sums(tl.where(b_after | b_before, 1.0, 0.0).to(tl.bfloat16), b_log, R.exact_logs) * LOG2_E)


@triton.jit
def level_pairs(level, CHUNK: tl.constexpr, BACK: tl.constexpr):
    """Pairs of tokens on either side of the middle of one block; the later one is the row, or the column backward in time."""
    o_half = tl.arange(0, CHUNK) >> level
    if BACK:
        pairs = (o_half[None, :] & 1) > (o_half[:, None] & 1)
    else:
        pairs = (o_half[:, None] & 1) > (o_half[None, :] & 1)
    return pairs & ((o_half >> 1)[:, None] == (o_half >> 1)[None, :])


@triton.jit
def totals_of(p_totals, i_row, i_column, rows, CHUNK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Exponents of the decay over a whole chunk `[BLOCK]`, from those of all chunks; i_row is that of its first token."""
    o_column = i_column + tl.arange(0, BLOCK)
    return tl.load(p_totals + i_row // CHUNK * SIZE + o_column, mask=(o_column < SIZE) & (rows > 0), other=0.0)


@triton.jit
def log_tile(
    p_gk,
    i_token,
    i_head,
    i_column,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL_CHUNKS: tl.constexpr,
    R: tl.constexpr,
):
    """Natural log decays per channel of a chunk, in float32, clipped at MIN_LOG."""
    b_log = load_tile(p_gk, i_token, i_head, i_column, rows, R.gk_heads, SIZE, BLOCK, CHUNK, FULL_CHUNKS, R).to(tl.float32)
    return tl.where(b_log < MIN_LOG, MIN_LOG, b_log)
