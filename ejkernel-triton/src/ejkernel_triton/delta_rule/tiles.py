"""Device functions of the delta rule: chunks of tokens, their decays, the inverse of a triangular matrix. `R` is a `rules.Params`.

Exponents are sums of log decays, never positive: a strong decay costs the weak ones beside it no precision. The one exception are
mild decays per channel, see `linear_recurrence.tiles.MAX_START_EXPONENT`. Exponents are powers of two.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.linear_recurrence.tiles import LOG2_E, MIN_LOG, load_tile, row_of

NORM_EPSILON = tl.constexpr(1e-6)
"""`ejkernel.operations.delta_rule.interface.NORM_EPSILON`."""
SQUARE_UNIT = tl.constexpr(2.0**-41)
"""`square_unit` of float32 with this epsilon."""
SHORTEST = tl.constexpr(2.0**-61)
"""Below this one by the length of a row, products of rows may overflow."""
LEAST_BETA = tl.constexpr(1e-10)
"""Smaller ones are taken for this: the gradient of beta is divided by it."""
ROWS = tl.constexpr(7)
"""Numbers of each token that `prepare` keeps, as rows of a chunk."""
READ_KEY, WRITE_KEY, READ_QUERY, COARSE, FINE, QUERY_LENGTH, KEY_LENGTH = (tl.constexpr(row) for row in range(7))
"""What multiplies the product of key and state, the keys that are added to the state, and the product of query and state; the
sums of log decays from the start of the chunk, in two parts; one by the lengths of query and key."""


@triton.jit
def sequence_of(p_bounds, p_first, i_batch, i_sequence, length, sequences, R: tl.constexpr):
    """Begin and end of a sequence and its first chunk. One past the last of the call is the rest of the tokens."""
    begin, end, i_chunk = 0, length, 0
    if R.packed:
        o_bounds = (0 if R.shared else i_batch) * (sequences + 2) + i_sequence
        begin, end = tl.load(p_bounds + o_bounds), tl.load(p_bounds + o_bounds + 1)
        i_chunk = tl.load(p_first + o_bounds)
    return begin, end, i_chunk


@triton.jit
def first_token(begin, end, i_position, R: tl.constexpr):
    """The first token, in the order of time, of a chunk that begins after so many tokens of its sequence."""
    if R.reverse:
        i_token = end - 1 - i_position
    else:
        i_token = begin + i_position
    return i_token


@triton.jit
def chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, length, chunks, sequences, R: tl.constexpr, CHUNK: tl.constexpr):
    """First token of a chunk in the order of time, how many tokens it has, and how many of them take part: all or none."""
    if R.packed:
        i_sequence = tl.load(p_sequence + (0 if R.shared else i_batch) * chunks + i_chunk)
        used = i_sequence <= sequences
        begin, end, first = sequence_of(p_bounds, p_first, i_batch, tl.minimum(i_sequence, sequences), length, sequences, R)
        i_position = (i_chunk - first) * CHUNK
        count = tl.where(used, tl.minimum(end - begin - i_position, CHUNK), 0)
        rows = tl.where(i_sequence < sequences, count, 0)
    else:
        begin, end = 0, length
        i_position = i_chunk * CHUNK
        count = tl.minimum(length - i_position, CHUNK)
        rows = count
    return first_token(begin, end, i_position, R), count, rows


@triton.jit
def narrow(b_tile, R: tl.constexpr):
    """In the dtype of products."""
    if R.bfloat16:
        b_tile = b_tile.to(tl.bfloat16)
    else:
        b_tile = b_tile.to(tl.float32)
    return b_tile


@triton.jit
def product(b_left, b_right, R: tl.constexpr):
    return tl.dot(narrow(b_left, R), narrow(b_right, R), input_precision=R.precision)


@triton.jit
def matrix_of(
    p, i_index, i_head, i_row, i_column, COLUMNS: tl.constexpr, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Pointers to a part `[BLOCK_K, BLOCK_V]` of a matrix `[width, COLUMNS]` of one head, and which of them exist."""
    o_row, o_column = i_row + tl.arange(0, BLOCK_K), i_column + tl.arange(0, BLOCK_V)
    p_matrix = p + (i_index.to(tl.int64) * R.heads + i_head) * (R.width * COLUMNS)
    m_matrix = (o_row < R.width)[:, None] & (o_column < COLUMNS)[None, :]
    return p_matrix + o_row[:, None] * COLUMNS + o_column[None, :], m_matrix


@triton.jit
def state_of(p, i_index, i_head, i_row, i_column, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Pointers to a part of the state of one head, and which of them exist."""
    return matrix_of(p, i_index, i_head, i_row, i_column, R.channels, R, BLOCK_K, BLOCK_V)


@triton.jit
def load_state(p, i_index, i_head, i_row, i_column, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    p_tile, m_tile = state_of(p, i_index, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
    if R.width % BLOCK_K == 0 and R.channels % BLOCK_V == 0:
        b_state = tl.load(p_tile)
    else:
        b_state = tl.load(p_tile, mask=m_tile, other=0.0)
    return b_state


@triton.jit
def store_state(p, b_state, i_index, i_head, i_row, i_column, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    p_tile, m_tile = state_of(p, i_index, i_head, i_row, i_column, R, BLOCK_K, BLOCK_V)
    b_state = b_state.to(p.dtype.element_ty)
    if R.width % BLOCK_K == 0 and R.channels % BLOCK_V == 0:
        tl.store(p_tile, b_state)
    else:
        tl.store(p_tile, b_state, mask=m_tile)


@triton.jit
def square_of(p, i_square, CHUNK: tl.constexpr):
    """Pointers to a matrix `[CHUNK, CHUNK]` of tokens by tokens."""
    o_row = tl.arange(0, CHUNK)
    return p + i_square.to(tl.int64) * (CHUNK * CHUNK) + o_row[:, None] * CHUNK + o_row[None, :]


@triton.jit
def numbers_of(p_rows, i_square, ROW: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers to one kind of the numbers of a chunk's tokens."""
    return p_rows + (i_square.to(tl.int64) * ROWS + ROW) * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def total_of(p_rows, i_square, CHUNK: tl.constexpr):
    """The exponent of the decay over a whole chunk."""
    p_last = p_rows + (i_square.to(tl.int64) * ROWS + COARSE) * CHUNK + (CHUNK - 1)
    return tl.load(p_last) + tl.load(p_last + (FINE - COARSE) * CHUNK)


@triton.jit
def beta_of(p_beta, i_token, i_head, rows, CHUNK: tl.constexpr, R: tl.constexpr):
    """beta of a chunk's tokens, none of them 0."""
    if R.beta_heads > 0:
        p_row = row_of(p_beta, i_token, i_head, R.beta_heads, CHUNK, R)
        b_beta = tl.load(p_row, mask=tl.arange(0, CHUNK) < rows, other=0.0).to(tl.float32)
        b_beta = tl.where(tl.abs(b_beta) < LEAST_BETA, LEAST_BETA, b_beta)
    else:
        b_beta = tl.full([CHUNK], 1.0, tl.float32)
    return b_beta


@triton.jit
def log_sums(p_decay, i_token, i_head, rows, CHUNK: tl.constexpr, R: tl.constexpr):
    """Sums of a chunk's log decays up to each token, and after each, in two parts each.

    The first parts are multiples of 2^-8, whose sums and differences are exact, the rests are small.
    """
    p_row = row_of(p_decay, i_token, i_head, R.decay_heads, CHUNK, R)
    b_log = tl.load(p_row, mask=tl.arange(0, CHUNK) < rows, other=0.0).to(tl.float32)
    b_log = tl.where(b_log < MIN_LOG, MIN_LOG, b_log) * LOG2_E
    b_coarse = tl.floor(b_log * 256.0) * 0.00390625
    b_fine = b_log - b_coarse
    coarse, fine = tl.sum(b_coarse, axis=0), tl.sum(b_fine, axis=0)
    b_coarse, b_fine = tl.cumsum(b_coarse, axis=0), tl.cumsum(b_fine, axis=0)
    return b_coarse, b_fine, (coarse - b_coarse) + (fine - b_fine)


@triton.jit
def pair_decays(b_coarse, b_fine, CHUNK: tl.constexpr):
    """The decay from the token of each column to that of each row, where the row is not earlier; elsewhere 1."""
    o_row = tl.arange(0, CHUNK)
    b_log = (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])
    return tl.exp2(tl.where(o_row[:, None] >= o_row[None, :], b_log, 0.0))


@triton.jit
def squares_of(b_tile, AXIS: tl.constexpr):
    """The sums of squares of rows times SQUARE_UNIT, in float32."""
    b_tile = b_tile.to(tl.float32) * SQUARE_UNIT
    return tl.sum(b_tile * b_tile, axis=AXIS)


@triton.jit
def inverse_length(b_squares):
    """One by the length of each row, from `squares_of`."""
    return 1.0 / tl.sqrt_rn(b_squares + NORM_EPSILON * SQUARE_UNIT * SQUARE_UNIT) * SQUARE_UNIT


@triton.jit
def below_first(i_level, SIZE: tl.constexpr):
    """Of every two blocks of 2^i_level rows on the diagonal, where the one below the first lies."""
    o_block = tl.arange(0, SIZE) >> i_level
    return (o_block[:, None] == o_block[None, :] + 1) & ((o_block & 1) == 0)[None, :]


@triton.jit
def unit_lower_inverse(b_strict, CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr):
    """The inverse of the identity plus a strictly lower triangular matrix.

    The inverses of two blocks A, C on the diagonal with B below A become that of both: `-C' B A'` takes the place of B. From blocks
    of one row on, this is as stable as forward substitution, and made of products: up to blocks of 16 rows, of these alone.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    o_row, o_block = tl.arange(0, 16), tl.arange(0, BLOCKS)
    m_diagonal = (o_block[:, None] == o_block[None, :])[:, None, :, None]
    b_blocks = tl.reshape(b_strict, [BLOCKS, 16, BLOCKS, 16])
    b_blocks = tl.sum(tl.where(m_diagonal, b_blocks, 0.0), axis=2)  # [BLOCKS, 16, 16]
    m_same = (o_row[:, None] == o_row[None, :])[None, :, :]
    b_inverses = tl.where(m_same, 1.0, tl.where(below_first(0, 16)[None, :, :], -b_blocks, 0.0))
    for i_level in tl.static_range(1, 4):
        b_corners = tl.where(below_first(i_level, 16)[None, :, :], b_blocks, 0.0)
        b_corners = tl.dot(b_inverses, b_corners, input_precision=R.precision)
        b_inverses -= tl.dot(b_corners, b_inverses, input_precision=R.precision)
    b_inverse = tl.reshape(tl.where(m_diagonal, b_inverses[:, :, None, :], 0.0), [CHUNK, CHUNK])
    for i_level in tl.static_range(4, LEVELS):
        b_corners = tl.where(below_first(i_level, CHUNK), b_strict, 0.0)
        b_corners = tl.dot(b_inverse, b_corners, input_precision=R.precision)
        b_inverse -= tl.dot(b_corners, b_inverse, input_precision=R.precision)
    return b_inverse


@triton.jit
def log_tile(
    p_decay, i_token, i_head, i_row, rows, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr
):
    """Natural log decays per channel of a chunk, in float32; those that are 0 in effect are cut off."""
    b_log = load_tile(p_decay, i_token, i_head, i_row, rows, R.decay_heads, R.width, BLOCK_K, CHUNK, WHOLE, R)
    b_log = b_log.to(tl.float32)
    return tl.where(b_log < MIN_LOG, MIN_LOG, b_log)
