"""The Triton kernels of `quantized_matmul`."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton.quantized_matmul.decode import joined, load_factors, load_words, weights_at


@triton.jit
def tile_of_group(
    p_bounds, i_tile, rows, MATRICES: tl.constexpr, MEMBERS: tl.constexpr, INTERVALS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Matrix, first row and rows of a tile; whether it has a matrix. Both are counted through all members.

    Rows of a member are in MATRICES + 2 intervals between bounds: those before the first group with a matrix, one for each matrix,
    and those behind. Each has as many tiles as its rows need, one interval after the other; tiles behind the last have 0 rows.
    INTERVALS is at least the number of all, a power of two.
    """
    OWN: tl.constexpr = MATRICES + 2
    o_i = tl.arange(0, INTERVALS)
    b_member = o_i // OWN
    p_bound = p_bounds + b_member * (OWN + 1) + o_i % OWN
    m_i = o_i < MEMBERS * OWN
    b_low = tl.load(p_bound, mask=m_i, other=0)  # [INTERVALS]
    b_rows = tl.load(p_bound + 1, mask=m_i, other=0) - b_low
    b_tiles = (b_rows + BLOCK_M - 1) // BLOCK_M
    b_at = (i_tile - tl.cumsum(b_tiles, axis=0) + b_tiles) * BLOCK_M
    m_own = (b_at >= 0) & (b_at < b_rows)
    i_interval = tl.sum(tl.where(m_own, o_i, 0), axis=0)
    i_first = tl.sum(tl.where(m_own, b_member * rows + b_low + b_at, 0), axis=0)
    height = tl.sum(tl.where(m_own, b_rows - b_at, 0), axis=0)
    i_own = i_interval % OWN
    has_matrix = (i_own > 0) & (i_own <= MATRICES)
    return tl.maximum(i_interval // OWN * MATRICES + i_own - 1, 0), i_first, height, has_matrix


@triton.jit
def product_kernel(
    p_left,
    p_w,
    p_scales,
    p_zeros,
    p_bounds,
    rows,
    tiles_m,
    p_out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED_INNER: tl.constexpr,
    W_COUNT: tl.constexpr,
    SCALES_COUNT: tl.constexpr,
    ZEROS_COUNT: tl.constexpr,
    MATRICES: tl.constexpr,
    INTERVALS: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PERIOD: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """`left . S`, or `left . S'` with PACKED_INNER, of stored weights S `[ROWS, COLUMNS]`, which are packed along columns.

    With PACKED_INNER left is `[MEMBERS * rows, PERIOD, periods]`: columns of one place are contiguous. Out is
    `[SPLIT, MEMBERS * rows, N]`: each program sums over one of SPLIT sections of the contracted axis.

    W_COUNT, SCALES_COUNT and ZEROS_COUNT count the matrices of each array; one that members share is that of every member. Without
    groups (MATRICES = 0) a member has one matrix and tiles_m tiles of rows. With them tiles_m are those of all members, each of one
    group or of rows without a matrix, which are stored as 0: see `tile_of_group`.
    """
    PERIODS: tl.constexpr = (COLUMNS + PERIOD - 1) // PERIOD
    N: tl.constexpr = ROWS if PACKED_INNER else COLUMNS
    BLOCK_N: tl.constexpr = BLOCK_R if PACKED_INNER else BLOCK_P * PERIOD
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    K: tl.constexpr = PERIODS if PACKED_INNER else ROWS
    WIDTH: tl.constexpr = PERIODS * PERIOD if PACKED_INNER else ROWS
    BLOCK_K: tl.constexpr = BLOCK_P if PACKED_INNER else BLOCK_R
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (BLOCKS_K + SPLIT - 1) // SPLIT
    WORDS: tl.constexpr = PERIOD * BITS // 32
    ROW_WORDS: tl.constexpr = (COLUMNS * BITS + 31) // 32
    GROUPS: tl.constexpr = COLUMNS // GROUP
    MASKED: tl.constexpr = ROWS % BLOCK_R != 0 or COLUMNS % (BLOCK_P * PERIOD) != 0
    SAME: tl.constexpr = GROUP % PERIOD == 0
    DTYPE: tl.constexpr = p_left.dtype.element_ty
    i_m = tl.program_id(0) % tiles_m
    i_rest = tl.program_id(0) // tiles_m
    i_n = i_rest % TILES_N
    i_split = i_rest // TILES_N % SPLIT
    i_begin = i_split * STEPS
    i_end = tl.minimum(i_begin + STEPS, BLOCKS_K)
    if MATRICES > 0:
        i_matrix, i_first, height, has_matrix = tile_of_group(p_bounds, i_m, rows, MATRICES, MEMBERS, INTERVALS, BLOCK_M)
        i_first = i_first.to(tl.int64)
        i_end = tl.where(has_matrix & (height > 0), i_end, i_begin)
    else:
        i_matrix = i_rest // (TILES_N * SPLIT)
        i_first = i_matrix.to(tl.int64) * rows + i_m * BLOCK_M
        height = rows - i_m * BLOCK_M

    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    o_r = tl.arange(0, BLOCK_R)
    o_p = tl.arange(0, BLOCK_P)
    m_m = (o_m < height)[:, None]
    p_l = p_left + i_first * WIDTH + o_m[:, None] * WIDTH + o_k[None, :]
    p_w += (i_matrix % W_COUNT).to(tl.int64) * ROWS * ROW_WORDS
    p_scales += (i_matrix % SCALES_COUNT).to(tl.int64) * ROWS * GROUPS
    p_zeros += (i_matrix % ZEROS_COUNT).to(tl.int64) * ROWS * GROUPS
    if PACKED_INNER:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        b_acc = ()
        for _ in tl.static_range(PERIOD):
            b_acc += (tl.zeros([BLOCK_M, BLOCK_P], tl.float32),)
    for i_step in tl.range(i_begin, i_end, num_stages=STAGES):
        i_k = i_step * BLOCK_K
        m_left = m_m
        if K % BLOCK_K != 0:
            m_left = m_m & (o_k < K - i_k)[None, :]
        i_r = (i_n * BLOCK_R) if PACKED_INNER else i_k
        i_p = i_k if PACKED_INNER else (i_n * BLOCK_P)
        m_r = o_r < ROWS - i_r
        p_row_w = p_w + i_r.to(tl.int64) * ROW_WORDS
        p_row_scales = p_scales + i_r.to(tl.int64) * GROUPS
        p_row_zeros = p_zeros + i_r.to(tl.int64) * GROUPS
        b_words = load_words(p_row_w, o_r, i_p + o_p, m_r, ROW_WORDS, WORDS, MASKED)
        if not PACKED_INNER:
            b_left = tl.load(p_l + i_k, mask=m_left, other=0.0)  # [BLOCK_M, BLOCK_K]
            b_next = ()
        for i_place in tl.static_range(PERIOD):
            if i_place == 0 or not SAME:
                b_factor, b_shift = load_factors(
                    p_row_scales,
                    p_row_zeros,
                    o_r,
                    i_p,
                    m_r,
                    COLUMNS,
                    GROUP,
                    PERIOD,
                    BLOCK_P,
                    i_place,
                    MODE,
                    BITS,
                    MASKED,
                    DTYPE,
                )
            b_weights = weights_at(b_words, b_factor, b_shift, i_place, MODE, BITS, DTYPE, ASM)  # [BLOCK_R, BLOCK_P]
            if PACKED_INNER:
                b_left = tl.load(p_l + i_place * PERIODS + i_k, mask=m_left, other=0.0)
                b_acc = tl.dot(b_left, tl.trans(b_weights), b_acc, input_precision=PRECISION)
            else:
                b_next += (tl.dot(b_left, b_weights, b_acc[i_place], input_precision=PRECISION),)
        if not PACKED_INNER:
            b_acc = b_next
    b_out = b_acc if PACKED_INNER else joined(b_acc)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    i_out = i_split.to(tl.int64) * MEMBERS * rows + i_first
    p_tile = p_out + i_out * N + o_m[:, None] * N + o_n[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m & (o_n < N)[None, :])


@triton.jit
def combine_kernel(p_partial, count, p_out, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum partial results `[SPLIT, count]` in order."""
    i_first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < count - i_first
    b_sum = tl.zeros([BLOCK], tl.float32)
    p_part = p_partial + i_first + o_x
    for _ in tl.static_range(SPLIT):
        b_sum += tl.load(p_part, mask=m_x, other=0.0)
        p_part += count
    tl.store(p_out + i_first + o_x, b_sum.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def unpack_kernel(
    p_w,
    p_scales,
    p_zeros,
    p_out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    W_COUNT: tl.constexpr,
    SCALES_COUNT: tl.constexpr,
    ZEROS_COUNT: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PERIOD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ASM: tl.constexpr,
):
    """Weights `[members, ROWS, COLUMNS]`."""
    ROW_WORDS: tl.constexpr = (COLUMNS * BITS + 31) // 32
    GROUPS: tl.constexpr = COLUMNS // GROUP
    TILES_R: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    TILES_C: tl.constexpr = (COLUMNS + BLOCK_P * PERIOD - 1) // (BLOCK_P * PERIOD)
    WORDS: tl.constexpr = PERIOD * BITS // 32
    MASKED: tl.constexpr = ROWS % BLOCK_R != 0 or COLUMNS % (BLOCK_P * PERIOD) != 0
    SAME: tl.constexpr = GROUP % PERIOD == 0
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    i_c = tl.program_id(0) % TILES_C
    i_r = tl.program_id(0) // TILES_C % TILES_R * BLOCK_R
    i_member = (tl.program_id(0) // (TILES_C * TILES_R)).to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)
    i_p = i_c * BLOCK_P
    m_r = o_r < ROWS - i_r
    p_row_w = p_w + (i_member % W_COUNT * ROWS + i_r) * ROW_WORDS
    p_row_scales = p_scales + (i_member % SCALES_COUNT * ROWS + i_r) * GROUPS
    p_row_zeros = p_zeros + (i_member % ZEROS_COUNT * ROWS + i_r) * GROUPS
    b_words = load_words(p_row_w, o_r, i_p + tl.arange(0, BLOCK_P), m_r, ROW_WORDS, WORDS, MASKED)
    b_weights = ()
    for i_place in tl.static_range(PERIOD):
        if i_place == 0 or not SAME:
            b_factor, b_shift = load_factors(
                p_row_scales,
                p_row_zeros,
                o_r,
                i_p,
                m_r,
                COLUMNS,
                GROUP,
                PERIOD,
                BLOCK_P,
                i_place,
                MODE,
                BITS,
                MASKED,
                DTYPE,
            )
        b_weights += (weights_at(b_words, b_factor, b_shift, i_place, MODE, BITS, DTYPE, ASM),)
    b_out = joined(b_weights)
    o_c = i_c * (BLOCK_P * PERIOD) + tl.arange(0, BLOCK_P * PERIOD)
    p_tile = p_out + (i_member * ROWS + i_r) * COLUMNS + o_r[:, None] * COLUMNS + o_c[None, :]
    if MASKED:
        tl.store(p_tile, b_out, mask=m_r[:, None] & (o_c < COLUMNS)[None, :])
    else:
        tl.store(p_tile, b_out)
