"""Softmax of wide rows by programs that stay, with the next row, or part of one, on its way (`_rows.streaming`): forward for whole
rows, backward for parts. On an H200 forward for parts and backward for whole rows were behind other kernels at every width."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._rows.meeting import arrive, complete_at, packed, settle, taken, unpacked, widened
from ejkernel_triton.softmax.parts import LOWEST, backward_of_part, forward_of_part, place_of, sum_of_products

WEIGHTS = tl.constexpr(32768)
"""Weights of a row up to this width stay in registers, in float32; those of wider rows are made twice."""


@triton.jit
def softmax_forward_streaming_kernel(
    p_x,
    p_where,
    rows,
    programs,
    middle,
    inner,
    zero,
    p_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_first = tl.program_id(0)
    o_width = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    b_next = tl.zeros([1, BLOCK], p_x.dtype.element_ty)
    if STAGES == 1:
        b_next = tl.load(p_x + i_first.to(tl.int64) * WIDTH + o_width, mask=o_width < WIDTH, other=0.0)
    for i_step in tl.range(0, tl.cdiv(rows - i_first, programs), num_stages=STAGES):
        i_row = i_first + i_step * programs
        o_tile, m_tile, m_part = place_of(i_row, 0, p_where, middle, inner, WIDTH, BLOCK, WHERE)
        if STAGES == 1:
            b_stored = b_next
            i_next = i_row + programs
            p_next = p_x + i_next.to(tl.int64) * WIDTH + o_width
            b_next = tl.load(p_next, mask=(o_width < WIDTH) & (i_next < rows), other=0.0)  # [1, BLOCK]
        else:
            b_stored = tl.load(p_x + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        b_x = taken(b_stored, zero)
        if zero == 0:  # always (`taken`)
            b_x = tl.where(m_part, b_x * SCALE, float("-inf"))
            b_largest = tl.maximum(tl.max(b_x, axis=1), LOWEST)[:, None]  # [1, 1]
            if BLOCK > WEIGHTS:
                b_x = tl.where(m_part, widened(b_stored, zero >> 1) * SCALE, float("-inf"))
            b_weights = tl.exp(b_x - b_largest)
            b_total = tl.sum(b_weights, axis=1)[:, None]  # [1, 1]
            b_inverse = 1.0 / tl.where(b_total == 0.0, 1.0, b_total)
            if BLOCK > WEIGHTS:
                b_out = forward_of_part(b_stored, m_part, b_largest, b_inverse, zero >> 2, SCALE)
            else:
                b_out = b_weights * b_inverse
            tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_backward_streaming_parts_kernel(
    p_out,
    p_grad,
    p_where,
    p_words_before,
    rows,
    programs,
    items,
    middle,
    inner,
    zero,
    p_dx,
    p_words,
    p_sums,
    p_left,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`programs` programs for each part share the rows."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_first = tl.program_id(0) // PARTS
    i_part = tl.program_id(0) % PARTS
    steps = tl.cdiv(rows - i_first, programs)
    b_none = tl.zeros([1, BLOCK], p_out.dtype.element_ty)
    b_out_before = packed(b_none)
    b_grad_before = packed(b_none)
    patience = PATIENCE + zero
    any_left = zero
    for i_step in tl.range(0, steps, num_stages=STAGES):
        i_row = i_first + i_step * programs
        o_tile, m_tile, m_part = place_of(i_row, i_part, p_where, middle, inner, WIDTH, BLOCK, WHERE)
        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        if WHERE != 0:
            b_grad = tl.where(m_part, b_grad, 0.0)
        b_x, b_dx = taken(b_out, zero), taken(b_grad, zero)
        if zero == 0:  # always (`taken`); outside of a branch, Triton would move what depends on memory alone
            tl.store(p_sums + i_row * PARTS + i_part + tl.arange(0, 1), tl.sum(b_x * b_dx, axis=1))
            left = arrive(p_words + i_row, PARTS, PATIENCE)
            tl.store(p_left + i_row * PARTS + i_part, left)
            any_left |= left
            if i_step > 0:
                complete, patience = settle(p_words + i_row - programs, i_part, patience, PARTS, PATIENCE)
                if complete:
                    b_sum = sum_of_products(p_sums, i_row - programs, PARTS, PARTS_BLOCK)
                    o_tile, m_tile, m_part = place_of(i_row - programs, i_part, p_where, middle, inner, WIDTH, BLOCK, 0)
                    b_dx = backward_of_part(unpacked(b_out_before, b_none), unpacked(b_grad_before, b_none), b_sum, zero, SCALE)
                    tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
        b_out_before = packed(b_out)
        b_grad_before = packed(b_grad)
    i_last = i_first + (steps - 1) * programs
    complete, patience = settle(p_words + i_last, i_part, patience, PARTS, PATIENCE)
    if complete:
        b_sum = sum_of_products(p_sums, i_last, PARTS, PARTS_BLOCK)
        o_tile, m_tile, m_part = place_of(i_last, i_part, p_where, middle, inner, WIDTH, BLOCK, 0)
        b_dx = backward_of_part(unpacked(b_out_before, b_none), unpacked(b_grad_before, b_none), b_sum, zero, SCALE)
        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
    if any_left != 0:
        tl.debug_barrier()  # one thread stored what all read now
        for i_step in tl.range(0, steps):
            i_row = i_first + i_step * programs
            left = tl.load(p_left + i_row * PARTS + i_part)
            if (left != 0) & complete_at(p_words + i_row, PARTS):
                b_sum = sum_of_products(p_sums, i_row, PARTS, PARTS_BLOCK)
                for i_other in tl.range(0, PARTS):
                    if ((left >> i_other) & 1) != 0:
                        o_tile, m_tile, m_part = place_of(i_row, i_other, p_where, middle, inner, WIDTH, BLOCK, WHERE)
                        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
                        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
                        if WHERE != 0:
                            b_grad = tl.where(m_part, b_grad, 0.0)
                        b_dx = backward_of_part(b_out, b_grad, b_sum, zero, SCALE)
                        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
