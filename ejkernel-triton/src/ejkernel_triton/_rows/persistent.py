"""Persistent cooperative normalisation of the widest rows: each program loops over splits of rows and prefetches the next.

A program that reads, then sums, then writes leaves the memory system idle in between, and few programs of wide rows fit on a
multiprocessor. Here the next split is prefetched to shared memory before the current one is summed.

Programs arrive at a row, then write the previous row, at which the others have arrived meanwhile. A program writes the splits
deferred to it at the end (`cooperative`).
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from ejkernel_triton._rows.cooperative import all_arrived, arrive, force_load, pack_pairs, unpack_pairs, wait_or_defer
from ejkernel_triton._rows.splits import combine_statistics, finish_split, store_partial_statistics


@triton.jit
def norm_forward_persistent_kernel(
    p_x,
    p_scale,
    p_offset,
    p_counters_before,
    rows,
    programs,
    items,
    rows_per_batch,
    zero,
    p_out,
    p_mean,
    p_rstd,
    p_counters,
    p_sums,
    p_deferred,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`programs` programs per split share the rows."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_first = tl.program_id(0) // SPLITS
    i_split = tl.program_id(0) % SPLITS
    o_width = i_split * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    b_none = tl.zeros([BLOCK], p_x.dtype.element_ty)
    b_before = pack_pairs(b_none)
    spin_limit = SPIN_LIMIT + zero
    any_deferred = zero
    for i_step in tl.range(0, tl.cdiv(rows - i_first, programs), num_stages=STAGES):
        i_row = i_first + i_step * programs
        b_stored = tl.load(p_x + i_row.to(tl.int64) * WIDTH + o_width, mask=o_width < WIDTH, other=0.0)  # [BLOCK]
        b_x = force_load(b_stored, zero)
        if zero == 0:  # always (`force_load`); outside of a branch, Triton would hoist code that depends on memory only
            store_partial_statistics(
                b_x, b_stored, p_sums, items, i_row * SPLITS + i_split, i_split, zero >> 1, WIDTH, BLOCK, CENTRED, UNIT
            )
            deferred = arrive(p_counters + i_row, SPLITS, SPIN_LIMIT)
            tl.store(p_deferred + i_row * SPLITS + i_split, deferred)
            any_deferred |= deferred
            if i_step > 0:
                arrived, spin_limit = wait_or_defer(p_counters + i_row - programs, i_split, spin_limit, SPLITS, SPIN_LIMIT)
                if arrived:
                    b_pivot, b_mean, b_rstd = combine_statistics(
                        p_sums, items, i_row - programs, WIDTH, BLOCK, SPLITS_BLOCK, CENTRED, EPSILON, UNIT
                    )
                    finish_split(
                        unpack_pairs(b_before, b_none), p_scale, p_offset, p_out, p_mean, p_rstd, b_pivot, b_mean, b_rstd,
                        i_row - programs, i_split, zero, rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
                    )  # fmt: skip
        b_before = pack_pairs(b_stored)
    i_last = i_first + (tl.cdiv(rows - i_first, programs) - 1) * programs
    arrived, spin_limit = wait_or_defer(p_counters + i_last, i_split, spin_limit, SPLITS, SPIN_LIMIT)
    if arrived:
        b_pivot, b_mean, b_rstd = combine_statistics(p_sums, items, i_last, WIDTH, BLOCK, SPLITS_BLOCK, CENTRED, EPSILON, UNIT)
        finish_split(
            unpack_pairs(b_before, b_none), p_scale, p_offset, p_out, p_mean, p_rstd, b_pivot, b_mean, b_rstd, i_last, i_split,
            zero, rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
        )  # fmt: skip
    if any_deferred != 0:
        tl.debug_barrier()  # one thread stored what all threads read now
        for i_step in tl.range(0, tl.cdiv(rows - i_first, programs)):
            i_row = i_first + i_step * programs
            deferred = tl.load(p_deferred + i_row * SPLITS + i_split)
            if (deferred != 0) & all_arrived(p_counters + i_row, SPLITS):
                b_pivot, b_mean, b_rstd = combine_statistics(
                    p_sums, items, i_row, WIDTH, BLOCK, SPLITS_BLOCK, CENTRED, EPSILON, UNIT
                )
                for i_other in tl.range(0, SPLITS):
                    if ((deferred >> i_other) & 1) != 0:
                        o_other = i_other * BLOCK + tl.arange(0, BLOCK)
                        p_other = p_x + i_row.to(tl.int64) * WIDTH + o_other
                        b_other = tl.load(p_other, mask=o_other < WIDTH, other=0.0)
                        finish_split(
                            b_other, p_scale, p_offset, p_out, p_mean, p_rstd, b_pivot, b_mean, b_rstd, i_row, i_other, zero,
                            rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
                        )  # fmt: skip
