"""Normalisation of the widest rows by programs that share them and stay: each walks over parts of rows, the next ones on their way.

A program that first reads, then sums up, then writes leaves memory idle in between, and few programs of wide rows find room on a
multiprocessor. Here the next part is asked for before the current one is summed up, and waits in shared memory.

Programs arrive at a row, then finish the row before, at which the others have arrived meanwhile. What others left to a program, it
finishes at the end (`meeting`).
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from ejkernel_triton._rows.meeting import arrive, complete_at, packed, settle, taken, unpacked
from ejkernel_triton._rows.parts import finish_part, statistics_of_parts, store_part_sums


@triton.jit
def norm_forward_streaming_parts_kernel(
    p_x,
    p_scale,
    p_offset,
    p_words_before,
    rows,
    programs,
    items,
    rows_per_batch,
    zero,
    p_out,
    p_mean,
    p_rstd,
    p_words,
    p_sums,
    p_left,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`programs` programs for each part share the rows."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_first = tl.program_id(0) // PARTS
    i_part = tl.program_id(0) % PARTS
    o_width = i_part * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_none = tl.zeros([BLOCK], p_x.dtype.element_ty)
    b_before = packed(b_none)
    patience = PATIENCE + zero
    any_left = zero
    for i_step in tl.range(0, tl.cdiv(rows - i_first, programs), num_stages=STAGES):
        i_row = i_first + i_step * programs
        b_stored = tl.load(p_x + i_row.to(tl.int64) * WIDTH + o_width, mask=o_width < WIDTH, other=0.0)  # [BLOCK]
        b_x = taken(b_stored, zero)
        if zero == 0:  # always (`taken`); outside of a branch, Triton would move what depends on memory alone
            store_part_sums(b_x, b_stored, p_sums, items, i_row * PARTS + i_part, i_part, zero >> 1, WIDTH, BLOCK, CENTRED)
            left = arrive(p_words + i_row, PARTS, PATIENCE)
            tl.store(p_left + i_row * PARTS + i_part, left)
            any_left |= left
            if i_step > 0:
                complete, patience = settle(p_words + i_row - programs, i_part, patience, PARTS, PATIENCE)
                if complete:
                    b_mean, b_rstd = statistics_of_parts(
                        p_sums, items, i_row - programs, WIDTH, BLOCK, PARTS_BLOCK, CENTRED, EPSILON
                    )
                    finish_part(
                        unpacked(b_before, b_none), p_scale, p_offset, p_out, p_mean, p_rstd, b_mean, b_rstd, i_row - programs,
                        i_part, zero, rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
                    )  # fmt: skip
        b_before = packed(b_stored)
    i_last = i_first + (tl.cdiv(rows - i_first, programs) - 1) * programs
    complete, patience = settle(p_words + i_last, i_part, patience, PARTS, PATIENCE)
    if complete:
        b_mean, b_rstd = statistics_of_parts(p_sums, items, i_last, WIDTH, BLOCK, PARTS_BLOCK, CENTRED, EPSILON)
        finish_part(
            unpacked(b_before, b_none), p_scale, p_offset, p_out, p_mean, p_rstd, b_mean, b_rstd, i_last, i_part, zero,
            rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
        )  # fmt: skip
    if any_left != 0:
        tl.debug_barrier()  # one thread stored what all read now
        for i_step in tl.range(0, tl.cdiv(rows - i_first, programs)):
            i_row = i_first + i_step * programs
            left = tl.load(p_left + i_row * PARTS + i_part)
            if (left != 0) & complete_at(p_words + i_row, PARTS):
                b_mean, b_rstd = statistics_of_parts(p_sums, items, i_row, WIDTH, BLOCK, PARTS_BLOCK, CENTRED, EPSILON)
                for i_other in tl.range(0, PARTS):
                    if ((left >> i_other) & 1) != 0:
                        o_other = i_other * BLOCK + tl.arange(0, BLOCK)
                        p_other = p_x + i_row.to(tl.int64) * WIDTH + o_other
                        b_other = tl.load(p_other, mask=o_other < WIDTH, other=0.0)
                        finish_part(
                            b_other, p_scale, p_offset, p_out, p_mean, p_rstd, b_mean, b_rstd, i_row, i_other, zero,
                            rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
                        )  # fmt: skip
