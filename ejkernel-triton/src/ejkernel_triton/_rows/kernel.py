"""Normalisation of rows: `rms_norm`, and `layer_norm`, which subtracts the mean first (`CENTRED`).

A single-pass program holds whole rows in registers, so every array is read once. Wider rows are split over cooperating programs
(`cooperative`), or one looped program reads them twice, the second time in reverse order, so that it starts with cached data.
The persistent kernel for the widest rows (`persistent`) prefetches the next ones meanwhile. Statistics and sums are float32.

Rows are centred twice: the mean of a row far from zero is rounded by more than the row may spread.

In backward each program loops over its tiles in a fixed order and writes one partial sum of the parameters' gradients; a final
reduction combines them, without atomics. For wide rows a first kernel computes the two row sums that the gradient of x needs;
the second processes column tiles, last rows first, which are still cached.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, square_unit
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import BackwardConfig, ForwardConfig, padded_width
from ejkernel_triton._rows.cooperative import OPAQUE_ZERO, arrive_and_wait, spin_limit, splits_of, zero_counters
from ejkernel_triton._rows.persistent import norm_forward_persistent_kernel
from ejkernel_triton._rows.splits import (
    combine_statistics,
    finish_split,
    inverse_deviation,
    squares_of,
    store_partial_statistics,
    with_parameters,
)

ABSENT, SHARED, PER_BATCH = 0, 1, 2
"""How a parameter is stored: not at all, `[1, d]`, or `[b, d]` with b > 1."""


@triton.jit
def norm_forward_kernel(
    p_x,
    p_scale,
    p_offset,
    rows,
    rows_per_batch,
    p_out,
    p_mean,
    p_rstd,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_row = i_row < rows
    m_width = o_width < WIDTH
    m_tile = m_row[:, None] & m_width[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    o_param = (i_row // rows_per_batch).to(tl.int64)[:, None] * WIDTH + o_width[None, :]

    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if CENTRED:
        b_mean = tl.sum(b_x, axis=1) / WIDTH  # [ROWS]
        b_x = tl.where(m_width[None, :], b_x - b_mean[:, None], 0.0)
        b_rest = tl.sum(b_x, axis=1) / WIDTH  # [ROWS], what the mean's rounding left
        b_rstd = inverse_deviation(squares_of(b_x, 1, UNIT), b_rest, WIDTH, EPSILON, UNIT)  # [ROWS]
        b_x -= b_rest[:, None]
        if SAVE:
            tl.store(p_mean + i_row, b_mean + b_rest, mask=m_row)
    else:
        b_rstd = inverse_deviation(squares_of(b_x, 1, UNIT), 0.0, WIDTH, EPSILON, UNIT)  # [ROWS]
    b_out = with_parameters(
        b_x * b_rstd[:, None], p_scale, p_offset, o_width, o_param, m_width, m_tile, SCALE, OFFSET, SCALE_OFFSET
    )
    tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)
    if SAVE:
        tl.store(p_rstd + i_row, b_rstd, mask=m_row)


@triton.jit
def norm_forward_looped_kernel(
    p_x,
    p_scale,
    p_offset,
    rows_per_batch,
    p_out,
    p_mean,
    p_rstd,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each lane tracks mean and sum of squared differences of its columns (Welford); the lanes are combined at the end.

    Centred rows are taken relative to the mean of a few columns: what is rounded is then small beside their spread.
    """
    i_row = tl.program_id(0)
    o_row = i_row.to(tl.int64) * WIDTH
    o_param = (i_row // rows_per_batch).to(tl.int64) * WIDTH
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    b_lane_mean = tl.zeros([BLOCK], tl.float32)
    b_squares = tl.zeros([BLOCK], tl.float32)
    b_pivot = 0.0
    if CENTRED:
        PIVOTS: tl.constexpr = 128 if BLOCK > 128 else BLOCK
        o_pivot = tl.arange(0, PIVOTS)
        b_pivots = tl.load(p_x + o_row + o_pivot, mask=o_pivot < WIDTH, other=0.0).to(tl.float32)  # [PIVOTS]
        b_pivot = tl.sum(b_pivots) / (PIVOTS if WIDTH > PIVOTS else WIDTH)
    for i_step in tl.range(0, STEPS, num_stages=STAGES):
        o_width = i_step * BLOCK + o_block
        m_width = o_width < WIDTH
        b_x = tl.load(p_x + o_row + o_width, mask=m_width, other=0.0).to(tl.float32)  # [BLOCK]
        if CENTRED:
            b_x -= b_pivot
            b_distance = b_x - b_lane_mean
            b_lane_mean = tl.where(m_width, b_lane_mean + b_distance / (i_step + 1), b_lane_mean)
            b_squares = tl.where(m_width, b_squares + (b_distance * UNIT) * ((b_x - b_lane_mean) * UNIT), b_squares)
        else:
            b_x *= UNIT
            b_squares += b_x * b_x

    b_mean = 0.0
    if CENTRED:
        b_count = ((WIDTH - o_block + BLOCK - 1) // BLOCK).to(tl.float32)  # [BLOCK], columns of each lane
        b_mean = tl.sum(b_lane_mean * b_count) / WIDTH
        b_lane_mean = (b_lane_mean - b_mean) * UNIT
        b_squares += b_count * b_lane_mean * b_lane_mean
    b_rstd = inverse_deviation(tl.sum(b_squares), 0.0, WIDTH, EPSILON, UNIT)

    for i_back in tl.range(0, STEPS, num_stages=STAGES):
        o_width = (STEPS - 1 - i_back) * BLOCK + o_block
        m_width = o_width < WIDTH
        b_x = tl.load(p_x + o_row + o_width, mask=m_width, other=0.0).to(tl.float32)  # [BLOCK]
        b_out = with_parameters(
            ((b_x - b_pivot - b_mean) * b_rstd)[None, :],
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
        tl.store(p_out + (o_row + o_width)[None, :], b_out.to(p_out.dtype.element_ty), mask=m_width[None, :])
    if SAVE:
        if CENTRED:
            tl.store(p_mean + i_row, b_pivot + b_mean)
        tl.store(p_rstd + i_row, b_rstd)


@triton.jit
def norm_forward_cooperative_kernel(
    p_x,
    p_scale,
    p_offset,
    p_counters_before,
    items,
    rows_per_batch,
    p_out,
    p_mean,
    p_rstd,
    p_counters,
    p_sums,
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
):
    """A program holds one split of a row (`cooperative`). Its partial sums are the mean and the centred sum of squares."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // SPLITS
    i_split = tl.program_id(0) % SPLITS
    o_width = i_split * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    o_row = i_row.to(tl.int64) * WIDTH
    b_stored = tl.load(p_x + o_row + o_width, mask=o_width < WIDTH, other=0.0)  # [BLOCK]
    b_x = b_stored.to(tl.float32)
    store_partial_statistics(b_x, b_stored, p_sums, items, tl.program_id(0), i_split, items >> 31, WIDTH, BLOCK, CENTRED, UNIT)
    arrived, deferred, zero = arrive_and_wait(p_counters + i_row, i_split, SPLITS, SPIN_LIMIT)
    if arrived:
        b_pivot, b_mean, b_rstd = combine_statistics(p_sums, items, i_row, WIDTH, BLOCK, SPLITS_BLOCK, CENTRED, EPSILON, UNIT)
        finish_split(
            b_stored, p_scale, p_offset, p_out, p_mean, p_rstd, b_pivot, b_mean, b_rstd, i_row, i_split, zero, rows_per_batch,
            WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
        )  # fmt: skip
        if deferred != 0:
            for i_other in tl.range(0, SPLITS):
                if ((deferred >> i_other) & 1) != 0:
                    o_other = i_other * BLOCK + tl.arange(0, BLOCK)
                    b_other = tl.load(p_x + o_row + o_other, mask=o_other < WIDTH, other=0.0)
                    finish_split(
                        b_other, p_scale, p_offset, p_out, p_mean, p_rstd, b_pivot, b_mean, b_rstd, i_row, i_other, zero,
                        rows_per_batch, WIDTH, BLOCK, CENTRED, SCALE, OFFSET, SAVE, SCALE_OFFSET,
                    )  # fmt: skip


@triton.jit
def norm_row_means_kernel(
    p_x,
    p_scale,
    p_mean,
    p_rstd,
    p_grad,
    rows,
    p_mean_weighted,
    p_mean_product,
    p_rest,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Row means of the weighted gradient, of its product with the normalised row, and of the centred row; `rows` rows share one
    scale."""
    i_row = tl.program_id(0)
    o_row = i_row.to(tl.int64) * WIDTH
    o_scale = (i_row // rows).to(tl.int64) * WIDTH if SCALE == 2 else 0
    b_mean = tl.load(p_mean + i_row) if CENTRED else 0.0
    b_rstd = tl.load(p_rstd + i_row)
    b_weighted_sum = tl.zeros([BLOCK], tl.float32)
    b_product_sum = tl.zeros([BLOCK], tl.float32)
    b_rest_sum = tl.zeros([BLOCK], tl.float32)
    for i_step in tl.range(0, (WIDTH + BLOCK - 1) // BLOCK, num_stages=STAGES):
        o_width = i_step * BLOCK + tl.arange(0, BLOCK)
        m_width = o_width < WIDTH
        b_x = tl.load(p_x + o_row + o_width, mask=m_width, other=0.0).to(tl.float32)  # [BLOCK]
        b_weighted = tl.load(p_grad + o_row + o_width, mask=m_width, other=0.0).to(tl.float32)  # [BLOCK]
        if SCALE != 0:
            b_weighted *= tl.load(p_scale + o_scale + o_width, mask=m_width, other=0.0).to(tl.float32) + SCALE_OFFSET
        b_weighted_sum += b_weighted
        if CENTRED:
            b_x = tl.where(m_width, b_x - b_mean, 0.0)
            b_rest_sum += b_x
        b_product_sum += b_weighted * (b_x * b_rstd)
    b_weighted_mean = tl.sum(b_weighted_sum) / WIDTH
    b_product_mean = tl.sum(b_product_sum) / WIDTH
    if CENTRED:
        b_rest = tl.sum(b_rest_sum) / WIDTH
        b_product_mean -= b_rest * b_rstd * b_weighted_mean
        tl.store(p_rest + i_row, b_rest)
        tl.store(p_mean_weighted + i_row, b_weighted_mean)
    tl.store(p_mean_product + i_row, b_product_mean)


@triton.jit
def norm_backward_kernel(
    p_x,
    p_scale,
    p_mean,
    p_rstd,
    p_grad,
    p_mean_weighted,
    p_mean_product,
    p_rest,
    p_added,
    rows,
    programs,
    p_dx,
    p_dscale,
    p_doffset,
    p_dx_too,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SPLIT: tl.constexpr,
    ADDED: tl.constexpr,
    TWICE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`rows` rows share one parameter row (a group); `programs` programs share a group.

    With SPLIT a tile has some columns of its rows, whose means are inputs. With ADDED the gradient of x has another added to it;
    with TWICE it is written in a second dtype too.
    """
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_program = tl.program_id(0) // COLUMNS
    i_group = (i_program // programs).to(tl.int64)
    o_width = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    if SCALE != 0:
        o_scale = i_group * WIDTH if SCALE == 2 else 0
        b_scale = tl.load(p_scale + o_scale + o_width, mask=m_width, other=0.0).to(tl.float32) + SCALE_OFFSET  # [BLOCK]
    b_dscale = tl.zeros([ROWS, BLOCK], tl.float32)
    b_doffset = tl.zeros([ROWS, BLOCK], tl.float32)

    for i_tile in tl.range(i_program % programs, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        i_local = (tl.cdiv(rows, ROWS) - 1 - i_tile if SPLIT else i_tile) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        m_row = i_local < rows
        i_row = i_group * rows + i_local
        m_tile = m_row[:, None] & m_width[None, :]
        o_tile = i_row[:, None] * WIDTH + o_width[None, :]
        b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        b_rstd = tl.load(p_rstd + i_row, mask=m_row, other=0.0)  # [ROWS]
        b_weighted = b_grad
        if SCALE != 0:
            b_weighted = b_grad * b_scale[None, :]
        if OFFSET:
            b_doffset += b_grad
        if CENTRED:
            b_x = tl.where(m_width[None, :], b_x - tl.load(p_mean + i_row, mask=m_row, other=0.0)[:, None], 0.0)
        if SPLIT:
            b_product = tl.load(p_mean_product + i_row, mask=m_row, other=0.0)  # [ROWS]
        else:
            b_product = tl.sum(b_weighted * (b_x * b_rstd[:, None]), axis=1) / WIDTH  # [ROWS]
        if CENTRED:
            if SPLIT:
                b_rest = tl.load(p_rest + i_row, mask=m_row, other=0.0)  # [ROWS]
                b_mean_weighted = tl.load(p_mean_weighted + i_row, mask=m_row, other=0.0)  # [ROWS]
            else:
                b_rest = tl.sum(b_x, axis=1) / WIDTH  # [ROWS], what the mean's rounding left
                b_mean_weighted = tl.sum(b_weighted, axis=1) / WIDTH  # [ROWS]
                b_product -= b_rest * b_rstd * b_mean_weighted
            b_x -= b_rest[:, None]
        b_normalised = b_x * b_rstd[:, None]
        if SCALE != 0:
            b_dscale += b_grad * b_normalised
        b_dx = b_weighted - b_normalised * b_product[:, None]
        if CENTRED:
            b_dx -= b_mean_weighted[:, None]
        b_dx *= b_rstd[:, None]
        if ADDED:
            b_dx += tl.load(p_added + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
        if TWICE:
            tl.store(p_dx_too + o_tile, b_dx.to(p_dx_too.dtype.element_ty), mask=m_tile)

    o_partial = i_program.to(tl.int64) * WIDTH + o_width
    if SCALE != 0:
        tl.store(p_dscale + o_partial, tl.sum(b_dscale, axis=0), mask=m_width)
    if OFFSET:
        tl.store(p_doffset + o_partial, tl.sum(b_doffset, axis=0), mask=m_width)


def storage(parameter: Any) -> int:
    if parameter is None:
        return ABSENT
    return PER_BATCH if parameter.shape[0] > 1 else SHARED


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def norm_forward(call: NormCall, inputs: NormInputs, config: ForwardConfig, *, centred: bool) -> tuple[Any, Any, Any]:
    """out, and each row's mean (if centred) and rstd, None if they are not saved."""
    x, scale, offset = inputs
    shape = x.shape
    save = call.save_residuals
    if not x.size:
        rstd = jnp.full(shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, jnp.float32)
        return x, jnp.zeros_like(rstd) if save and centred else None, rstd if save else None
    absent = ((1,), jnp.float32)
    statistic = (shape[:-1], jnp.float32)
    arrays = (x, x if scale is None else scale, x if offset is None else offset)
    constants = {
        "WIDTH": shape[-1], "CENTRED": centred, "SCALE": storage(scale), "OFFSET": storage(offset), "SAVE": save,
        "EPSILON": call.epsilon, "UNIT": square_unit(x.dtype, call.epsilon), "SCALE_OFFSET": call.scale_offset,
        "num_warps": config.num_warps,
    }  # fmt: skip
    results = ((shape, x.dtype), statistic if save and centred else absent, statistic if save else absent)
    out, mean, rstd, *_ = _launch_forward(arrays, results, shape, config, constants)
    return out, mean if save and centred else None, rstd if save else None


def _launch_forward(arrays: Any, results: Any, shape: Any, config: ForwardConfig, constants: dict[str, Any]) -> list[Any]:
    """The results, followed by the scratch arrays of cooperative kernels."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    programs, repetition = min(config.programs, rows), rows // shape[0]
    persistent = (rows, programs) if programs else ()
    opaque_zero = (OPAQUE_ZERO,) if programs else ()
    if config.cooperative:
        splits = splits_of(width, config.block)
        deferred = (((rows * splits,), jnp.int32),) if programs else ()
        return call_kernel(
            norm_forward_persistent_kernel if programs else norm_forward_cooperative_kernel,
            (*arrays, zero_counters(rows), *persistent, rows * splits, repetition, *opaque_zero),
            (*results, ((rows,), jnp.int32), ((1 + 2 * constants["CENTRED"], rows * splits), jnp.float32), *deferred),
            grid=(programs or rows) * splits,
            input_output_aliases={len(arrays): len(results)},
            BLOCK=config.block,
            SPLITS_BLOCK=next_power_of_2(splits),
            SPIN_LIMIT=spin_limit(),
            **({"STAGES": config.num_stages} if programs else {}),
            **constants,
        )
    if programs:
        raise ValueError(
            f"cfg: got programs={config.programs} without cooperative: only cooperative kernels are persistent; take 0"
        )
    if config.block:
        looped = {"BLOCK": config.block, "STAGES": config.num_stages, **constants}
        return call_kernel(norm_forward_looped_kernel, (*arrays, repetition), results, grid=rows, **looped)
    tile = {"BLOCK": next_power_of_2(width), "ROWS": config.rows, **constants}
    return call_kernel(norm_forward_kernel, (*arrays, rows, repetition), results, grid=cdiv(rows, config.rows), **tile)


def norm_backward(call: NormCall, inputs: NormInputs, mean: Any, rstd: Any, grad: Any, config: BackwardConfig) -> NormInputs:
    """Gradients from the cotangent of out; `mean` is None where the rows are not centred."""
    return norm_backward_added(call, inputs, mean, rstd, grad, config, None, call.x.dtype)[0]


def norm_backward_added(
    call: NormCall, inputs: NormInputs, mean: Any, rstd: Any, grad: Any, config: BackwardConfig, added: Any, dtype: Any
) -> tuple[NormInputs, Any]:
    """`norm_backward` with an array that is added to the gradient of x, or None; and that gradient in another dtype too."""
    x, scale, offset = inputs
    if not x.size:
        return NormInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs)), x.astype(dtype)
    width = x.shape[-1]
    groups = x.shape[0] if PER_BATCH in (storage(scale), storage(offset)) else 1
    rows = math.prod(x.shape[:-1]) // groups
    programs = min(config.programs, cdiv(rows, config.rows))
    if scale is None and offset is None:
        programs = cdiv(rows, config.rows)
    elif groups > 1:
        programs = min(programs, cdiv(config.programs, groups))
    arrays = (x, x if scale is None else scale, rstd if mean is None else mean, rstd, grad)
    constants = {
        "WIDTH": width, "BLOCK": config.block or padded_width(call), "CENTRED": mean is not None, "SCALE": storage(scale),
        "SCALE_OFFSET": call.scale_offset, "STAGES": config.num_stages, "num_warps": config.num_warps,
    }  # fmt: skip
    partial = ((groups, programs, width), jnp.float32)
    absent = ((1,), jnp.float32)
    twice = jnp.dtype(dtype) != x.dtype
    d_x_too = (x.shape, dtype) if twice else absent
    results = ((x.shape, x.dtype), absent if scale is None else partial, absent if offset is None else partial, d_x_too)
    means = (rstd, rstd, rstd)
    if config.block:
        of_rows = (groups * rows,), jnp.float32
        sums = (of_rows if constants["CENTRED"] else absent, of_rows, of_rows if constants["CENTRED"] else absent)
        means = call_kernel(norm_row_means_kernel, (*arrays, rows), sums, grid=groups * rows, **constants)
    d_x, d_scale, d_offset, d_x_too = call_kernel(
        norm_backward_kernel,
        (*arrays, *means, x if added is None else added, rows, programs),
        results,
        grid=groups * programs * cdiv(width, constants["BLOCK"]),
        ROWS=config.rows,
        OFFSET=offset is not None,
        SPLIT=config.block != 0,
        ADDED=added is not None,
        TWICE=twice,
        **constants,
    )
    gradients = NormInputs(d_x, sum_of_partials(d_scale, scale), sum_of_partials(d_offset, offset))
    return gradients, d_x_too if twice else d_x


def sum_of_partials(partials: Any, parameter: Any) -> Any:
    """Sum `[groups, programs, d]` to the parameter's `[1 or b, d]`."""
    if parameter is None:
        return None
    total = jnp.sum(partials, axis=1 if parameter.shape[0] == partials.shape[0] else (0, 1))
    return total.reshape(parameter.shape).astype(parameter.dtype)
