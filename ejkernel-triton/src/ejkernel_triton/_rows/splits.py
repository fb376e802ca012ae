"""Device functions of the normalisation kernels: parameters, and splits of a row."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# ruff: noqa: SIM102 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton._rows.cooperative import upcast


@triton.jit
def with_parameters(
    b_normalised,
    p_scale,
    p_offset,
    o_width,
    o_param,
    m_width,
    m_tile,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    """`normalised * (scale + SCALE_OFFSET) + offset` of a tile [ROWS, BLOCK]."""
    b_out = b_normalised
    if SCALE == 1:
        b_out *= tl.load(p_scale + o_width, mask=m_width, other=0.0).to(tl.float32)[None, :] + SCALE_OFFSET
    if SCALE == 2:
        b_out *= tl.load(p_scale + o_param, mask=m_tile, other=0.0).to(tl.float32) + SCALE_OFFSET
    if OFFSET == 1:
        b_out += tl.load(p_offset + o_width, mask=m_width, other=0.0).to(tl.float32)[None, :]
    if OFFSET == 2:
        b_out += tl.load(p_offset + o_param, mask=m_tile, other=0.0).to(tl.float32)
    return b_out


@triton.jit
def squares_of(b_x, AXIS: tl.constexpr, UNIT: tl.constexpr):
    """The sum of squares of a tile times UNIT, see `square_unit`."""
    b_x *= UNIT
    return tl.sum(b_x * b_x, axis=AXIS)


@triton.jit
def inverse_deviation(b_squares, b_rest, WIDTH: tl.constexpr, EPSILON: tl.constexpr, UNIT: tl.constexpr):
    """`1 / sqrt(variance + EPSILON)`, from the sum of squares of rows times UNIT; b_rest: the mean of these rows."""
    b_rest *= UNIT
    b_variance = tl.maximum(b_squares / WIDTH - b_rest * b_rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return UNIT * tl.rsqrt(b_variance + EPSILON * UNIT * UNIT)


@triton.jit
def finish_split(
    b_x,
    p_scale,
    p_offset,
    p_out,
    p_mean,
    p_rstd,
    b_pivot,
    b_mean,
    b_rstd,
    i_row,
    i_split,
    zero,
    rows_per_batch,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    """Write one split of the output; the first split also writes the row's statistics."""
    o_width = i_split * BLOCK + tl.arange(0, BLOCK)
    m_width = o_width < WIDTH
    o_param = (i_row // rows_per_batch).to(tl.int64) * WIDTH
    b_out = with_parameters(
        ((upcast(b_x, zero) - b_pivot - b_mean) * b_rstd)[None, :],
        p_scale,
        p_offset,
        o_width,
        (o_param + o_width)[None, :],
        m_width,
        m_width[None, :],
        SCALE,
        OFFSET,
        SCALE_OFFSET,
    )
    o_out = (i_row.to(tl.int64) * WIDTH + o_width)[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_width[None, :])
    if SAVE:
        if i_split == 0:
            if CENTRED:
                tl.store(p_mean + i_row, b_pivot + b_mean)
            tl.store(p_rstd + i_row, b_rstd)


@triton.jit
def store_partial_statistics(
    b_x, b_stored, p_sums, items, i_item, i_split, zero, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store the partial statistics of a split [BLOCK]: its (centred) sum of squares times UNIT^2; if rows are centred, its mean and
    what that mean's rounding left."""
    if CENTRED:
        count = tl.minimum(WIDTH - i_split * BLOCK, BLOCK)
        b_split_mean = tl.sum(b_x) / count
        m_width = i_split * BLOCK + tl.arange(0, BLOCK) < WIDTH
        b_x = tl.where(m_width, upcast(b_stored, zero) - b_split_mean, 0.0)
        tl.store(p_sums + items + i_item, b_split_mean)
        tl.store(p_sums + 2 * items + i_item, tl.sum(b_x) / count)
    tl.store(p_sums + i_item, squares_of(b_x, 0, UNIT))


@triton.jit
def combine_statistics(
    p_sums,
    items,
    i_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Combine the partial statistics of a row, in the order of its splits: the mean of the first split, the row's mean beyond
    it, and rstd."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    o_split = tl.arange(0, SPLITS_BLOCK)
    m_split = o_split < SPLITS
    b_squares = tl.load(p_sums + i_row * SPLITS + o_split, mask=m_split, other=0.0, cache_modifier=".cg")  # [PARTS_BLOCK]
    b_pivot, b_mean = 0.0, 0.0
    if CENTRED:
        b_pivot = tl.load(p_sums + items + i_row * SPLITS, cache_modifier=".cg")
        b_means = tl.load(p_sums + items + i_row * SPLITS + o_split, mask=m_split, other=0.0, cache_modifier=".cg")
        b_rests = tl.load(p_sums + 2 * items + i_row * SPLITS + o_split, mask=m_split, other=0.0, cache_modifier=".cg")
        b_means = b_means - b_pivot + b_rests
        b_count = tl.where(m_split, tl.minimum(WIDTH - o_split * BLOCK, BLOCK), 0).to(tl.float32)
        b_mean = tl.sum(b_means * b_count) / WIDTH
        b_rests, b_distance = b_rests * UNIT, (b_means - b_mean) * UNIT
        b_squares += b_count * (b_distance * b_distance - b_rests * b_rests)
    return b_pivot, b_mean, inverse_deviation(tl.sum(b_squares), 0.0, WIDTH, EPSILON, UNIT)
