"""Gradients of normalisations of wide rows in one pass, by programs that stay (`streaming`).

A program holds a row, or some columns of a few rows, in the width in which they are stored, and its partial sums of the parameters'
gradients in float32. Programs that share rows need each other's sums only for the gradient of x: they arrive with the sums of some
rows, then make the gradient of the rows before, which they still hold.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from ejkernel_triton._rows.meeting import arrive, complete_at, packed, settle, taken, unpacked, widened


@triton.jit
def scale_of(p_scale, o_scale, o_width, m_width, SCALE_OFFSET: tl.constexpr):
    return tl.load(p_scale + o_scale + o_width, mask=m_width, other=0.0).to(tl.float32) + SCALE_OFFSET


@triton.jit
def add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def sums_of_rows(b_weighted, b_normalised, CENTRED: tl.constexpr):
    """[ROWS] of `weighted * normalised`, and of `weighted` if rows are centred: together, since registers would hold the values of
    the second sum while the program waits for the first."""
    if CENTRED:
        return tl.reduce((b_weighted * b_normalised, b_weighted), 1, add_pairs)
    b_sum = tl.sum(b_weighted * b_normalised, axis=1)
    return b_sum, b_sum


@triton.jit
def norm_backward_streaming_kernel(
    p_x,
    p_scale,
    p_mean,
    p_rstd,
    p_grad,
    rows,
    programs,
    zero,
    p_dx,
    p_dscale,
    p_doffset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`rows` rows lie under one parameter row (a group); `programs` programs share them."""
    i_program = tl.program_id(0)
    i_group = i_program // programs
    i_first = i_program % programs
    o_scale = i_group.to(tl.int64) * WIDTH if SCALE == 2 else 0
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    b_dscale = tl.zeros([BLOCK], tl.float32)
    b_doffset = tl.zeros([BLOCK], tl.float32)
    for i_step in tl.range(0, tl.cdiv(rows - i_first, programs), num_stages=STAGES):
        i_row = i_group * rows + i_first + i_step * programs
        o_row = i_row.to(tl.int64) * WIDTH + o_width
        b_x = tl.load(p_x + o_row, mask=m_width, other=0.0)  # [BLOCK]
        b_grad = tl.load(p_grad + o_row, mask=m_width, other=0.0)  # [BLOCK]
        b_normalised, b_weighted = taken(b_x, zero), taken(b_grad, zero)
        if zero == 0:  # always (`taken`); outside of a branch, scale would be brought through shared memory as well
            b_rstd = tl.load(p_rstd + i_row)
            b_mean = tl.load(p_mean + i_row) if CENTRED else 0.0
            b_normalised = (b_normalised - b_mean) * b_rstd
            if SCALE != 0:
                b_dscale += b_weighted * b_normalised
            if OFFSET:
                b_doffset += b_weighted
            if SCALE != 0:
                b_weighted *= scale_of(p_scale, o_scale, o_width, m_width, SCALE_OFFSET)
            b_product = tl.sum(b_weighted * b_normalised) / WIDTH
            b_shift = tl.sum(b_weighted) / WIDTH if CENTRED else 0.0
            b_normalised = (widened(b_x, zero >> 1) - b_mean) * b_rstd
            b_weighted = widened(b_grad, zero >> 1)
            if SCALE != 0:
                b_weighted *= scale_of(p_scale, o_scale + zero * 16, o_width, m_width, SCALE_OFFSET)
            b_dx = (b_weighted - b_normalised * b_product - b_shift) * b_rstd
            tl.store(p_dx + o_row, b_dx.to(p_dx.dtype.element_ty), mask=m_width)
    o_partial = i_program.to(tl.int64) * WIDTH + o_width
    if SCALE != 0:
        tl.store(p_dscale + o_partial, b_dscale, mask=m_width)
    if OFFSET:
        tl.store(p_doffset + o_partial, b_doffset, mask=m_width)


@triton.jit
def finish_part_gradient(
    b_x,
    b_grad,
    p_scale,
    o_scale,
    p_mean,
    p_rstd,
    p_sums,
    items,
    i_row,
    m_row,
    i_part,
    zero,
    p_dx,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    """The gradient of a part of some rows [ROWS, BLOCK] from their stored values and everybody's sums."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    o_part = tl.arange(0, PARTS_BLOCK)
    p_part = p_sums + i_row[:, None] * PARTS + o_part[None, :]
    m_part = m_row[:, None] & (o_part < PARTS)[None, :]
    b_product = tl.sum(tl.load(p_part, mask=m_part, other=0.0, cache_modifier=".cg"), axis=1) / WIDTH  # [ROWS]
    b_rstd = tl.load(p_rstd + i_row, mask=m_row, other=0.0)  # [ROWS]
    o_width = i_part * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    b_normalised = widened(b_x, zero)
    if CENTRED:
        b_normalised -= tl.load(p_mean + i_row, mask=m_row, other=0.0)[:, None]
    b_normalised *= b_rstd[:, None]
    b_dx = widened(b_grad, zero)
    if SCALE != 0:
        b_dx *= scale_of(p_scale, o_scale, o_width, m_width, SCALE_OFFSET)[None, :]
    b_dx -= b_normalised * b_product[:, None]
    if CENTRED:
        b_shift = tl.sum(tl.load(p_part + items, mask=m_part, other=0.0, cache_modifier=".cg"), axis=1) / WIDTH
        b_dx -= b_shift[:, None]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    tl.store(p_dx + o_tile, (b_dx * b_rstd[:, None]).to(p_dx.dtype.element_ty), mask=m_row[:, None] & m_width[None, :])


@triton.jit
def norm_backward_streaming_parts_kernel(
    p_x,
    p_scale,
    p_mean,
    p_rstd,
    p_grad,
    p_words_before,
    rows,
    programs,
    items,
    zero,
    p_dx,
    p_dscale,
    p_doffset,
    p_words,
    p_sums,
    p_left,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`rows` rows lie under one parameter row (a group); `programs` programs for each part share them, ROWS at a time."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_part = tl.program_id(0) % PARTS
    i_program = tl.program_id(0) // PARTS
    i_group = i_program // programs
    i_first = i_program % programs
    tiles = tl.cdiv(rows, ROWS)
    steps = tl.cdiv(tiles - i_first, programs)
    p_word = p_words + i_group * tiles + i_first
    p_own_left = p_left + (i_group * tiles + i_first) * PARTS + i_part
    o_scale = i_group.to(tl.int64) * WIDTH if SCALE == 2 else 0
    o_rows = tl.arange(0, ROWS)  # [ROWS]
    o_width = i_part * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    b_dscale = tl.zeros([BLOCK], tl.float32)
    b_doffset = tl.zeros([BLOCK], tl.float32)
    b_none = tl.zeros([ROWS, BLOCK], p_x.dtype.element_ty)
    b_x_before = packed(b_none)
    b_grad_before = packed(b_none)
    patience = PATIENCE + zero
    any_left = zero
    for i_step in tl.range(0, steps, num_stages=STAGES):
        i_local = (i_first + i_step * programs) * ROWS + o_rows  # [ROWS]
        i_row = i_group * rows + i_local
        m_row = i_local < rows
        m_tile = m_row[:, None] & m_width[None, :]
        o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
        b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0)  # [ROWS, BLOCK]
        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [ROWS, BLOCK]
        b_normalised, b_weighted = taken(b_x, zero), taken(b_grad, zero)
        if zero == 0:  # always (`taken`); outside of a branch, Triton would move what depends on memory alone
            if CENTRED:
                b_normalised -= tl.load(p_mean + i_row, mask=m_row, other=0.0)[:, None]
            b_normalised *= tl.load(p_rstd + i_row, mask=m_row, other=0.0)[:, None]
            if SCALE != 0:
                b_dscale += tl.sum(b_weighted * b_normalised, axis=0)
            if OFFSET:
                b_doffset += tl.sum(b_weighted, axis=0)
            if SCALE != 0:
                b_weighted *= scale_of(p_scale, o_scale, o_width, m_width, SCALE_OFFSET)[None, :]
            p_sum = p_sums + i_row * PARTS + i_part
            b_product, b_sum = sums_of_rows(b_weighted, b_normalised, CENTRED)  # [ROWS]
            tl.store(p_sum, b_product, mask=m_row)
            if CENTRED:
                tl.store(p_sum + items, b_sum, mask=m_row)
            left = arrive(p_word + i_step * programs, PARTS, PATIENCE)
            tl.store(p_own_left + i_step * programs * PARTS, left)
            any_left |= left
            if i_step > 0:
                complete, patience = settle(p_word + (i_step - 1) * programs, i_part, patience, PARTS, PATIENCE)
                if complete:
                    finish_part_gradient(
                        unpacked(b_x_before, b_none), unpacked(b_grad_before, b_none), p_scale, o_scale, p_mean, p_rstd,
                        p_sums, items, i_row - programs * ROWS, o_rows >= 0, i_part, zero >> 1, p_dx,
                        WIDTH, BLOCK, PARTS_BLOCK, CENTRED, SCALE, SCALE_OFFSET,
                    )  # fmt: skip
        b_x_before = packed(b_x)
        b_grad_before = packed(b_grad)
    i_local = (i_first + (steps - 1) * programs) * ROWS + o_rows
    complete, patience = settle(p_word + (steps - 1) * programs, i_part, patience, PARTS, PATIENCE)
    if complete:
        finish_part_gradient(
            unpacked(b_x_before, b_none), unpacked(b_grad_before, b_none), p_scale, o_scale, p_mean, p_rstd, p_sums, items,
            i_group * rows + i_local, i_local < rows, i_part, zero, p_dx, WIDTH, BLOCK, PARTS_BLOCK, CENTRED, SCALE, SCALE_OFFSET,
        )  # fmt: skip
    if any_left != 0:
        tl.debug_barrier()  # one thread stored what all read now
        for i_step in tl.range(0, steps):
            left = tl.load(p_own_left + i_step * programs * PARTS)
            if (left != 0) & complete_at(p_word + i_step * programs, PARTS):
                i_local = (i_first + i_step * programs) * ROWS + o_rows
                i_row = i_group * rows + i_local
                m_row = i_local < rows
                for i_other in tl.range(0, PARTS):
                    if ((left >> i_other) & 1) != 0:
                        o_other = i_other * BLOCK + tl.arange(0, BLOCK)
                        m_other = m_row[:, None] & (o_other < WIDTH)[None, :]
                        o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_other[None, :]
                        b_x = tl.load(p_x + o_tile, mask=m_other, other=0.0)
                        b_grad = tl.load(p_grad + o_tile, mask=m_other, other=0.0)
                        finish_part_gradient(
                            b_x, b_grad, p_scale, o_scale, p_mean, p_rstd, p_sums, items, i_row, m_row, i_other, zero, p_dx,
                            WIDTH, BLOCK, PARTS_BLOCK, CENTRED, SCALE, SCALE_OFFSET,
                        )  # fmt: skip
    o_partial = i_program.to(tl.int64) * WIDTH + o_width
    if SCALE != 0:
        tl.store(p_dscale + o_partial, b_dscale, mask=m_width)
    if OFFSET:
        tl.store(p_doffset + o_partial, b_doffset, mask=m_width)
