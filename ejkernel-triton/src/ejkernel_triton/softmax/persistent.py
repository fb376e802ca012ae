"""Persistent softmax of wide rows, which prefetches the next row or split: forward for whole rows, backward for splits. The
other two combinations were slower than other kernels at every width."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._rows.cooperative import all_arrived, arrive, force_load, pack_pairs, unpack_pairs, upcast, wait_or_defer
from ejkernel_triton.softmax.splits import (
    LOWEST,
    backward_of_split,
    combine_products,
    forward_of_split,
    logits_of,
    split_offsets,
)

MAX_HELD_WIDTH = tl.constexpr(32768)
"""Widest row whose float32 weights stay in registers; those of wider rows are recomputed."""


@triton.jit
def softmax_forward_persistent_kernel(
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
        o_tile, m_tile, m_where = split_offsets(i_row, 0, p_where, middle, inner, WIDTH, BLOCK, WHERE)
        if STAGES == 1:
            b_stored = b_next
            i_next = i_row + programs
            p_next = p_x + i_next.to(tl.int64) * WIDTH + o_width
            b_next = tl.load(p_next, mask=(o_width < WIDTH) & (i_next < rows), other=0.0)  # [1, BLOCK]
        else:
            b_stored = tl.load(p_x + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        b_x = force_load(b_stored, zero)
        if zero == 0:  # always (`force_load`)
            b_x = logits_of(b_x, m_where, SCALE)
            b_max = tl.maximum(tl.max(b_x, axis=1), LOWEST)[:, None]  # [1, 1]
            if BLOCK > MAX_HELD_WIDTH:
                b_x = logits_of(upcast(b_stored, zero >> 1), m_where, SCALE)
            b_weights = tl.exp(b_x - b_max)
            b_sum = tl.sum(b_weights, axis=1)[:, None]  # [1, 1]
            b_inverse = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
            if BLOCK > MAX_HELD_WIDTH:
                b_out = forward_of_split(b_stored, m_where, b_max, b_inverse, zero >> 2, SCALE)
            else:
                b_out = b_weights * b_inverse
            tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_backward_persistent_cooperative_kernel(
    p_out,
    p_grad,
    p_where,
    p_counters_before,
    rows,
    programs,
    items,
    middle,
    inner,
    zero,
    p_dx,
    p_counters,
    p_sums,
    p_deferred,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`programs` programs per split share the rows."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_first = tl.program_id(0) // SPLITS
    i_split = tl.program_id(0) % SPLITS
    steps = tl.cdiv(rows - i_first, programs)
    b_none = tl.zeros([1, BLOCK], p_out.dtype.element_ty)
    b_out_before = pack_pairs(b_none)
    b_grad_before = pack_pairs(b_none)
    spin_limit = SPIN_LIMIT + zero
    any_deferred = zero
    for i_step in tl.range(0, steps, num_stages=STAGES):
        i_row = i_first + i_step * programs
        o_tile, m_tile, m_where = split_offsets(i_row, i_split, p_where, middle, inner, WIDTH, BLOCK, WHERE)
        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
        if WHERE != 0:
            b_grad = tl.where(m_where, b_grad, 0.0)
        b_x, b_dx = force_load(b_out, zero), force_load(b_grad, zero)
        if zero == 0:  # always (`force_load`); outside of a branch, Triton would hoist code that depends on memory only
            tl.store(p_sums + i_row * SPLITS + i_split + tl.arange(0, 1), tl.sum(b_x * b_dx, axis=1))
            deferred = arrive(p_counters + i_row, SPLITS, SPIN_LIMIT)
            tl.store(p_deferred + i_row * SPLITS + i_split, deferred)
            any_deferred |= deferred
            if i_step > 0:
                arrived, spin_limit = wait_or_defer(p_counters + i_row - programs, i_split, spin_limit, SPLITS, SPIN_LIMIT)
                if arrived:
                    b_sum = combine_products(p_sums, i_row - programs, SPLITS, SPLITS_BLOCK)
                    o_tile, m_tile, m_where = split_offsets(i_row - programs, i_split, p_where, middle, inner, WIDTH, BLOCK, 0)
                    b_dx = backward_of_split(
                        unpack_pairs(b_out_before, b_none), unpack_pairs(b_grad_before, b_none), b_sum, zero, SCALE
                    )
                    tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
        b_out_before = pack_pairs(b_out)
        b_grad_before = pack_pairs(b_grad)
    i_last = i_first + (steps - 1) * programs
    arrived, spin_limit = wait_or_defer(p_counters + i_last, i_split, spin_limit, SPLITS, SPIN_LIMIT)
    if arrived:
        b_sum = combine_products(p_sums, i_last, SPLITS, SPLITS_BLOCK)
        o_tile, m_tile, m_where = split_offsets(i_last, i_split, p_where, middle, inner, WIDTH, BLOCK, 0)
        b_dx = backward_of_split(unpack_pairs(b_out_before, b_none), unpack_pairs(b_grad_before, b_none), b_sum, zero, SCALE)
        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
    if any_deferred != 0:
        tl.debug_barrier()  # one thread stored what all threads read now
        for i_step in tl.range(0, steps):
            i_row = i_first + i_step * programs
            deferred = tl.load(p_deferred + i_row * SPLITS + i_split)
            if (deferred != 0) & all_arrived(p_counters + i_row, SPLITS):
                b_sum = combine_products(p_sums, i_row, SPLITS, SPLITS_BLOCK)
                for i_other in tl.range(0, SPLITS):
                    if ((deferred >> i_other) & 1) != 0:
                        o_tile, m_tile, m_where = split_offsets(i_row, i_other, p_where, middle, inner, WIDTH, BLOCK, WHERE)
                        b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
                        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
                        if WHERE != 0:
                            b_grad = tl.where(m_where, b_grad, 0.0)
                        b_dx = backward_of_split(b_out, b_grad, b_sum, zero, SCALE)
                        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
